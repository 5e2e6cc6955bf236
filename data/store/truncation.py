"""What data.max_length costs: how many tokens with loss are cut off, and which limit would keep almost all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from data.tokenize.block import RowStats

WARN_ABOVE = 0.05  # share of the tokens with loss
KEPT_SHARE = 0.99  # of the tokens with loss, with the limit that the warning names
LONG = 4  # times the given limit, from which on the named limit gets its price, and a lower one of at most half of it is named, too


@dataclass(frozen=True)
class Truncation:
    lost: int  # tokens with loss that are cut off
    total: int  # tokens with loss, the lost ones included
    rows: int  # rows that are cut off or dropped
    limit: int  # the data.max_length that keeps KEPT_SHARE of them; the given one if that keeps as many
    lower_limit: int = 0  # one of at most half of it, above which a token costs more length than before it: few rows need it; 0: there is none
    lower_kept: float = 0.0  # share of the tokens with loss that it keeps

    @property
    def share(self) -> float:
        return self.lost / max(1, self.total)


def measure_truncation(stats: Iterable[RowStats], max_length: int) -> Truncation:
    """Return what `max_length` costs in files with these `stats`."""
    stats = list(stats)
    lost, kept = sum(part.lost_loss_tokens for part in stats), sum(part.loss_tokens for part in stats)
    total, limit = lost + kept, max_length
    needed: Counter[int] = sum((part.lost_by_length for part in stats), Counter())
    steps = [(max_length, kept)]  # (data.max_length, tokens with loss that it keeps)
    for longer in sorted(needed):
        if kept >= KEPT_SHARE * total:
            break
        kept, limit = kept + needed[longer], longer
        steps.append((limit, kept))
    lower, lower_kept = _lower_limit(steps)
    rows = sum(part.truncated + sum(part.dropped.values()) for part in stats)
    return Truncation(lost, total, rows, limit, lower, lower_kept / max(1, total))


def _lower_limit(steps: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the (limit, kept tokens) that is farthest above the straight line from the first to the last of `steps`: the knee of the curve."""
    (shortest, least), (longest, most) = steps[0], steps[-1]
    candidates = [step for step in steps[1:] if 2 * step[0] <= longest and longest >= LONG * shortest]
    above = [(kept - least) * (longest - shortest) - (most - least) * (limit - shortest) for limit, kept in candidates]
    return candidates[above.index(max(above))] if above and max(above) > 0 else (0, 0)


def truncation_warning(stats: Iterable[RowStats], max_length: int, max_positions: int) -> str | None:
    """Return a warning if more than WARN_ABOVE of the tokens with loss are lost; `max_positions`: model.max_position_embeddings."""
    cut = measure_truncation(stats, max_length)
    if cut.share <= WARN_ABOVE:
        return None
    found = f"data.max_length={max_length} cuts off {cut.share:.1%} of the tokens with loss ({cut.lost:,}, in {cut.rows:,} rows)"
    return f"{found}; {describe_longer(cut, max_length, max_positions)}"


def describe_longer(cut: Truncation, max_length: int, max_positions: int) -> str:
    """Return the limits that keep more, with the price of a much longer one: a single long row may need it."""

    def overrides(limit: int) -> str:
        return f"data.max_length={limit}" + (f" model.max_position_embeddings={limit}" if limit > max_positions else "")

    price = f", {cut.limit / max_length:.0f} times as long," if cut.limit >= LONG * max_length else ""
    lower = f"{overrides(cut.lower_limit)} keeps {cut.lower_kept:.0%}, " if cut.lower_limit else ""
    return f"{lower}{overrides(cut.limit)}{price} keeps {KEPT_SHARE:.0%}"
