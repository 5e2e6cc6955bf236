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

import numpy as np

from data.build import Progress, silent
from data.order import shuffled
from data.rows import Row, RowSource

VERSION = 1  # of the algorithm: another plan is another training
AT_ONCE = 1 << 16  # rows packed against each other: more would hardly fill better
TAIL = 4 * 8  # bytes: what stands behind the members and the beginnings
SLICE = 1 << 10  # rows that are read together; a file that is sorted is mixed by such slices


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
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


def _groups(rows: RowSource, capacity: int, progress: Progress) -> Iterator[tuple[np.ndarray, int]]:
    """The numbers of the rows of each window, and their positions; slices of the file are mixed before they are packed against each other."""
    size = len(rows)
    slices = -(-size // SLICE)
    for start in range(0, slices, AT_ONCE // SLICE):
        numbers = shuffled(np.arange(start, min(start + AT_ONCE // SLICE, slices)), slices, seed=0, epoch=0)
        spans = [(n * SLICE, min((n + 1) * SLICE, size)) for n in numbers.tolist()]
        members = np.concatenate([np.arange(*span) for span in spans])
        lengths = np.concatenate([rows.lengths(*span) for span in spans])
        order = shuffled(np.arange(len(members)), len(members), seed=1, epoch=start)
        members, lengths = members[order], lengths[order]
        for window in best_fit(lengths, capacity):
            yield members[window], int(lengths[window].sum())
        done = min((start + AT_ONCE // SLICE) * SLICE, size)
        progress(done, size, done)


class Packed:
    """Rows as windows: `packed[w]` is the list of rows of window w."""

    def __init__(self, rows: RowSource, capacity: int, cache: Path, progress: Progress = silent) -> None:
        """`progress` hears (rows done, rows in all, rows done), as when a store is built."""
        self.rows, self.capacity = rows, capacity
        self.fingerprint = hashlib.sha256(f"{rows.fingerprint} {capacity} {VERSION}".encode()).hexdigest()
        self.path = cache / f"{self.fingerprint}.windows"
        if not self._open():
            _write(self.path, _groups(rows, capacity, progress))
            assert self._open(), f"{self.path} was written a moment ago"

    def __len__(self) -> int:
        return self.windows

    @property
    def fill(self) -> float:
        """The share of the positions that hold a token."""
        return self.positions / (self.windows * self.capacity)

    def __getitem__(self, w: int) -> list[Row]:
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
            self.file = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        size = os.fstat(self.file).st_size
        tail = np.frombuffer(os.pread(self.file, TAIL, max(size - TAIL, 0)), np.int64).tolist()
        if len(tail) < 4 or size != 8 * (tail[0] + tail[1] + 1) + TAIL:
            return False
        self.members, self.windows, self.positions, checksum = tail
        return self.members == len(self.rows) and checksum == self._checksum(size - TAIL)

    def _checksum(self, size: int) -> int:
        checksum = 0
        for start in range(0, size, 1 << 20):
            checksum = zlib.crc32(os.pread(self.file, min(1 << 20, size - start), start), checksum)
        return checksum


def _write(path: Path, windows: Iterator[tuple[np.ndarray, int]]) -> None:
    """int64 all through: the members of all windows, where each begins (and the last ends); how many of both, their positions, a checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    starts, members, positions, checksum = [0], 0, 0, 0
    with open(temporary, "wb") as file:
        for window, length in windows:
            raw = window.astype(np.int64).tobytes()
            checksum = zlib.crc32(raw, checksum)
            file.write(raw)
            members, positions = members + len(window), positions + length
            starts.append(members)
        begins = np.array(starts, np.int64).tobytes()
        file.write(begins + np.array([members, len(starts) - 1, positions, zlib.crc32(begins, checksum)], np.int64).tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
