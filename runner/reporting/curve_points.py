"""Which points of a long curve a page shows. Points are chosen, never computed."""

from __future__ import annotations

import math
from collections.abc import Sequence


def choose_points(values: Sequence[float | None], limit: int) -> list[int]:
    """Return the indices of about `limit` points that show the same curve: first, last, and of each span the lowest,
    the highest and its first gap.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    size = math.ceil(len(values) / max(1, limit // 3))
    chosen = {0, len(values) - 1}
    for start in range(0, len(values), size):
        span = range(start, min(start + size, len(values)))
        finite = [(value, index) for index in span if (value := values[index]) is not None]
        chosen.update((min(finite)[1], max(finite)[1]) if finite else ())
        chosen.update([next(index for index in span if values[index] is None)] if len(finite) < len(span) else ())
    return sorted(chosen)
