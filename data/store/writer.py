"""Writer of a token store.

A store is built in a temporary folder and renamed to its name when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from array import array
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
    OFFSET,
    ROW_HEAD,
    STORE_FILES,
    STORE_FORMAT,
    STORE_MANIFEST,
    TABLE_FILES,
    WEIGHT_MARK,
    row_checksum,
)
from data.tokenize.block import EncodedBlock, RowStats
from data.tokenize.pieces import ID_BYTES


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
        all_ids = np.frombuffer(b"".join([ids for _, _, row in block.rows for ids, _ in row]), np.int32)
        assert not len(all_ids) or 0 <= all_ids.min() <= all_ids.max() <= self.largest_id, (
            "an id outside of the vocabulary"
        )
        parts = {name: bytearray() for name in STORE_FILES}
        all_tokens, end = memoryview(all_ids.astype(self.dtype).tobytes()), 0
        parts["tokens.bin"] += all_tokens
        for position, weight, sequences in block.rows:
            assert len(sequences) == self.sequences_per_row, "wrong number of sequences per row"
            lengths, span_counts, spans = array("q"), array("q"), array("i")
            for ids, loss_spans in sequences:
                parts["sequences.bin"] += OFFSET.pack(self.tokens, self.spans)
                before = len(spans)
                for start, stop, loss_weight in loss_spans:
                    if loss_weight != 1:
                        spans.extend((WEIGHT_MARK, int(np.float32(loss_weight).view(np.int32))))
                    spans.extend((start, stop))
                lengths.append(len(ids) // ID_BYTES)
                span_counts.append((len(spans) - before) // 2)
                self.tokens, self.spans = self.tokens + lengths[-1], self.spans + span_counts[-1]
            begin, end = end, end + sum(lengths) * self.dtype.itemsize
            tokens = all_tokens[begin:end]
            # equal for rows that are the same tokens, whatever their loss mask or weight
            content = hashlib.blake2b(lengths.tobytes() + tokens, digest_size=8).digest()
            head = ROW_HEAD.pack(position, content, weight)
            checksum = row_checksum(head, lengths, span_counts, tokens, spans)
            parts["rows.bin"] += head + checksum.to_bytes(4, "little")
            parts["spans.bin"] += spans.tobytes()
            self.has_weights = self.has_weights or bool(np.float32(weight) != 1)
        for name, part in parts.items():
            self._write(name, part)
        self.stats += block.stats

    def _write(self, name: str, part: bytes | bytearray) -> None:
        write_all(self._fds[name], part)
        self._digests[name].update(part)
        if name in TABLE_FILES:
            self._crc32[name] = zlib.crc32(part, self._crc32[name])

    def finish(self, metadata: dict[str, Any]) -> None:
        """Write the end of the offsets, and the manifest."""
        self._write("sequences.bin", OFFSET.pack(self.tokens, self.spans))
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
