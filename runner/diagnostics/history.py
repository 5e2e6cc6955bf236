"""Numbers of metrics.jsonl as the detectors read them. Memory: about 100 bytes for each logged step."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from runner.diagnostics.overfitting import LEVEL_LOSSES, Evaluation
from runner.diagnostics.symptoms import LoggedRecord

# logged losses whose median counts as the level of the loss; that it is compared with
RECENT, WINDOW = LEVEL_LOSSES, 20
# larger numbers count as not finite; a record of a larger step is left out
MAX_LOGGED_NUMBER, MAX_LOGGED_STEP = 1e100, 1 << 63
CLIPPED_RECORDS = 50  # newest gradient norms that are kept


@dataclass
class RunHistory:
    steps: list[int] = field(default_factory=list)  # of `losses`
    losses: list[float] = field(default_factory=list)  # finite ones
    grad_norms: deque[float] = field(default_factory=lambda: deque(maxlen=CLIPPED_RECORDS))
    zero_gradients: int = 0  # newest logged gradient norms that are exactly 0
    evaluations: list[Evaluation] = field(default_factory=list)
    lowest_level: float = math.inf  # of the training loss, from the first WINDOW on
    lowest_step: int = 0
    high_at_lowest: float = math.inf  # the largest of the WINDOW losses before
    train_records: int = 0
    seconds: float = 0.0  # of training, without the first record
    waited: float = 0.0  # seconds of them that waited for data
    _tokens: float = 0.0  # of the newest record

    def add(self, record: LoggedRecord) -> None:
        """Add a record; fields that are missing or of another type are left out."""
        step, loss = record.get("step"), _finite(record.get("loss"))
        if not isinstance(step, int) or not 0 <= step < MAX_LOGGED_STEP:
            return
        if record.get("kind") == "eval" and loss is not None:
            self.evaluations.append(Evaluation(step, loss, self.level()))
        elif record.get("kind") == "train":
            self._add_step(step, loss, record)

    def _add_step(self, step: int, loss: float | None, record: LoggedRecord) -> None:
        self.train_records += 1
        tokens, speed, wait = (_finite(record.get(name)) for name in ("tokens", "tokens_per_second", "data_wait"))
        # the first steps also start workers and compile
        if self.train_records > 1 and tokens and speed and wait is not None:
            seconds = max(0.0, tokens - self._tokens) / speed
            self.seconds += seconds
            self.waited += seconds * wait
        self._tokens = tokens or self._tokens
        if (norm := _finite(record.get("grad_norm"))) is not None:
            self.grad_norms.append(norm)
            self.zero_gradients = self.zero_gradients + 1 if norm == 0 else 0
        if loss is None:
            return
        self.steps.append(step)
        self.losses.append(loss)
        level = self.level()
        if level is not None and len(self.losses) >= WINDOW and level < self.lowest_level:
            self.lowest_level, self.lowest_step, self.high_at_lowest = level, step, max(self.losses[-WINDOW:])

    def level(self) -> float | None:
        """Return the median of the newest RECENT losses, None before there are as many."""
        return statistics.median(self.losses[-RECENT:]) if len(self.losses) >= RECENT else None


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and abs(value) < MAX_LOGGED_NUMBER else None
