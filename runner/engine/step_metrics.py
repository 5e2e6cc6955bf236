"""Steps that wait to be read, and what is done about those that were not finite. No weight has moved in these, however late they are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from common.errors import TrainingError
from common.filesystem import write_json
from data.batching.batch import Batch
from runner.engine.state import TrainState, finite_or_none
from runner.engine.step_output import StepResult, fetch_results

MAX_PENDING_STEPS = 100  # steps: what waits must not grow without end, nor the time until a failure is heard of
RECENT_LOSSES = 50  # how far back a diagnosis looks


def should_flush(state: TrainState) -> bool:
    """Whether steps are read now though no log line is due: before a save, an evaluation or samples, for fp16, or because too many wait.
    All ranks find the same, for it depends on words and numbers of steps alone."""
    every = state.cfg.train
    return state.precision.uses_loss_scaling or len(state.pending_steps) >= MAX_PENDING_STEPS or any(map(state.is_due, (every.save_every, every.eval_every, every.sample_every)))


def flush_steps(state: TrainState) -> list[StepResult]:
    """Read what waits, in its order, and count it. Raises RunFailed after too many steps that were not finite."""
    progress = state.progress
    steps, state.pending_steps = state.pending_steps, []
    results = fetch_results(state.dist, steps)
    for result in results:
        progress.recent_losses = [*progress.recent_losses, finite_or_none(result.means["loss"])][-RECENT_LOSSES:]
        progress.consecutive_nonfinite_steps = 0 if result.taken else progress.consecutive_nonfinite_steps + 1
        if not result.taken:
            progress.nonfinite_steps += 1
            _handle_nonfinite(state, result)
    return results


def _handle_nonfinite(state: TrainState, result: StepResult) -> None:
    told = state.dist.gather([result.found.names, result.culprit])
    names = [name for theirs, _ in told for name in theirs]
    where = f"step {result.found.step}, rows {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    state.logger.warning(f"loss {result.means['loss']}, gradient norm {result.norm}: not finite, step not taken ({where}); see diagnosis.json")
    if state.dist.is_rank_zero:
        _diagnose(state, names, next((culprit for _, culprit in told if culprit), None), result)
    if state.precision.name == "fp16":
        raise TrainingError(f"fp16 overflows even at a loss scale of {state.precision.loss_scale:g} ({where}): use precision=bf16 or a smaller optimizer.lr")
    if state.progress.consecutive_nonfinite_steps >= state.cfg.train.max_nonfinite_steps:
        raise TrainingError(f"{state.progress.consecutive_nonfinite_steps} steps in a row were not finite ({where}): use a smaller optimizer.lr, or look at these rows")


def _diagnose(state: TrainState, names: list[str], culprit: str | None, result: StepResult) -> None:
    """What stood around the newest step that was given up, for whoever looks into it."""
    found = {
        "step": result.found.step,
        "rows": names,
        "loss": finite_or_none(result.means["loss"]),
        "grad_norm": finite_or_none(result.norm),
        "first_parameter": culprit,
        "scale": state.precision.loss_scale,
        "consecutive_nonfinite_steps": state.progress.consecutive_nonfinite_steps,
        "recent_losses": state.progress.recent_losses,
    }
    try:
        write_json(state.run_dir / "diagnosis.json", found)
    except OSError as error:
        state.logger.warning(f"diagnosis.json could not be written: {error}")


class Throughput:
    """Tokens per second of training, without the time spent on evaluation and samples, and the share of it that went by waiting for data."""

    def __init__(self, idle: Callable[[], bool]) -> None:
        self.idle = idle  # whether the device has nothing left to do
        self.positions, self.waited, self.since = 0, 0.0, time.perf_counter()

    def add(self, positions: int) -> None:
        self.positions += positions

    def waiting(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        while True:
            before = time.perf_counter()
            batches = next(steps, None)
            if self.idle():  # a GPU that is still at work on earlier steps has not waited with us
                self.waited += time.perf_counter() - before
            if batches is None:
                return
            yield batches

    def pause(self, work: Callable[[TrainState], None], state: TrainState) -> None:
        before = time.perf_counter()
        work(state)
        self.since += time.perf_counter() - before

    def read(self) -> dict[str, float]:
        """Since the last reading."""
        now = time.perf_counter()
        spent = max(now - self.since, 1e-9)
        found = {"tokens_per_second": self.positions / spent, "data_wait": self.waited / spent}
        self.positions, self.waited, self.since = 0, 0.0, now
        return found
