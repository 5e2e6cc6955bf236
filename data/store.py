"""One source's rows as token ids in flat files: read with positioned reads, whole or not there, checked row by row.

A folder, named by its key, holds these; all numbers are little-endian:

    tokens.bin     uint16 or uint32: the ids of all sequences, one after the other
    spans.bin      uint32 (P, 2): [start, stop) within its sequence of tokens that carry loss
    sequences.bin  uint64 (S + 1, 2): the first token and the first span of each sequence, and where the last one ends
    rows.bin       (N): place int64, weight float32, crc32 uint32 of the row and all that belongs to it
    MANIFEST.json  what the others hold, the crc32 of the two tables, and the sha256 of itself

The tables are checked when a store is opened: what is planned from them must not differ from what is read. They are small
beside the tokens, which are checked with their spans, row by row, when they are read.

Memory mapping would be shorter, but the pages it touches count as the process's own: resident memory grows to the size of
the file. Whatever is read with pread stays the kernel's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.block import Block, Tally

FORMAT = 2  # of these files: raise it, and every store is built again
MANIFEST = "MANIFEST.json"
FILES = ("tokens.bin", "spans.bin", "sequences.bin", "rows.bin")
TABLES = FILES[2:]
SPAN = np.dtype("<u4")
BEGINS = np.dtype([("token", "<u8"), ("span", "<u8")])
ROW = np.dtype([("place", "<i8"), ("weight", "<f4"), ("checksum", "<u4")])
AT_ONCE = 1 << 16  # entries of a table that are in memory at a time
PIECE = 1 << 20  # bytes that are checked at a time
OPEN_FILES = 128  # of all stores of a process: a folder may hold more files than a process may open
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
Sequence = tuple[np.ndarray, np.ndarray]


class DamagedStore(RuntimeError):
    """Not what was written. One message and nothing else: worker processes raise an error again by its type and its text."""


class Store:
    """The rows of one source, by number. Holds nothing that grows; may be forked, and pickled to other processes."""

    def __init__(self, folder: Path, manifest: dict[str, Any], files: dict[str, Place]) -> None:
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
    def open(cls, folder: Path) -> Store | None:
        """The store in `folder`; None where there is none, or one that is torn, damaged or of another format: build it again.

        Raises ValueError(what, where, fix) where it may not be read.
        """
        try:
            manifest = _unsealed((folder / MANIFEST).read_bytes())
            if manifest["format"] != FORMAT:
                return None
            files = {name: _place(folder / name) for name in FILES}
            if any(files[name].size != manifest["bytes"][name] for name in FILES) or any(_crc32(files[name]) != manifest["crc32"][name] for name in TABLES):
                return None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return None
        except PermissionError as error:
            fix = f"give yourself the right: chmod -R u+rwX {folder.parent}; or name another folder: data.cache=FOLDER"
            raise ValueError("the token store may not be read", str(error.filename or folder), fix) from error
        return cls(folder, manifest, files)

    def __reduce__(self) -> tuple:
        return _reopened, (self.folder,)

    def __len__(self) -> int:
        return self._rows

    def read(self, i: int) -> tuple[list[Sequence], int]:
        """Row i: (ids int32 (n,), learn bool (n,)) of each of its sequences, and its place in the source. Raises DamagedStore."""
        if not 0 <= i < self._rows:
            raise IndexError(f"row {i} of {self._rows}")
        row = self._table("rows.bin", ROW, i, i + 1)
        begins = self._table("sequences.bin", BEGINS, i * self.sides, (i + 1) * self.sides + 1)
        tokens = self._read("tokens.bin", self._dtype.itemsize, *begins["token"][[0, -1]].tolist())
        spans = self._read("spans.bin", 2 * SPAN.itemsize, *begins["span"][[0, -1]].tolist())
        lengths, span_counts = _sizes(begins)
        if _checksum(row, lengths, span_counts, tokens, spans) != int(row["checksum"][0]):
            raise self._damaged(f"row {i}")
        ids = np.frombuffer(tokens, self._dtype).astype(np.int32)
        marks = iter(np.frombuffer(spans, SPAN).reshape(-1, 2).tolist())
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
            begins = self._table("sequences.bin", BEGINS, a * self.sides, b * self.sides + 1)["token"][:: self.sides]
            found[a - start : b - start] = np.diff(begins.astype(np.int64)) - self.sides
        return found

    def weights(self, start: int, stop: int) -> np.ndarray:
        """How often each of the rows [start, stop) is shown beside one of weight 1, float32."""
        found = np.empty(stop - start, np.float32)
        for a, b in _blocks(start, stop):
            found[a - start : b - start] = self._table("rows.bin", ROW, a, b)["weight"]
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

    def _damaged(self, what: str) -> DamagedStore:
        """What to raise. Without its manifest the folder is no store: the next start builds it again."""
        fix = "start again: it is built anew"
        try:
            (self.folder / MANIFEST).unlink(missing_ok=True)
        except OSError as error:
            fix = f"delete that folder ({error.strerror}) and start again"
        return DamagedStore(f"{what} of the token store {self.folder} is damaged: {fix}")


class Place(NamedTuple):
    """Where a file is: another one may come to stand under its name."""

    path: str
    device: int
    inode: int
    size: int


def _place(path: Path) -> Place:
    found = os.stat(path)
    return Place(str(path), found.st_dev, found.st_ino, found.st_size)


class _File:
    """Closed when nobody holds it any longer: not while another thread reads, as a number that is closed by hand might be."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


@lru_cache(OPEN_FILES)
def _opened(place: Place) -> _File:
    return _File(place.path)


