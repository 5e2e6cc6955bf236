"""A symptom: what was measured, the override to type, and the section of docs/guide/troubleshooting.md about it; the
numbers of metrics.jsonl as the detectors read them; and two rules that several pages share: when a run overfits, and
how exactly an evaluation measures the loss.

FEW_ROWS is the smallest number of paired rows that can tell the best of 16 runs from the 15 others. Over n pairs no
p-value of the exact sign-flip test (Fisher, The Design of Experiments, 1935, section 21) is below 2 ** (1 - n), however
large the differences are; 15 comparisons at 5 % (Bonferroni) need 2 ** (1 - n) <= 0.05 / 15, so n >= 10. Two runs need
6 rows. One row has no interval at all.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PAGE = "docs/guide/troubleshooting.md"
LoggedRecord = Mapping[str, object]  # of metrics.jsonl
WIDE = 0.15  # half width of the interval / the loss; of the validation files of data/samples at most 0.09
CONFIDENCE = 1.96  # standard errors of a 95 % interval
FEW_ROWS = 10  # fewer tell no run from another, whatever their losses are
MAX_HELD_OUT = 0.5  # of the rows that is proposed to be held out
MORE_FILE_ROWS = "more rows in data.val_path"
MORE_ROWS = f"data.val_fraction=0.1 with data.val_path=null, or {MORE_FILE_ROWS}"
# logged losses whose median counts as the level of the loss; that it is compared with
RECENT, WINDOW = 5, 20
# evaluations in a row above the best, the last by this factor (healthy: 1.008)
RISING_EVALS, OVERFITTING_RISE = 2, 1.02
# larger numbers count as not finite, so that sums and axes stay finite; a record of a larger step is left out
MAX_NUMBER, MAX_LOGGED_STEP = 1e100, 1 << 63
CLIPPED_RECORDS = 50  # newest gradient norms that are kept


def troubleshooting(section: str) -> str:
    """Return how a message names a section of the page."""
    return f"see {PAGE}#{section}"


def lr_after_divergence(lr: float) -> str:
    """Return the learning rate that is proposed to a run that diverges: a tenth."""
    return f"{lr / 10:g}"


@dataclass(frozen=True)
class Symptom:
    name: str  # anchor of its section
    measured: str
    fix: str  # what to type

    @property
    def message(self) -> str:
        return f"{self.measured}; {self.fix}; {troubleshooting(self.name)}"


@dataclass(frozen=True)
class RunFacts:
    """Settings of a run that its numbers are judged by."""

    total_steps: int
    lr: float  # largest of the schedule
    warmup_steps: int
    grad_clip: float  # 0: no clipping
    num_workers: int  # data.num_workers
    cores: int
    starts_from_weights: bool
    # loss of a model that gives every token the same probability; None: the objective has no such number
    uniform_loss: float | None


def half_width(losses: Sequence[float], items: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of sum(losses) / sum(items) over batches; None with fewer than two.

    The variance of a ratio of sums (W. G. Cochran, Sampling Techniques, 3rd ed., section 6.4).
    """
    count, total = len(losses), sum(items)
    if count < 2 or not total:
        return None
    mean = sum(losses) / total
    residuals = sum((loss - mean * n) ** 2 for loss, n in zip(losses, items, strict=True))
    return CONFIDENCE * math.sqrt(residuals * count / (count - 1)) / total


def few_rows(rows: int) -> str | None:
    """Return how many rows there are, e.g. `1 row`, if they are fewer than FEW_ROWS; None for enough, and for 0: no
    evaluation.
    """
    return f"{rows} row{'s' * (rows > 1)}" if 0 < rows < FEW_ROWS else None


def few_validation_rows(rows: int, training_rows: int, name: str = "") -> Symptom | None:
    """Return a symptom, before the first step, if a run is evaluated on fewer than FEW_ROWS validation rows, of the set
    `name`. 0: on none.
    """
    if (count := few_rows(rows)) is None:
        return None
    share = math.ceil(100 * FEW_ROWS / max(1, training_rows)) / 100
    fix = (
        f"data.val_fraction={share:g} with data.val_path=null, or {MORE_FILE_ROWS}"
        if share <= MAX_HELD_OUT
        else MORE_FILE_ROWS
    )
    return Symptom(
        "tiny-validation",
        f"validation{f' {name}' if name else ''} has {count}: {'their' if rows > 1 else 'its'} loss does not tell one run from another",
        fix,
    )


def tiny_validation(losses: Sequence[float], items: Sequence[float], rows: int) -> Symptom | None:
    """Return a symptom if differences that matter are smaller than what other validation rows would change. `rows`:
    validation rows.

    None for those that `few_validation_rows` reports.
    """
    width, mean = half_width(losses, items), sum(losses) / (sum(items) or 1)
    if rows < FEW_ROWS or width is None or not math.isfinite(mean) or width <= WIDE * abs(mean):
        return None
    measured = (
        f"the validation loss of {rows:,} rows is {mean:.2f} +- {width:.2f} (95 %): smaller differences tell nothing"
    )
    return Symptom("tiny-validation", measured, MORE_ROWS)


class Evaluation(NamedTuple):
    step: int
    loss: float
    train_level: float | None  # median of the training losses logged just before; None before there are enough


@dataclass(eq=False)
class RecordedEvaluations:
    """The evaluations of a run, from its finite losses in the order of the log."""

    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _rows_since: float = 0
    evaluations: list[Evaluation] = field(default_factory=list)

    def add(self, kind: str, step: float, loss: float, rows_since: float = 0) -> None:
        """Add a loss of `kind` train or eval; those with another `rows_since` are of other rows."""
        if kind == "train":
            self._recent.append(loss)
        else:
            if rows_since != self._rows_since:
                self._rows_since, self.evaluations = rows_since, []
            self.evaluations.append(Evaluation(int(step), loss, self.level()))

    def level(self) -> float | None:
        """Return the median of the newest RECENT training losses, None before there are as many."""
        return statistics.median(self._recent) if len(self._recent) == RECENT else None

    @property
    def overfitting(self) -> tuple[Evaluation, Evaluation] | None:
        """The best and the newest evaluation if the validation loss has risen from its lowest while the training loss
        fell; None otherwise.
        """
        if len(self.evaluations) <= RISING_EVALS:
            return None
        best, last = min(self.evaluations, key=lambda evaluation: evaluation.loss), self.evaluations[-1]
        if self.evaluations[-RISING_EVALS].step <= best.step or last.loss < OVERFITTING_RISE * best.loss:
            return None
        if best.train_level is None or last.train_level is None:
            return None
        return (best, last) if last.train_level < best.train_level else None


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
            self.evaluated.add("eval", step, loss, finite_number(record.get("rows_since")) or 0)
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
