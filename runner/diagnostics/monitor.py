"""Symptoms in the logged numbers of a run: each detector is a function of its history and its settings. They are called
with one record after another while it trains, or with its metrics.jsonl afterwards.

The thresholds are chosen so that none of 54 healthy runs of this program (pretraining, SFT, LoRA and DPO on
data/samples, AdamW and Muon, packed and not; 19 to 520 logged steps) has a symptom; the largest value among them is
given with each.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.filesystem import open_regular
from common.limits import parse_record
from runner.diagnostics.symptoms import (
    PAGE,
    RECENT,
    RISING_EVALS,
    WINDOW,
    LoggedRecord,
    RunFacts,
    RunHistory,
    Symptom,
    lr_after_divergence,
)

# A step may have the rows of one of several data sets only: with adapters and one sequence per step, healthy losses
# alternate between 0 and 8.
# So a loss counts as high if it is above the largest of the WINDOW before it, not above their mean.
# nats (healthy: 0.9); losses before it at least, and after it, which show that it is over
SPIKE_RISE, SPIKE_BEFORE, SPIKE_AFTER = 1.5, 10, 3
# nats of the level of the loss above its lowest, with all RECENT losses above those that led to the lowest
DIVERGING_RISE = 1.5
STAYING_RISE, STAYING_SHARE = 0.5, 0.3  # nats, and of the lowest level: a smaller rise that WINDOW losses have kept
ABOVE_UNIFORM = 1.1  # times the loss of a uniform guess
FAR_ABOVE_UNIFORM = 2.0  # the same for one logged loss, before there are RECENT (healthy: 1.02)
# logged gradient norms in a row that are exactly 0 (healthy: none); of the loss of a uniform guess
DEAD_RECORDS, DEAD_LOSS = 2, 0.99
# logged steps at least; of the run; fall of the level (healthy, at half of the run: 0.2)
FLAT_RECORDS, FLAT_SHARE, FLAT_FALL = 20, 0.5, 0.02
# standard errors of a fall; a learning rate and a gradient norm that may be too small for weights
FALL_NOISE, SMALL_LR, SMALL_NORM = 2.0, 1e-5, 1e-2
# fall of the validation loss; a training loss that is small enough not to fall any more
FLAT_EVAL_FALL, LEARNT_LOSS = 0.01, 0.5
NOTHING_LEARNT = 0.95  # of the loss of a uniform guess, at half of a run from random weights (healthy: 0.75)
UNTRAINED, EARLY_STEPS = 0.9, 10  # of the loss of a uniform guess, in the first steps from weights (healthy: 0.5)
# norms above the limit; their median / the limit (healthy: 2.6); logged norms
CLIPPED_SHARE, CLIPPED_TIMES, CLIPPED_MIN = 0.95, 10.0, 20
WAIT_SHARE, WAIT_SECONDS, WAIT_RECORDS = 0.3, 1.0, 5  # of the time of steps (healthy: 0.007); that were waited at least

Detector = Callable[[RunHistory, RunFacts], Symptom | None]
# of a longer metrics.jsonl or train.log the first and the newest half of this is read
MAX_REPLAYED_BYTES = 64 << 20
# the end of `Symptom.message`
REPORTED_SYMPTOM = re.compile(rb"^warning: .*" + re.escape(f"{PAGE}#".encode()) + rb"([a-z-]{1,40})$")
# symptom -> those that it explains
EXCLUDES = {"diverging": ("loss-flat", "loss-spike", "always-clipped"), "loss-flat": ("diverging",)}


def loss_spike(history: RunHistory, facts: RunFacts) -> Symptom | None:
    """Logged losses far above those before, and those after them, within WINDOW, are not: a loss that stays up is
    `diverging`.
    """
    losses, end = history.losses, len(history.losses) - SPIKE_AFTER
    if end <= SPIKE_BEFORE:
        return None
    after = statistics.median(losses[-SPIKE_AFTER:])
    for at in range(max(SPIKE_BEFORE, end - WINDOW), end):
        before = losses[max(0, at - WINDOW) : at]
        if losses[at] >= max(before) + SPIKE_RISE and after <= max(before):
            step, usual = history.steps[at], statistics.median(before)
            measured = f"loss {losses[at]:.2f} at step {step}, {usual:.2f} before it: a spike"
            fix = f"if they come back: optimizer.lr={facts.lr / 2:g}, or {_warmup(facts)}"
            return Symptom("loss-spike", measured, fix)
    return None


def diverging(history: RunHistory, facts: RunFacts) -> Symptom | None:
    if not history.losses:
        return None
    level = history.evaluated.level()
    measured = _dead(history, facts)
    if level is None:
        measured = measured or _far_above_uniform(history, facts)
    else:
        measured = measured or _risen(history, level) or _above_uniform(history, facts, level)
    fix = f"optimizer.lr={lr_after_divergence(facts.lr)} (now {facts.lr:g}), or {_warmup(facts)}"
    return Symptom("diverging", measured, fix) if measured else None


def _risen(history: RunHistory, level: float) -> str | None:
    rise, lowest = level - history.lowest_level, history.lowest_level
    is_far = rise > DIVERGING_RISE and min(history.losses[-RECENT:]) > history.high_at_lowest
    stays = rise > max(STAYING_RISE, STAYING_SHARE * lowest) and min(history.losses[-WINDOW:]) > history.high_at_lowest
    if not is_far and not stays:
        return None
    return f"the loss is {level:.2f} at step {history.steps[-1]} and was {lowest:.2f} at step {history.lowest_step}: training diverges"


def _above_uniform(history: RunHistory, facts: RunFacts, level: float) -> str | None:
    # confident weights may begin above it on other data
    has_risen = not facts.starts_from_weights or level > history.losses[0]
    if facts.uniform_loss is None or level <= ABOVE_UNIFORM * facts.uniform_loss or not has_risen:
        return None
    return f"the loss is {level:.2f} at step {history.steps[-1]}, a uniform guess has {facts.uniform_loss:.2f}: training diverges"


def _dead(history: RunHistory, facts: RunFacts) -> str | None:
    """No gradient reaches the weights any more, and the loss is that of a uniform guess: a loss near 0 has small
    gradients, too.
    """
    loss, step, uniform = history.losses[-1], history.steps[-1], facts.uniform_loss
    if uniform is None or history.zero_gradients < DEAD_RECORDS or loss < DEAD_LOSS * uniform:
        return None
    return (
        f"the gradients of the last {history.zero_gradients} logged steps are exactly 0 and the loss is {loss:.3f} at step {step}, "
        f"a uniform guess has {uniform:.3f}: training has diverged, this model learns nothing any more"
    )


def _far_above_uniform(history: RunHistory, facts: RunFacts) -> str | None:
    first, loss, uniform = history.losses[0], history.losses[-1], facts.uniform_loss
    if uniform is None or len(history.losses) < 2 or loss <= FAR_ABOVE_UNIFORM * uniform or loss <= first:
        return None
    return f"the loss is {loss:.2f} at step {history.steps[-1]} and was {first:.2f} at step {history.steps[0]}, a uniform guess has {uniform:.2f}: training diverges"


def loss_flat(history: RunHistory, facts: RunFacts) -> Symptom | None:
    """The loss has hardly fallen in half of the run.

    Only of a loss in nats per token: others may stay while the model learns.
    """
    level = history.evaluated.level()
    since = bisect_right(history.steps, facts.warmup_steps)
    if (
        level is None
        or facts.uniform_loss is None
        or len(history.losses) - since < FLAT_RECORDS
        or history.steps[-1] < FLAT_SHARE * facts.total_steps
    ):
        return None
    first, step = statistics.median(history.losses[since : since + RECENT]), history.steps[-1]
    fix = f"optimizer.lr={facts.lr * 10:g} (now {facts.lr:g})"
    if (
        not facts.starts_from_weights
        and NOTHING_LEARNT * facts.uniform_loss < level < ABOVE_UNIFORM * facts.uniform_loss
    ):
        measured = f"the loss is {level:.3f} after {step} of {facts.total_steps} steps, a uniform guess has {facts.uniform_loss:.3f}: nothing is learnt"
        return Symptom("loss-flat", measured, fix)
    evaluated = [loss for _, loss, _ in history.evaluated.evaluations]
    has_fallen = len(evaluated) > 1 and evaluated[-1] < (1 - FLAT_EVAL_FALL) * evaluated[0]
    if has_fallen or level < LEARNT_LOSS or abs(first - level) > FLAT_FALL * first:
        return None
    if facts.starts_from_weights:
        if _falls(history.losses[since:]):
            return None
        if facts.lr > SMALL_LR and statistics.median(history.grad_norms or [1.0]) > SMALL_NORM:
            fix = f"compare optimizer.lr (now {facts.lr:g}), or the model already knows this data"
    measured = f"the loss has not fallen: {first:.3f} at step {history.steps[since]}, {level:.3f} at step {step} of {facts.total_steps}"
    return Symptom("loss-flat", measured, fix)


def _falls(losses: list[float]) -> bool:
    """Return whether the mean of the newest losses is below that of the first by more than their noise."""
    size = min(WINDOW, len(losses) // 2)
    first, newest = losses[:size], losses[-size:]
    noise = math.sqrt((statistics.variance(first) + statistics.variance(newest)) / size)
    return statistics.fmean(first) - statistics.fmean(newest) > FALL_NOISE * noise


def high_initial_loss(history: RunHistory, facts: RunFacts) -> Symptom | None:
    """Weights that were trained begin with the loss of random ones: tokenizer, template or language differ from those
    of their training.
    """
    if not (
        facts.starts_from_weights
        and facts.uniform_loss
        and len(history.losses) == 1
        and history.steps[0] <= EARLY_STEPS
    ):
        return None
    if (loss := history.losses[0]) < UNTRAINED * facts.uniform_loss:
        return None
    measured = f"the loss begins at {loss:.2f}, a uniform guess has {facts.uniform_loss:.2f}: the weights of init_from were not trained on data like this"
    return Symptom(
        "high-initial-loss",
        measured,
        "compare tokenizer and template: runner/rows.py with the same overrides shows the rows",
    )


def always_clipped(history: RunHistory, facts: RunFacts) -> Symptom | None:
    """Norms somewhat above the limit are usual.

    Far above it the length of every update is that of the limit, whatever the gradient is.
    """
    norms = history.grad_norms
    if not facts.grad_clip or len(norms) < CLIPPED_MIN:
        return None
    share, middle = sum(norm > facts.grad_clip for norm in norms) / len(norms), statistics.median(norms)
    if share < CLIPPED_SHARE or middle < CLIPPED_TIMES * facts.grad_clip:
        return None
    measured = f"{share:.0%} of the last {len(norms)} logged gradients were clipped, their median norm {middle:.3g} is {middle / facts.grad_clip:.0f} times the limit"
    return Symptom(
        "always-clipped",
        measured,
        f"optimizer.lr={facts.lr / 2:g}, or optimizer.grad_clip={middle:.2g}",
    )


def data_wait(history: RunHistory, facts: RunFacts) -> Symptom | None:
    if history.train_records <= WAIT_RECORDS or history.waited < max(WAIT_SECONDS, WAIT_SHARE * history.seconds):
        return None
    share = history.waited / history.seconds
    measured = f"{share:.0%} of the training time waits for data ({history.waited:.1f} of {history.seconds:.1f} s, data.num_workers={facts.num_workers})"
    workers = min(max(2, 2 * facts.num_workers), max(2, facts.cores))
    fix = (
        f"data.num_workers={workers}"
        if workers > facts.num_workers
        else "every core has a worker: data.packing=best_fit, or a larger model"
    )
    return Symptom("slow-data", measured, fix)


def overfitting(history: RunHistory, facts: RunFacts) -> Symptom | None:
    found = history.evaluated.overfitting
    if found is None:
        return None
    (best_step, best, train_then), (step, loss, train_now) = found
    measured = (
        f"the validation loss was best at step {best_step} ({best:.3f}) and is {loss:.3f} at step {step}, "
        f"the training loss fell from {train_then:.3f} to {train_now:.3f}: overfitting"
    )
    return Symptom(
        "overfitting",
        measured,
        f"train.max_steps={best_step}, or train.patience={RISING_EVALS} ends the run then; more data helps",
    )


def _warmup(facts: RunFacts) -> str:
    return f"schedule.warmup_steps={max(10, 2 * facts.warmup_steps, facts.total_steps // 20)}"


OF_STEPS: dict[str, Detector] = {
    "loss-spike": loss_spike,
    "diverging": diverging,
    "loss-flat": loss_flat,
    "high-initial-loss": high_initial_loss,
    "always-clipped": always_clipped,
    "slow-data": data_wait,
}
OF_EVALUATIONS: dict[str, Detector] = {"overfitting": overfitting}


@dataclass(eq=False)
class RunMonitor:
    """Reports each symptom once. It keeps numbers that were logged, and computes nothing on the device."""

    facts: RunFacts
    _history: RunHistory = field(default_factory=RunHistory)
    _done: set[str] = field(default_factory=set)

    def skip(self, names: Iterable[str]) -> None:
        """Report these symptoms no more."""
        for name in names:
            self._done |= {name, *EXCLUDES.get(name, ())}

    def add(self, record: LoggedRecord) -> list[Symptom]:
        """Return what is new with this record of metrics.jsonl."""
        self._history.add(record)
        found = []
        for name, detect in (OF_EVALUATIONS if record.get("kind") == "eval" else OF_STEPS).items():
            if name not in self._done and (symptom := detect(self._history, self.facts)) is not None:
                found.append(symptom)
                self.skip([name])
        return found


def watch_records(facts: RunFacts, earlier: Path | None, warn: Callable[[str], None]) -> Callable[[LoggedRecord], None]:
    """Return a function that takes each new record and warns of new symptoms.

    `earlier`: metrics.jsonl of a resumed run, which has reported its own.
    """
    monitor, is_watching = RunMonitor(facts), True

    def watch(record: LoggedRecord, is_new: bool = True) -> None:
        nonlocal is_watching
        try:
            symptoms = monitor.add(record) if is_watching else []
        except Exception as error:  # of any kind: a fault in a warning must not end a training
            is_watching, symptoms = False, []
            warn(f"the numbers of this run are not watched any more: {type(error).__name__}: {error}"[:300])
        for symptom in symptoms if is_new else ():
            warn(symptom.message)

    if earlier:
        # the log has those of steps that are trained again, too: it counts where not all records are replayed
        if earlier.exists() and earlier.stat().st_size > MAX_REPLAYED_BYTES:
            monitor.skip(reported_symptoms(earlier.with_name("train.log")))
        for record in read_metrics(earlier):
            watch(record, is_new=False)
    return watch


def read_metrics(path: Path) -> Iterator[LoggedRecord]:
    """Yield the records of a metrics.jsonl, of a long one the first and the newest; a line that is no object is left
    out.
    """
    return filter(None, map(parse_record, _first_and_newest(path)))


def reported_symptoms(log: Path) -> set[str]:
    """Return the names of the symptoms that a train.log warns of."""
    matches = (REPORTED_SYMPTOM.match(line.rstrip()) for line in _first_and_newest(log))
    return {match[1].decode() for match in matches if match}


def _first_and_newest(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, of one above MAX_REPLAYED_BYTES those of the first and the last half of as many bytes;
    none of a file that cannot be read.
    """
    try:
        fd, size = open_regular(path)
        with open(fd, "rb") as file:
            if size <= MAX_REPLAYED_BYTES:
                yield from file
                return
            half = MAX_REPLAYED_BYTES // 2
            yield from file.read(half).split(b"\n")[:-1]
            file.seek(size - half)
            yield from file.read(half).split(b"\n")[1:]
    except OSError:
        return
