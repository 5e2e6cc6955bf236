"""Best-fit packing: which rows share a window of so many positions, decided once and kept on disk.

A plan is a function of the rows and the size of the window alone; what an epoch shuffles are the windows. It is read with
plain positioned reads, so memory does not grow with the number of rows.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.batching.sampler import shuffled_index
from data.store.cache import ProgressCallback, locked_build, no_progress, remove_stale_builds, with_cache_hint
from data.store.writer import remove_store
from data.types import EncodedRow, RowSource

PLAN_VERSION = 1  # of the algorithm: another plan is another training
ROWS_PER_SLICE = 1 << 16  # rows packed against each other: more would hardly fill better
PLAN_TAIL = 4 * 8  # bytes: what stands behind the members and the beginnings
PLAN_SLICE = 1 << 10  # rows that are read together; a file that is sorted is mixed by such slices


def best_fit_plan(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Rows, by number, that share a window: longest first, each into the fullest window that still has room for it.

    Best-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms": at most 11/9 of the best number of windows).
    Raises ValueError where a row is longer than a window.
    """
    windows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # windows with exactly so much room left
    some = 0  # bit r is set where by_room[r] is not empty
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        fitting = some >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            window = by_room[room].pop()
            if not by_room[room]:
                some ^= 1 << room
        else:
            if length > capacity:
                raise ValueError(f"a row of {length} positions does not fit a window of {capacity}")
            room, window = capacity, len(windows)
            windows.append([])
        windows[window].append(i)
        by_room[room - length].append(window)
        some |= 1 << (room - length)
    return windows


def _groups(rows: RowSource, capacity: int, progress: ProgressCallback) -> Iterator[tuple[np.ndarray, int]]:
    """The numbers of the rows of each window, and their positions; slices of the file are mixed before they are packed against each other."""
    size = len(rows)
    slices = -(-size // PLAN_SLICE)
    for start in range(0, slices, ROWS_PER_SLICE // PLAN_SLICE):
        numbers = shuffled_index(np.arange(start, min(start + ROWS_PER_SLICE // PLAN_SLICE, slices)), slices, seed=0, epoch=0)
        spans = [(n * PLAN_SLICE, min((n + 1) * PLAN_SLICE, size)) for n in numbers.tolist()]
        members = np.concatenate([np.arange(*span) for span in spans])
        lengths = np.concatenate([rows.lengths(*span) for span in spans])
        order = shuffled_index(np.arange(len(members)), len(members), seed=1, epoch=start)
        members, lengths = members[order], lengths[order]
        for window in best_fit_plan(lengths, capacity):
            yield members[window], int(lengths[window].sum())
        done = min((start + ROWS_PER_SLICE // PLAN_SLICE) * PLAN_SLICE, size)
        progress(done, size, done)


class PackedWindows:
    """Rows as windows: `packed[w]` is the list of rows of window w."""

    def __init__(self, rows: RowSource, capacity: int, cache: Path, progress: ProgressCallback = no_progress) -> None:
        """`progress` hears (rows done, rows in all, rows done), as when a store is built. Raises ValueError where `cache` cannot be written."""
        self.rows, self.capacity = rows, capacity
        self.fingerprint = hashlib.sha256(f"{rows.fingerprint} {capacity} {PLAN_VERSION}".encode()).hexdigest()
        self.path = cache / f"{self.fingerprint}.windows"
        with with_cache_hint(cache, "the packing plan"):
            if not self._open():
                cache.mkdir(parents=True, exist_ok=True)
                self._make(progress)

    def _make(self, progress: ProgressCallback) -> None:
        with locked_build(self.path.with_suffix(".windows.lock")):
            if not self._open():  # nobody made it while we waited
                remove_stale_builds(self.path.parent, self.path)
                _write_plan(self.path, _groups(self.rows, self.capacity, progress))
                assert self._open(), f"{self.path} was written a moment ago"

    def __len__(self) -> int:
        return self.windows

    @property
    def fill(self) -> float:
        """The share of the positions that hold a token."""
        return self.positions / (self.windows * self.capacity)

    def __getitem__(self, w: int) -> list[EncodedRow]:
        start, stop = np.frombuffer(os.pread(self.file, 16, 8 * (self.members + w)), np.int64)
        return [self.rows[i] for i in np.frombuffer(os.pread(self.file, 8 * int(stop - start), 8 * int(start)), np.int64).tolist()]

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "file"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self.file = os.open(self.path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)

    def _open(self) -> bool:
        """Whether a whole plan is there."""
        try:
            file = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        if not self._is_whole(file):
            os.close(file)
            return False
        self.file = file
        return True

    def _is_whole(self, file: int) -> bool:
        size = os.fstat(file).st_size
        tail = np.frombuffer(os.pread(file, PLAN_TAIL, max(size - PLAN_TAIL, 0)), np.int64).tolist()
        if len(tail) < 4 or size != 8 * (tail[0] + tail[1] + 1) + PLAN_TAIL:
            return False
        self.members, self.windows, self.positions, checksum = tail
        return self.members == len(self.rows) and checksum == _checksum(file, size - PLAN_TAIL)


def _checksum(file: int, size: int) -> int:
    checksum = 0
    for start in range(0, size, 1 << 20):
        checksum = zlib.crc32(os.pread(file, min(1 << 20, size - start), start), checksum)
    return checksum


def _write_plan(path: Path, windows: Iterator[tuple[np.ndarray, int]]) -> None:
    """int64 all through: the members of all windows, where each begins (and the last ends); how many of both, their positions, a checksum."""
    temporary = path.with_name(f".{path.name}.tmp")
    remove_store(temporary)  # of a killed process
    try:
        with open(temporary, "wb") as file:
            _write_to(file, windows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_to(file: BinaryIO, windows: Iterator[tuple[np.ndarray, int]]) -> None:
    starts, members, positions, checksum = [0], 0, 0, 0
    for window, length in windows:
        raw = window.astype(np.int64).tobytes()
        checksum = zlib.crc32(raw, checksum)
        file.write(raw)
        members, positions = members + len(window), positions + length
        starts.append(members)
    begins = np.array(starts, np.int64).tobytes()
    file.write(begins + np.array([members, len(starts) - 1, positions, zlib.crc32(begins, checksum)], np.int64).tobytes())
