"""One source's rows as token ids in flat files (`store_files`): read with positioned reads, whole or not there, checked row by row.

The tables are checked when a store is opened: what is planned from them must not differ from what is read. They are small
beside the tokens, which are checked with their spans, row by row, when they are read.

Memory mapping would be shorter, but the pages it touches count as the process's own: resident memory grows to the size of
the file. Whatever is read with pread stays the kernel's.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import UserError
from data.store.block import RowStats
from data.store.layout import (
    OFFSET_DTYPE,
    ROW_DTYPE,
    SPAN_DTYPE,
    STORE_FILES,
    STORE_FORMAT,
    STORE_MANIFEST,
    TABLE_FILES,
    checksum_of,
    file_sizes,
    load_manifest,
)

ROWS_PER_READ = 1 << 16  # entries of a table that are in memory at a time
READ_CHUNK = 1 << 20  # bytes that are checked at a time
OPEN_FILES = 128  # of all stores of a process: a folder may hold more files than a process may open
StoredSequence = tuple[np.ndarray, np.ndarray]


class DamagedStoreError(RuntimeError):
    """Not what was written. One message and nothing else: worker processes raise an error again by its type and its text."""


class TokenStore:
    """The rows of one source, by number. Holds nothing that grows; may be forked, and pickled to other processes."""

    def __init__(self, folder: Path, manifest: dict[str, Any], files: dict[str, FileId]) -> None:
        self.folder, self.key = folder, folder.name
        self.digest: str = manifest["digest"]  # of what the rows hold, whatever code or options made them
        self.sides: int = manifest["sides"]  # sequences of a row
        self.tokens: int = manifest["tokens"]
        self.has_weights: bool = manifest["has_weights"]  # some row's weight is not 1
        self.tally = _tally(manifest["tally"])
        self.facts: dict[str, Any] = manifest["facts"]
        self._rows: int = manifest["rows"]
        self._dtype = np.dtype(manifest["dtype"])
        self._files, self._bytes = files, manifest["bytes"]

    @classmethod
    def open(cls, folder: Path) -> TokenStore | None:
        """The store in `folder`; None where there is none, or one that is torn, damaged or of another format: build it again.

        Raises ValueError(what, where, fix) where it may not be read.
        """
        try:
            manifest = load_manifest((folder / STORE_MANIFEST).read_bytes())
            if manifest["format"] != STORE_FORMAT:
                return None
            files = {name: _file_id(folder / name) for name in STORE_FILES}
            if any(files[name].size != manifest["bytes"][name] for name in STORE_FILES) or any(
                _crc32(files[name]) != manifest["crc32"][name] for name in TABLE_FILES
            ):
                return None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return None
        except PermissionError as error:
            fix = f"give yourself the right: chmod -R u+rwX {folder.parent}; or name another folder: data.cache=FOLDER"
            raise UserError("the token store may not be read", str(error.filename or folder), fix) from error
        return cls(folder, manifest, files)

    def __reduce__(self) -> tuple:
        return _reopened, (self.folder,)

    def __len__(self) -> int:
        return self._rows

    def read(self, i: int) -> tuple[list[StoredSequence], int]:
        """Row i: (ids int32 (n,), learn bool (n,)) of each of its sequences, and its place in the source. Raises DamagedStore."""
        if not 0 <= i < self._rows:
            raise IndexError(f"row {i} of {self._rows}")
        row = self._table("rows.bin", ROW_DTYPE, i, i + 1)
        begins = self._table("sequences.bin", OFFSET_DTYPE, i * self.sides, (i + 1) * self.sides + 1)
        tokens = self._read("tokens.bin", self._dtype.itemsize, *begins["token"][[0, -1]].tolist())
        spans = self._read("spans.bin", 2 * SPAN_DTYPE.itemsize, *begins["span"][[0, -1]].tolist())
        lengths, span_counts = file_sizes(begins)
        if checksum_of(row, lengths, span_counts, tokens, spans) != int(row["checksum"][0]):
            raise self._damaged(f"row {i}")
        ids = np.frombuffer(tokens, self._dtype).astype(np.int32)
        marks = iter(np.frombuffer(spans, SPAN_DTYPE).reshape(-1, 2).tolist())
        sequences, start = [], 0
        for length, count in zip(lengths.tolist(), span_counts.tolist(), strict=True):
            learn = np.zeros(length, bool)
            for _ in range(count):
                learn[slice(*next(marks))] = True
            sequences.append((ids[start : start + length], learn))
            start += length
        return sequences, int(row["place"][0])

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Positions that each of the rows [start, stop) feeds to the model, int64: all tokens of its sequences but their last."""
        found = np.empty(stop - start, np.int64)
        for a, b in _blocks(start, stop):
            begins = self._table("sequences.bin", OFFSET_DTYPE, a * self.sides, b * self.sides + 1)["token"][:: self.sides]
            found[a - start : b - start] = np.diff(begins.astype(np.int64)) - self.sides
        return found

    def weights(self, start: int, stop: int) -> np.ndarray:
        """How often each of the rows [start, stop) is shown beside one of weight 1, float32."""
        found = np.empty(stop - start, np.float32)
        for a, b in _blocks(start, stop):
            found[a - start : b - start] = self._table("rows.bin", ROW_DTYPE, a, b)["weight"]
        return found

    def _table(self, name: str, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        raw = self._read(name, dtype.itemsize, start, stop)
        if len(raw) != (stop - start) * dtype.itemsize:
            raise self._damaged(f"the end of {name}")
        return np.frombuffer(raw, dtype)

    def _read(self, name: str, size: int, start: int, stop: int) -> bytes:
        if not start <= stop <= self._bytes[name] // size:
            return b""  # a flipped bit, which would ask for terabytes
        try:
            return os.pread(_opened(self._files[name]).fd, (stop - start) * size, start * size)
        except FileNotFoundError as error:
            raise self._damaged(name) from error

    def _damaged(self, what: str) -> DamagedStoreError:
        """What to raise. Without its manifest the folder is no store: the next start builds it again."""
        fix = "start again: it is built anew"
        try:
            (self.folder / STORE_MANIFEST).unlink(missing_ok=True)
        except OSError as error:
            fix = f"delete that folder ({error.strerror}) and start again"
        return DamagedStoreError(f"{what} of the token store {self.folder} is damaged: {fix}")


class FileId(NamedTuple):
    """Where a file is: another one may come to stand under its name."""

    path: str
    device: int
    inode: int
    size: int


def _file_id(path: Path) -> FileId:
    found = os.stat(path)
    return FileId(str(path), found.st_dev, found.st_ino, found.st_size)


class _File:
    """Closed when nobody holds it any longer: not while another thread reads, as a number that is closed by hand might be."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


@lru_cache(OPEN_FILES)
def _opened(place: FileId) -> _File:
    return _File(place.path)


def _crc32(place: FileId) -> int:
    """Of a whole file."""
    file, checksum, at = _opened(place), 0, 0
    while piece := os.pread(file.fd, READ_CHUNK, at):
        checksum, at = zlib.crc32(piece, checksum), at + len(piece)
    return checksum


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + ROWS_PER_READ, stop)) for at in range(start, stop, ROWS_PER_READ))


def _tally(stored: dict[str, Any]) -> RowStats:
    return RowStats(**{**stored, "dropped": Counter(stored["dropped"]), "bad": Counter(stored["bad"])})


def _reopened(folder: Path) -> TokenStore:
    store = TokenStore.open(folder)
    if store is None:
        raise DamagedStoreError(f"the token store {folder} is gone or damaged: start again, it is built anew")
    return store
