"""Smaller micro-batches: train.batch_size and train.accumulation_steps with which a step needs less memory."""

from __future__ import annotations

from dataclasses import dataclass

LARGE_DROP = 4  # from one size to the next: then a size about half as large is proposed, too


@dataclass(frozen=True)
class MicroBatch:
    size: int  # train.batch_size
    accumulation: int  # train.accumulation_steps
    changes: str = ""  # what differs in the training; "": the rows of a step are the same

    @property
    def overrides(self) -> str:
        return f"train.batch_size={self.size} train.accumulation_steps={self.accumulation}"


def smaller_micro_batch(size: int, accumulation: int) -> MicroBatch | None:
    """Return the largest micro-batch of at most half the size with which a step has the same rows; None for a size of
    1.

    13 x 1 becomes 1 x 13, 15 x 1 becomes 5 x 3, 7 x 4 becomes 2 x 14.
    """
    rows = size * accumulation
    return next(
        (MicroBatch(smaller, rows // smaller) for smaller in range(size // 2, 0, -1) if rows % smaller == 0), None
    )


def half_micro_batch(size: int, accumulation: int) -> MicroBatch | None:
    """Return a micro-batch of half the size, rounded up, where one of the same rows per step is smaller by LARGE_DROP;
    otherwise None. A step has other rows.
    """
    same_rows = smaller_micro_batch(size, accumulation)
    if same_rows is None or same_rows.size * LARGE_DROP >= size:
        return None
    half, rows = (size + 1) // 2, size * accumulation
    steps = max(1, round(rows / half))
    return MicroBatch(half, steps, f"{half * steps} rows per step instead of {rows}")
