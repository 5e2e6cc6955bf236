"""Writer of a token store, and what data.max_length cuts off.

A store is built in a temporary folder and renamed to its name when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.filesystem import atomic_path, dump_sealed_json, fs, remove_tree, sync_tree, write_all, write_new_file
from data.store.reader import (
    OFFSET_DTYPE,
    ROW_DTYPE,
    SPAN_DTYPE,
    STORE_FILES,
    STORE_FORMAT,
    STORE_MANIFEST,
    TABLE_FILES,
    content_hash,
    row_checksum,
)
from data.tokenize.block import EncodedBlock, RowStats

WARN_ABOVE = 0.05  # share of the tokens with loss
KEPT_SHARE = 0.99  # of the tokens with loss, with the limit that the warning names
# times the given limit, from which on the named limit gets its price, and a lower one of at most half of it is named,
# too
LONG = 4


@dataclass(frozen=True)
class Truncation:
    lost: int  # tokens with loss that are cut off
    total: int  # tokens with loss, the lost ones included
    rows: int  # rows that are cut off or dropped
    limit: int  # the data.max_length that keeps KEPT_SHARE of them; the given one if that keeps as many
    # one of at most half of it, above which a token costs more length than before it: few rows need it; 0: there is
    # none
    lower_limit: int = 0
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
    """Return the (limit, kept tokens) that is farthest above the straight line from the first to the last of `steps`:
    the knee of the curve.
    """
    (shortest, least), (longest, most) = steps[0], steps[-1]
    candidates = [step for step in steps[1:] if 2 * step[0] <= longest and longest >= LONG * shortest]
    above = [(kept - least) * (longest - shortest) - (most - least) * (limit - shortest) for limit, kept in candidates]
    return candidates[above.index(max(above))] if above and max(above) > 0 else (0, 0)


def truncation_warning(stats: Iterable[RowStats], max_length: int, max_positions: int) -> str | None:
    """Return a warning if more than WARN_ABOVE of the tokens with loss are lost; `max_positions`:
    model.max_position_embeddings.
    """
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


@contextmanager
def write_store(
    folder: Path, sequences_per_row: int, largest_id: int, metadata: dict[str, Any]
) -> Iterator[StoreWriter]:
    """Yield a writer whose store replaces `folder` at the end of the block; nothing of it remains if the block raises.

    The caller holds the lock of the store: only one process may build a folder. `metadata` is recorded in the manifest.
    """
    if os.path.lexists(folder):  # a store that TokenStore.open did not accept
        remove_tree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder) as temp:
        fs.mkdir(temp)
        writer = StoreWriter(temp, sequences_per_row, largest_id)
        try:
            yield writer
            writer.finish(metadata)
        finally:
            writer.close()
        sync_tree(temp)


class StoreWriter:
    """Appends blocks to the files of a store. Memory does not grow with the number of rows."""

    def __init__(self, folder: Path, sequences_per_row: int, largest_id: int) -> None:
        self.folder, self.sequences_per_row, self.largest_id = folder, sequences_per_row, largest_id
        self.dtype = np.dtype("<u2" if largest_id < 1 << 16 else "<u4")
        self.stats, self.has_weights = RowStats(), False
        self.rows = self.tokens = self.spans = 0
        self._fds = {name: fs.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666) for name in STORE_FILES}
        self._digests = {name: hashlib.sha256() for name in STORE_FILES}
        self._crc32 = dict.fromkeys(TABLE_FILES, 0)

    def append(self, block: EncodedBlock) -> None:
        assert len(block.lengths) == len(block.span_counts) == self.sequences_per_row * len(block.positions), (
            "wrong number of sequences per row"
        )
        assert not len(block.tokens) or 0 <= block.tokens.min() <= block.tokens.max() <= self.largest_id, (
            "an id outside of the vocabulary"
        )
        tokens, spans = block.tokens.astype(self.dtype).tobytes(), block.spans.astype(SPAN_DTYPE).tobytes()
        offsets = np.empty(len(block.lengths), OFFSET_DTYPE)
        offsets["token"] = self.tokens + np.cumsum(block.lengths) - block.lengths
        offsets["span"] = self.spans + np.cumsum(block.span_counts) - block.span_counts
        rows = np.zeros(len(block.positions), ROW_DTYPE)
        rows["position"], rows["weight"] = block.positions, block.weights
        self._add_hashes(rows, block, memoryview(tokens), memoryview(spans))
        for name, part in zip(STORE_FILES, (tokens, spans, offsets.tobytes(), rows.tobytes()), strict=True):
            self._write(name, part)
        self.tokens, self.spans = self.tokens + len(block.tokens), self.spans + len(block.spans)
        self.rows += len(rows)
        self.has_weights = self.has_weights or bool((block.weights != 1).any())
        self.stats += block.stats

    def _write(self, name: str, part: bytes) -> None:
        write_all(self._fds[name], part)
        self._digests[name].update(part)
        if name in TABLE_FILES:
            self._crc32[name] = zlib.crc32(part, self._crc32[name])

    def _add_hashes(self, rows: np.ndarray, block: EncodedBlock, tokens: memoryview, spans: memoryview) -> None:
        token = span = 0
        lengths, counts = (
            part.astype("<i8").reshape(-1, self.sequences_per_row) for part in (block.lengths, block.span_counts)
        )
        token_ends = (np.cumsum(lengths.sum(1)) * self.dtype.itemsize).tolist()
        span_ends = (np.cumsum(counts.sum(1)) * 2 * SPAN_DTYPE.itemsize).tolist()
        for i, (token_end, span_end) in enumerate(zip(token_ends, span_ends, strict=True)):
            rows["content"][i] = content_hash(lengths[i], tokens[token:token_end])
            rows["checksum"][i] = row_checksum(
                rows[i : i + 1], lengths[i], counts[i], tokens[token:token_end], spans[span:span_end]
            )
            token, span = token_end, span_end

    def finish(self, metadata: dict[str, Any]) -> None:
        """Write the end of the offsets, and the manifest."""
        self._write("sequences.bin", np.array([(self.tokens, self.spans)], OFFSET_DTYPE).tobytes())
        content = [self.sequences_per_row, self.dtype.str, *(digest.hexdigest() for digest in self._digests.values())]
        manifest = {
            "format": STORE_FORMAT,
            "metadata": metadata,
            "sequences_per_row": self.sequences_per_row,
            "dtype": self.dtype.str,
            "rows": self.rows,
            "tokens": self.tokens,
            "has_weights": self.has_weights,
            "digest": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            "crc32": self._crc32,
            "bytes": {name: os.fstat(fd).st_size for name, fd in self._fds.items()},
            "stats": vars(self.stats),
        }
        write_new_file(self.folder / STORE_MANIFEST, dump_sealed_json(manifest))

    def close(self) -> None:
        for fd in self._fds.values():
            fs.close(fd)
