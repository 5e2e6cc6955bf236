"""Writer of a token store.

A store is built in a temporary folder and renamed to its name when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common.filesystem import (
    atomic_path,
    dump_sealed_json,
    fs,
    remove_tree,
    sha256_of_json,
    sync_tree,
    write_all,
    write_new_file,
)
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
        self.tokens = self.spans = 0
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
            "has_weights": self.has_weights,
            "digest": sha256_of_json(content),
            "crc32": self._crc32,
            "bytes": {name: os.fstat(fd).st_size for name, fd in self._fds.items()},
            "stats": vars(self.stats),
        }
        write_new_file(self.folder / STORE_MANIFEST, dump_sealed_json(manifest))

    def close(self) -> None:
        for fd in self._fds.values():
            fs.close(fd)
