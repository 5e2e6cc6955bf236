"""What data.max_length costs: how many tokens with loss are cut off, and which limit would keep almost all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from data.tokenize.block import RowStats

WARN_ABOVE = 0.05  # share of the tokens with loss
KEPT_SHARE = 0.99  # of the tokens with loss, with the limit that the warning names


def truncation_warning(stats: Iterable[RowStats], max_length: int, max_positions: int) -> str | None:
    """Return a warning if more than WARN_ABOVE of the tokens with loss are lost; `max_positions`: model.max_position_embeddings."""
    stats = list(stats)
    lost, kept = sum(part.lost_loss_tokens for part in stats), sum(part.loss_tokens for part in stats)
    if lost <= WARN_ABOVE * (lost + kept):
        return None
    needed: Counter[int] = sum((part.lost_by_length for part in stats), Counter())
    limit = max_length
    for limit in sorted(needed):
        kept += needed[limit]
        if kept >= KEPT_SHARE * (lost + sum(part.loss_tokens for part in stats)):
            break
    rows = sum(part.truncated + sum(part.dropped.values()) for part in stats)
    fix = f"data.max_length={limit}" + (f" model.max_position_embeddings={limit}" if limit > max_positions else "")
    share = lost / (lost + sum(part.loss_tokens for part in stats))
    return f"data.max_length={max_length} cuts off {share:.1%} of the tokens with loss ({lost:,}, in {rows:,} rows); {fix} keeps {KEPT_SHARE:.0%}"
