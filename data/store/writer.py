"""Build a token store beside its place; one rename makes it real."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from data.store.block import EncodedBlock, RowStats
from data.store.layout import OFFSET_DTYPE, ROW_DTYPE, SPAN_DTYPE, STORE_FILES, STORE_FORMAT, STORE_MANIFEST, TABLE_FILES, checksum_of, dump_manifest

NEW_SUFFIX = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class StoreWriter:
    """Builds the store at `folder` beside its place; `finish` makes it real in one rename. Only one process at a time may build a folder.

    Memory does not grow with what is appended. Left without `finish`, nothing remains; what a killed one left, the next one removes.
    """

    def __init__(self, folder: Path, sides: int, largest_id: int) -> None:
        self.folder, self.temporary = folder, folder.with_name(f".{folder.name}.tmp")
        self.sides, self.dtype = sides, np.dtype("<u2" if largest_id < 1 << 16 else "<u4")
        self.largest_id = largest_id
        self.tally, self.has_weights = RowStats(), False
        self.rows = self.sequences = self.tokens = self.spans = 0
        for left in (self.temporary, folder):  # of a killed builder; of a store that `open` would not take
            remove_store(left)
        self.temporary.mkdir(parents=True)
        self._files = {name: os.open(self.temporary / name, NEW_SUFFIX, 0o666) for name in STORE_FILES}
        self._digests = {name: hashlib.sha256() for name in STORE_FILES}
        self._crc32 = dict.fromkeys(TABLE_FILES, 0)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        shutil.rmtree(self.temporary, ignore_errors=True)  # gone where it was published

    def append(self, block: EncodedBlock) -> None:
        assert len(block.lengths) == len(block.span_counts) == self.sides * len(block.places), "a row has a sequence on each side"
        assert not len(block.tokens) or 0 <= block.tokens.min() <= block.tokens.max() <= self.largest_id, "an id outside of the vocabulary"
        tokens, spans = block.tokens.astype(self.dtype).tobytes(), block.spans.astype(SPAN_DTYPE).tobytes()
        begins = np.empty(len(block.lengths), OFFSET_DTYPE)
        begins["token"] = self.tokens + np.cumsum(block.lengths) - block.lengths
        begins["span"] = self.spans + np.cumsum(block.span_counts) - block.span_counts
        rows = np.zeros(len(block.places), ROW_DTYPE)
        rows["place"], rows["weight"] = block.places, block.weights
        rows["checksum"] = self._checksums(rows, block, memoryview(tokens), memoryview(spans))
        for name, part in zip(STORE_FILES, (tokens, spans, begins.tobytes(), rows.tobytes()), strict=True):
            self._add(name, part)
        self.tokens, self.spans = self.tokens + len(block.tokens), self.spans + len(block.spans)
        self.sequences, self.rows = self.sequences + len(begins), self.rows + len(rows)
        self.has_weights = self.has_weights or bool((block.weights != 1).any())
        self.tally += block.tally

    def _add(self, name: str, part: bytes) -> None:
        _write(self._files[name], part)
        self._digests[name].update(part)
        if name in TABLE_FILES:
            self._crc32[name] = zlib.crc32(part, self._crc32[name])

    def _checksums(self, rows: np.ndarray, block: EncodedBlock, tokens: memoryview, spans: memoryview) -> list[int]:
        """Of each row."""
        found, token, span = [], 0, 0
        lengths, counts = (part.astype("<i8").reshape(-1, self.sides) for part in (block.lengths, block.span_counts))
        token_ends = (np.cumsum(lengths.sum(1)) * self.dtype.itemsize).tolist()
        span_ends = (np.cumsum(counts.sum(1)) * 2 * SPAN_DTYPE.itemsize).tolist()
        for i, (token_end, span_end) in enumerate(zip(token_ends, span_ends, strict=True)):
            found.append(checksum_of(rows[i : i + 1], lengths[i], counts[i], tokens[token:token_end], spans[span:span_end]))
            token, span = token_end, span_end
        return found

    def finish(self, facts: dict[str, Any]) -> None:
        """Publish. `facts` stand in the manifest, for people and for `Store.facts`."""
        self._add("sequences.bin", np.array([(self.tokens, self.spans)], OFFSET_DTYPE).tobytes())
        held = [self.sides, self.dtype.str, *(digest.hexdigest() for digest in self._digests.values())]
        manifest = {
            "format": STORE_FORMAT,
            "facts": facts,
            "sides": self.sides,
            "dtype": self.dtype.str,
            "rows": self.rows,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "has_weights": self.has_weights,
            "digest": hashlib.sha256(json.dumps(held).encode()).hexdigest(),
            "crc32": self._crc32,
            "bytes": {name: os.fstat(fd).st_size for name, fd in self._files.items()},
            "tally": vars(self.tally),
        }
        self._files[STORE_MANIFEST] = os.open(self.temporary / STORE_MANIFEST, NEW_SUFFIX, 0o666)
        _write(self._files[STORE_MANIFEST], dump_manifest(manifest))
        for fd in self._files.values():
            os.fsync(fd)
        _sync(self.temporary)
        os.rename(self.temporary, self.folder)
        _sync(self.folder.parent)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove_store(path: Path) -> None:
    """A folder with all in it, or whatever else stands there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
