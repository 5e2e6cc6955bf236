"""The numbers of metrics.jsonl as the detectors read them, and when a run overfits: one rule for the warning while it
trains, for its page and for that of a sweep.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runner.diagnostics.symptoms import LoggedRecord

# logged losses whose median counts as the level of the loss; that it is compared with
RECENT, WINDOW = 5, 20
# evaluations in a row above the best, the last by this factor (healthy: 1.008)
RISING_EVALS, OVERFITTING_RISE = 2, 1.02
# larger numbers count as not finite, so that sums and axes stay finite; a record of a larger step is left out
MAX_NUMBER, MAX_LOGGED_STEP = 1e100, 1 << 63
CLIPPED_RECORDS = 50  # newest gradient norms that are kept


class Evaluation(NamedTuple):
    step: int
    loss: float
    train_level: float | None  # median of the training losses logged just before; None before there are enough


def overfitting_of(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """Return the best and the newest evaluation if the validation loss has risen from its lowest while the training
    loss fell; None otherwise.

    `evaluations`: all of them, or at least the best and the newest RISING_EVALS, in the order of steps.
    """
    if len(evaluations) <= RISING_EVALS:
        return None
    best = min(evaluations, key=lambda evaluation: evaluation.loss)
    newest = evaluations[-RISING_EVALS:]
    last = newest[-1]
    if (
        newest[0].step <= best.step
        or last.loss < OVERFITTING_RISE * best.loss
        or best.train_level is None
        or last.train_level is None
    ):
        return None
    return (best, last) if last.train_level < best.train_level else None


class RecordedEvaluations:
    """The evaluations of a run, from its finite losses in the order of the log."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.evaluations: list[Evaluation] = []

    def add(self, kind: str, step: float, loss: float) -> None:
        """Add a loss of `kind` train or eval."""
        if kind == "train":
            self._recent.append(loss)
        else:
            self.evaluations.append(Evaluation(int(step), loss, self.level()))

    def level(self) -> float | None:
        """Return the median of the newest RECENT training losses, None before there are as many."""
        return statistics.median(self._recent) if len(self._recent) == RECENT else None

    @property
    def overfitting(self) -> tuple[Evaluation, Evaluation] | None:
        return overfitting_of(self.evaluations)


@dataclass
class RunHistory:
    """Memory: about 100 bytes for each logged step."""

    steps: list[int] = field(default_factory=list)  # of `losses`
    losses: list[float] = field(default_factory=list)  # finite ones
    grad_norms: deque[float] = field(default_factory=lambda: deque(maxlen=CLIPPED_RECORDS))
    zero_gradients: int = 0  # newest logged gradient norms that are exactly 0
    evaluated: RecordedEvaluations = field(default_factory=RecordedEvaluations)
    lowest_level: float = math.inf  # of the training loss, from the first WINDOW on
    lowest_step: int = 0
    high_at_lowest: float = math.inf  # the largest of the WINDOW losses before
    train_records: int = 0
    seconds: float = 0.0  # of training, without the first record
    waited: float = 0.0  # seconds of them that waited for data
    _tokens: float = 0.0  # of the newest record

    def add(self, record: LoggedRecord) -> None:
        """Add a record; fields that are missing or of another type are left out."""
        step, loss = record.get("step"), finite_number(record.get("loss"))
        if not isinstance(step, int) or not 0 <= step < MAX_LOGGED_STEP:
            return
        if record.get("kind") == "eval" and loss is not None:
            self.evaluated.add("eval", step, loss)
        elif record.get("kind") == "train":
            self._add_step(step, loss, record)

    def _add_step(self, step: int, loss: float | None, record: LoggedRecord) -> None:
        self.train_records += 1
        tokens, speed, wait = (finite_number(record.get(name)) for name in ("tokens", "tokens_per_second", "data_wait"))
        # the first steps also start workers and compile
        if self.train_records > 1 and tokens and speed and wait is not None:
            seconds = max(0.0, tokens - self._tokens) / speed
            self.seconds += seconds
            self.waited += seconds * wait
        self._tokens = tokens or self._tokens
        if (norm := finite_number(record.get("grad_norm"))) is not None:
            self.grad_norms.append(norm)
            self.zero_gradients = self.zero_gradients + 1 if norm == 0 else 0
        if loss is None:
            return
        self.steps.append(step)
        self.losses.append(loss)
        self.evaluated.add("train", step, loss)
        level = self.evaluated.level()
        if level is not None and len(self.losses) >= WINDOW and level < self.lowest_level:
            self.lowest_level, self.lowest_step, self.high_at_lowest = level, step, max(self.losses[-WINDOW:])


def finite_number(value: object) -> float | None:
    """Return `value` as a float if it is a finite number below MAX_NUMBER, else None.

    A bool is not a number.
    """
    if type(value) is not float and type(value) is not int:
        return None
    return float(value) if abs(value) < MAX_NUMBER else None
