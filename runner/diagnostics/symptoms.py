"""A symptom: what was measured, the override to type, and the section of docs/guide/troubleshooting.md about it; and the
symptom of a validation that measures the loss too coarsely.

FEW_ROWS is the smallest number of paired rows that can tell the best of 16 runs from the 15 others. Over n pairs no
p-value of the exact sign-flip test (Fisher, The Design of Experiments, 1935, section 21) is below 2 ** (1 - n), however
large the differences are; 15 comparisons at 5 % (Bonferroni) need 2 ** (1 - n) <= 0.05 / 15, so n >= 10. Two runs need
6 rows. One row has no interval at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PAGE = "docs/guide/troubleshooting.md"
LoggedRecord = Mapping[str, object]  # of metrics.jsonl
WIDE = 0.15  # half width of the interval / the loss; of the validation files of data/samples at most 0.09
CONFIDENCE = 1.96  # standard errors of a 95 % interval
FEW_ROWS = 10  # fewer tell no run from another, whatever their losses are
MAX_HELD_OUT = 0.5  # of the rows that is proposed to be held out
MORE_FILE_ROWS = "more rows in data.val_path"
MORE_ROWS = f"data.val_fraction=0.1 with data.val_path=null, or {MORE_FILE_ROWS}"


def troubleshooting(section: str) -> str:
    """Return how a message names a section of the page."""
    return f"see {PAGE}#{section}"


def lr_after_divergence(lr: float) -> str:
    """Return the learning rate that is proposed to a run that diverges: a tenth."""
    return f"{lr / 10:g}"


@dataclass(frozen=True)
class Symptom:
    name: str  # anchor of its section
    step: int  # at which it was seen; 0: before the first
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


def few_validation_rows(rows: int, training_rows: int) -> Symptom | None:
    """Return a symptom, before the first step, if a run is evaluated on fewer than FEW_ROWS validation rows. 0: on
    none.
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
        0,
        f"validation has {count}: {'their' if rows > 1 else 'its'} loss does not tell one run from another",
        fix,
    )


def tiny_validation(losses: Sequence[float], items: Sequence[float], rows: int, step: int) -> Symptom | None:
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
    return Symptom("tiny-validation", step, measured, MORE_ROWS)
