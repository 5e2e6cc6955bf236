"""When a run overfits: one rule for the warning while it trains, for its page and for that of a sweep."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

LEVEL_LOSSES = 5  # logged training losses whose median is their level
# evaluations in a row above the best, the last by this factor (healthy: 1.008)
RISING_EVALS, OVERFITTING_RISE = 2, 1.02


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
        self._recent: deque[float] = deque(maxlen=LEVEL_LOSSES)
        self._evaluations: list[Evaluation] = []

    def add(self, kind: str, step: float, loss: float) -> None:
        """Add a loss of `kind` train or eval."""
        if kind == "train":
            self._recent.append(loss)
        else:
            level = statistics.median(self._recent) if len(self._recent) == LEVEL_LOSSES else None
            self._evaluations.append(Evaluation(int(step), loss, level))

    @property
    def overfitting(self) -> tuple[Evaluation, Evaluation] | None:
        return overfitting_of(self._evaluations)