class Writer:
    """Builds the store at `folder` beside its place; `finish` makes it real in one rename. Only one process at a time may build a folder.

    Memory does not grow with what is appended. Left without `finish`, nothing remains; what a killed one left, the next one removes.
    """

    def __init__(self, folder: Path, sides: int, largest_id: int) -> None:
        self.folder, self.temporary = folder, folder.with_name(f".{folder.name}.tmp")
        self.sides, self.dtype = sides, np.dtype("<u2" if largest_id < 1 << 16 else "<u4")
        self.largest_id = largest_id
        self.tally, self.has_weights = Tally(), False
        self.rows = self.sequences = self.tokens = self.spans = 0
        for left in (self.temporary, folder):  # of a killed builder; of a store that `open` would not take
            remove(left)
        self.temporary.mkdir(parents=True)
        self._files = {name: os.open(self.temporary / name, NEW, 0o666) for name in FILES}
        self._digests = {name: hashlib.sha256() for name in FILES}
        self._crc32 = dict.fromkeys(TABLES, 0)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        shutil.rmtree(self.temporary, ignore_errors=True)  # gone where it was published

    def append(self, block: Block) -> None:
        assert len(block.lengths) == len(block.span_counts) == self.sides * len(block.places), "a row has a sequence on each side"
        assert not len(block.tokens) or 0 <= block.tokens.min() <= block.tokens.max() <= self.largest_id, "an id outside of the vocabulary"
        tokens, spans = block.tokens.astype(self.dtype).tobytes(), block.spans.astype(SPAN).tobytes()
        begins = np.empty(len(block.lengths), BEGINS)
        begins["token"] = self.tokens + np.cumsum(block.lengths) - block.lengths
        begins["span"] = self.spans + np.cumsum(block.span_counts) - block.span_counts
        rows = np.zeros(len(block.places), ROW)
        rows["place"], rows["weight"] = block.places, block.weights
        rows["checksum"] = self._checksums(rows, block, memoryview(tokens), memoryview(spans))
        for name, part in zip(FILES, (tokens, spans, begins.tobytes(), rows.tobytes()), strict=True):
            self._add(name, part)
        self.tokens, self.spans = self.tokens + len(block.tokens), self.spans + len(block.spans)
        self.sequences, self.rows = self.sequences + len(begins), self.rows + len(rows)
        self.has_weights = self.has_weights or bool((block.weights != 1).any())
        self.tally += block.tally

    def _add(self, name: str, part: bytes) -> None:
        _write(self._files[name], part)
        self._digests[name].update(part)
        if name in TABLES:
            self._crc32[name] = zlib.crc32(part, self._crc32[name])

    def _checksums(self, rows: np.ndarray, block: Block, tokens: memoryview, spans: memoryview) -> list[int]:
        """Of each row."""
        found, token, span = [], 0, 0
        lengths, counts = (part.astype("<i8").reshape(-1, self.sides) for part in (block.lengths, block.span_counts))
        token_ends = (np.cumsum(lengths.sum(1)) * self.dtype.itemsize).tolist()
        span_ends = (np.cumsum(counts.sum(1)) * 2 * SPAN.itemsize).tolist()
        for i, (token_end, span_end) in enumerate(zip(token_ends, span_ends, strict=True)):
            found.append(_checksum(rows[i : i + 1], lengths[i], counts[i], tokens[token:token_end], spans[span:span_end]))
            token, span = token_end, span_end
        return found

    def finish(self, facts: dict[str, Any]) -> None:
        """Publish. `facts` stand in the manifest, for people and for `Store.facts`."""
        self._add("sequences.bin", np.array([(self.tokens, self.spans)], BEGINS).tobytes())
        held = [self.sides, self.dtype.str, *(digest.hexdigest() for digest in self._digests.values())]
        manifest = {
            "format": FORMAT,
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
        self._files[MANIFEST] = os.open(self.temporary / MANIFEST, NEW, 0o666)
        _write(self._files[MANIFEST], _sealed(manifest))
        for fd in self._files.values():
            os.fsync(fd)
        _sync(self.temporary)
        os.rename(self.temporary, self.folder)
        _sync(self.folder.parent)


def _checksum(row: np.ndarray, lengths: np.ndarray, span_counts: np.ndarray, tokens: bytes | memoryview, spans: bytes | memoryview) -> int:
    """Of a row and all that belongs to it: also of where it comes from, its weight, and where its sequences part."""
    checksum = zlib.crc32(row.tobytes()[: -ROW["checksum"].itemsize])
    for part in (lengths.tobytes(), span_counts.tobytes(), tokens, spans):
        checksum = zlib.crc32(part, checksum)
    return checksum


def _crc32(place: Place) -> int:
    """Of a whole file."""
    file, checksum, at = _opened(place), 0, 0
    while piece := os.pread(file.fd, PIECE, at):
        checksum, at = zlib.crc32(piece, checksum), at + len(piece)
    return checksum


def _sizes(begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and spans of each sequence, int64."""
    return np.diff(begins["token"].astype("<i8")), np.diff(begins["span"].astype("<i8"))


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + AT_ONCE, stop)) for at in range(start, stop, AT_ONCE))


def _tally(stored: dict[str, Any]) -> Tally:
    return Tally(**{**stored, "dropped": Counter(stored["dropped"]), "bad": Counter(stored["bad"])})


def _sealed(manifest: dict[str, Any]) -> bytes:
    return json.dumps({**manifest, "sha256": _digest(manifest)}, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")  # a path may be any bytes


def _unsealed(raw: bytes) -> dict[str, Any]:
    manifest = json.loads(raw)
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise ValueError("the manifest is damaged")
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _reopened(folder: Path) -> Store:
    store = Store.open(folder)
    if store is None:
        raise DamagedStore(f"the token store {folder} is gone or damaged: start again, it is built anew")
    return store


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


def remove(path: Path) -> None:
    """A folder with all in it, or whatever else stands there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
