"""Layout of a token store, and its reader.

Files of a token store. The folder is named by the key of its content and holds, all numbers little-endian:

tokens.bin     uint16 or uint32: the ids of all sequences, concatenated
spans.bin      uint32 (P, 2): [start, stop) within its sequence of tokens with loss; (2**32 - 1, bits of a float32) is the weight of the next one, else 1
sequences.bin  uint64 (S + 1, 2): index of the first token and of the first span of each sequence; the last entry is the end
rows.bin       (N): position in the source int64, hash of the tokens uint64, weight float32, crc32 of the row with its tokens and spans uint32
MANIFEST.json  sizes of the files, crc32 of sequences.bin and rows.bin, metadata, and its own sha256

Reads a token store: the encoded rows of one source in flat files, verified by checksums.

The tables (sequences.bin, rows.bin) are verified when a store is opened, because packing plans are computed from them.
They are small compared with the tokens, which are verified together with their spans when a row is read.

The files are read with pread instead of memory mapping: mapped pages count as memory of the process, which would grow
to the size of the files.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import UserError
from common.filesystem import crc32_of, load_sealed_json
from data.tokenize.block import RowStats
from data.types import TokenSequence

STORE_FORMAT = 6  # version of this layout: a store of another version is built again
STORE_MANIFEST = "MANIFEST.json"
STORE_FILES = ("tokens.bin", "spans.bin", "sequences.bin", "rows.bin")
TABLE_FILES = STORE_FILES[2:]
SPAN_DTYPE = np.dtype("<u4")
OFFSET_DTYPE = np.dtype([("token", "<u8"), ("span", "<u8")])
ROW_DTYPE = np.dtype([("position", "<i8"), ("content", "<u8"), ("weight", "<f4"), ("checksum", "<u4")])
OFFSET, ROW_HEAD = struct.Struct("<QQ"), struct.Struct("<q8sf")  # OFFSET_DTYPE, ROW_DTYPE without the checksum
WEIGHT_MARK = -1  # in place of a start in spans.bin: the stop is the weight of the next span, the bits of a float32


def row_checksum(*parts: Any) -> int:
    """Return the crc32 of an entry of rows.bin before its checksum, sequence lengths, counts of spans, tokens, spans."""
    return zlib.crc32(b"".join(parts))


COUNTERS = ("dropped", "bad", "unused", "sampled", "common_answers")  # of RowStats, by a string
ROWS_PER_READ = 1 << 16  # entries of a table in memory at a time
# files of all stores that a process keeps open: a data folder may have more files than the limit of a process
OPEN_FILES = 128


class DamagedStoreError(RuntimeError):
    """The content of a store is not what was written."""


class TokenStore:
    """Encoded rows of one source by index.

    Its memory does not grow with the rows; it can be forked and pickled.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], files: dict[str, FileId]) -> None:
        self.folder, self.key = folder, folder.name
        # of the encoded rows; independent of the code and settings that produced them
        self.digest: str = manifest["digest"]
        self.sequences_per_row: int = manifest["sequences_per_row"]
        self.has_weights: bool = manifest["has_weights"]  # whether the weight of any row is not 1
        stats: dict[str, Any] = manifest["stats"]
        counters: dict[str, Counter] = {name: Counter(stats[name]) for name in COUNTERS}
        counters["lost_by_length"] = Counter({int(length): count for length, count in stats["lost_by_length"].items()})
        self.stats = RowStats(**stats | counters)
        self.metadata: dict[str, Any] = manifest["metadata"]
        self._rows = files["rows.bin"].size // ROW_DTYPE.itemsize
        self._dtype = np.dtype(manifest["dtype"])
        self._files = files

    @classmethod
    def open(cls, folder: Path) -> TokenStore | None:
        """Return the store in `folder`; None if there is none, or it is incomplete, damaged or of another format, and
        has to be built.

        Raises UserError if it cannot be read for lack of permission.
        """
        try:
            manifest = load_sealed_json((folder / STORE_MANIFEST).read_bytes())
            if manifest["format"] != STORE_FORMAT:
                return None
            stats = {path: os.stat(path) for path in (folder / name for name in STORE_FILES)}
            files = {
                path.name: FileId(str(path), stat.st_dev, stat.st_ino, stat.st_size) for path, stat in stats.items()
            }
            if any(files[name].size != manifest["bytes"][name] for name in STORE_FILES) or any(
                crc32_of(_opened(files[name]).fd, files[name].size) != manifest["crc32"][name] for name in TABLE_FILES
            ):
                return None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return None
        except PermissionError as error:
            fix = f"chmod -R u+rwX {folder.parent}; or use another folder: data.cache=FOLDER"
            raise UserError("no permission to read the token store", error.filename or folder, fix) from error
        return cls(folder, manifest, files)

    def __reduce__(self) -> tuple:
        return _reopen, (self.folder,)

    def __len__(self) -> int:
        return self._rows

    def read(self, i: int) -> tuple[list[TokenSequence], int]:
        """Return (sequences of row i, its position in the source).

        Raises DamagedStoreError if the checksum does not match.
        """
        if not 0 <= i < self._rows:
            raise IndexError(f"row {i} of {self._rows}")
        row = self._table("rows.bin", ROW_DTYPE, i, i + 1)
        offsets = self._table(
            "sequences.bin", OFFSET_DTYPE, i * self.sequences_per_row, (i + 1) * self.sequences_per_row + 1
        )
        tokens = self._read("tokens.bin", self._dtype.itemsize, *offsets["token"][[0, -1]].tolist())
        spans = self._read("spans.bin", 2 * SPAN_DTYPE.itemsize, *offsets["span"][[0, -1]].tolist())
        lengths, span_counts = (np.diff(offsets[part].astype("<i8")) for part in ("token", "span"))
        head = row.tobytes()[: ROW_HEAD.size]
        if row_checksum(head, lengths, span_counts, tokens, spans) != int(row["checksum"][0]):
            raise self._damaged(f"row {i}")
        ids = np.frombuffer(tokens, self._dtype).astype(np.int32)
        remaining_spans = iter(np.frombuffer(spans, "<i4").reshape(-1, 2).tolist())
        sequences, start = [], 0
        for length, count in zip(lengths.tolist(), span_counts.tolist(), strict=True):
            loss_mask, weight = np.zeros(length, bool), np.float32(1)
            for first, last in islice(remaining_spans, count):
                if first == WEIGHT_MARK:
                    loss_mask, weight = loss_mask.astype(np.float32), np.int32(last).view(np.float32)
                else:
                    loss_mask[first:last], weight = weight, np.float32(1)
            sequences.append(TokenSequence(ids[start : start + length], loss_mask))
            start += length
        return sequences, int(row["position"][0])

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Number of input tokens of each of the rows [start, stop), int64: all tokens of its sequences but the last
        ones.
        """
        step = self.sequences_per_row
        parts: list[np.ndarray] = [np.empty(0, np.int64)]
        for a, b in _slices(start, stop):
            offsets = self._table("sequences.bin", OFFSET_DTYPE, a * step, b * step + 1)
            parts.append(np.diff(offsets["token"][::step].astype(np.int64)) - step)
        return np.concatenate(parts)

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """Field `name` of ROW_DTYPE of each of the rows [start, stop)."""
        parts = [self._table("rows.bin", ROW_DTYPE, a, b)[name].copy() for a, b in _slices(start, stop)]
        return np.concatenate([np.empty(0, ROW_DTYPE[name]), *parts])

    def _table(self, name: str, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        raw = self._read(name, dtype.itemsize, start, stop)
        if len(raw) != (stop - start) * dtype.itemsize:
            raise self._damaged(f"the end of {name}")
        return np.frombuffer(raw, dtype)

    def _read(self, name: str, size: int, start: int, stop: int) -> bytes:
        if not start <= stop <= self._files[name].size // size:
            return b""  # a flipped bit in an offset would ask for terabytes
        try:
            return os.pread(_opened(self._files[name]).fd, (stop - start) * size, start * size)
        except FileNotFoundError as error:
            raise self._damaged(name) from error

    def _damaged(self, what: str) -> DamagedStoreError:
        """Return the error to raise. Removes the manifest, so that the next start builds the store again."""
        fix = "start again to rebuild it"
        try:
            (self.folder / STORE_MANIFEST).unlink(missing_ok=True)
        except OSError as error:
            fix = f"delete that folder ({error.strerror}) and start again"
        return DamagedStoreError(f"{what} of the token store {self.folder} is damaged: {fix}")


class FileId(NamedTuple):
    """Identity of a file: after a rebuild another file has the same path."""

    path: str
    device: int
    inode: int
    size: int


class OpenFile:
    """Open file that is closed with its last reference: not while another thread still reads from it."""

    def __init__(self, path: str | Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


@lru_cache(OPEN_FILES)
def _opened(file: FileId) -> OpenFile:
    return OpenFile(file.path)


def _slices(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + ROWS_PER_READ, stop)) for first in range(start, stop, ROWS_PER_READ))


def _reopen(folder: Path) -> TokenStore:
    store = TokenStore.open(folder)
    if store is None:
        raise DamagedStoreError(f"the token store {folder} is gone or damaged: start again to rebuild it")
    return store
