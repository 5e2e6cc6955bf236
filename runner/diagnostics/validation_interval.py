"""How exactly an evaluation measures the loss: from its number of rows, before the first step, and from the losses of its batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from runner.diagnostics.symptoms import Symptom

WIDE = 0.15  # half width of the interval / the loss; of the validation files of data/samples at most 0.09
CONFIDENCE = 1.96  # standard errors of a 95 % interval
FEW_ROWS = 10  # fewer are too few, whatever their losses are
MORE_ROWS = "data.val_fraction=0.1 with data.val_path=null, or more rows in data.val_path"


def half_width(losses: Sequence[float], items: Sequence[int]) -> float | None:
    """Return half of the 95 % interval of sum(losses) / sum(items) over batches; None with fewer than two.

    The variance of a ratio of sums (W. G. Cochran, Sampling Techniques, 3rd ed., section 6.4).
    """
    count, total = len(losses), sum(items)
    if count < 2 or not total:
        return None
    mean = sum(losses) / total
    residuals = sum((loss - mean * n) ** 2 for loss, n in zip(losses, items, strict=True))
    return CONFIDENCE * math.sqrt(residuals * count / (count - 1)) / total


def few_validation_rows(rows: int) -> Symptom | None:
    """Return a symptom, before the first step, if a run is evaluated on fewer than FEW_ROWS validation rows. 0: on none."""
    if not 0 < rows < FEW_ROWS:
        return None
    measured = f"validation has {rows} row{'s' * (rows > 1)}: {'their' if rows > 1 else 'its'} loss does not tell one run from another"
    return Symptom("tiny-validation", 0, measured, MORE_ROWS)


def tiny_validation(losses: Sequence[float], items: Sequence[int], rows: int, step: int) -> Symptom | None:
    """Return a symptom if differences that matter are smaller than what other validation rows would change. `rows`: validation rows.

    None for those that `few_validation_rows` reports.
    """
    width, mean = half_width(losses, items), sum(losses) / max(1, sum(items))
    if rows < FEW_ROWS or width is None or not math.isfinite(mean) or width <= WIDE * abs(mean):
        return None
    measured = f"the validation loss of {rows:,} rows is {mean:.2f} +- {width:.2f} (95 %): smaller differences tell nothing"
    return Symptom("tiny-validation", step, measured, MORE_ROWS)
