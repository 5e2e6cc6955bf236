"""What data.max_length costs: how many tokens with loss are cut off, and which limit would keep almost all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from data.tokenize.block import RowStats

WARN_ABOVE = 0.05  # share of the tokens with loss
KEPT_SHARE = 0.99  # of the tokens with loss, with the limit that the warning names


@dataclass(frozen=True)
class Truncation:
    lost: int  # tokens with loss that are cut off
    total: int  # tokens with loss, the lost ones included
    rows: int  # rows that are cut off or dropped
    limit: int  # the data.max_length that keeps KEPT_SHARE of them; the given one if that keeps as many

    @property
    def share(self) -> float:
        return self.lost / max(1, self.total)


def measure_truncation(stats: Iterable[RowStats], max_length: int) -> Truncation:
    """Return what `max_length` costs in files with these `stats`."""
    stats = list(stats)
    lost, kept = sum(part.lost_loss_tokens for part in stats), sum(part.loss_tokens for part in stats)
    total, limit = lost + kept, max_length
    needed: Counter[int] = sum((part.lost_by_length for part in stats), Counter())
    for longer in sorted(needed):
        if kept >= KEPT_SHARE * total:
            break
        kept, limit = kept + needed[longer], longer
    return Truncation(lost, total, sum(part.truncated + sum(part.dropped.values()) for part in stats), limit)


def truncation_warning(stats: Iterable[RowStats], max_length: int, max_positions: int) -> str | None:
    """Return a warning if more than WARN_ABOVE of the tokens with loss are lost; `max_positions`: model.max_position_embeddings."""
    cut = measure_truncation(stats, max_length)
    if cut.share <= WARN_ABOVE:
        return None
    fix = f"data.max_length={cut.limit}" + (f" model.max_position_embeddings={cut.limit}" if cut.limit > max_positions else "")
    return f"data.max_length={max_length} cuts off {cut.share:.1%} of the tokens with loss ({cut.lost:,}, in {cut.rows:,} rows); {fix} keeps {KEPT_SHARE:.0%}"
