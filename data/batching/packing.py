"""Best-fit packing: which rows share a packed sequence of `capacity` tokens, planned once and stored in the cache.

A plan depends on the rows and the capacity alone; an epoch shuffles the packed sequences. The plan is read with pread, so memory
does not grow with the number of rows.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.filesystem import atomic_path, crc32_of, fs, write_all
from data.batching.sampler import shuffled_index
from data.store.cache import ProgressCallback, no_progress, open_or_build
from data.types import EncodedRow, RowSource

PLAN_VERSION = 1  # of the algorithm: another plan is another training
ROWS_PER_SLICE = 1 << 16  # rows that are packed together; larger slices hardly fill better
PLAN_SLICE = 1 << 10  # adjacent rows that are read together; these chunks are shuffled, so that a sorted file is mixed
PLAN_TAIL = 4 * 8  # bytes: number of rows, of sequences, of tokens, crc32 of all bytes before the tail


def best_fit_plan(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return the row indices of each packed sequence: longest row first, each into the fullest sequence that has space for it.

    Best-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms": at most 11/9 of the minimal number of bins).
    Raises ValueError if a row is longer than `capacity` tokens.
    """
    sequences: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences with exactly this many free tokens
    available = 0  # bit n is set if by_space[n] is not empty
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        fitting = available >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            number = by_space[space].pop()
            if not by_space[space]:
                available ^= 1 << space
        else:
            if length > capacity:
                raise ValueError(f"a row of {length} tokens does not fit into a packed sequence of {capacity} tokens")
            space, number = capacity, len(sequences)
            sequences.append([])
        sequences[number].append(i)
        by_space[space - length].append(number)
        available |= 1 << (space - length)
    return sequences


def _plan_slices(rows: RowSource, capacity: int, progress: ProgressCallback) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield (row indices, sequence after sequence; number of rows of each sequence; tokens) of each slice. Shuffling precedes packing."""
    size = len(rows)
    chunks, chunks_per_slice = -(-size // PLAN_SLICE), ROWS_PER_SLICE // PLAN_SLICE
    for start in range(0, chunks, chunks_per_slice):
        numbers = shuffled_index(np.arange(start, min(start + chunks_per_slice, chunks)), chunks, seed=0, epoch=0)
        spans = [(n * PLAN_SLICE, min((n + 1) * PLAN_SLICE, size)) for n in numbers.tolist()]
        members = np.concatenate([np.arange(*span) for span in spans])
        lengths = np.concatenate([rows.lengths(*span) for span in spans])
        order = shuffled_index(np.arange(len(members)), len(members), seed=1, epoch=start)
        sequences = best_fit_plan(lengths[order], capacity)
        yield members[order][np.concatenate(sequences)], np.array([len(sequence) for sequence in sequences]), int(lengths.sum())
        done = min((start + chunks_per_slice) * PLAN_SLICE, size)
        progress(done, size, done)


class PackedSequences:
    """`packed[i]` is the list of rows of packed sequence i."""

    def __init__(self, rows: RowSource, capacity: int, cache: Path, progress: ProgressCallback = no_progress) -> None:
        """`progress` gets (rows done, all rows, rows done), as for a store. Raises UserError if `cache` cannot be written."""
        self.rows, self.capacity = rows, capacity
        self.fingerprint = hashlib.sha256(f"{rows.fingerprint} {capacity} {PLAN_VERSION}".encode()).hexdigest()
        self.path = cache / f"{self.fingerprint}.packing"
        self._fd = open_or_build(self.path, self._open, lambda: _write_plan(self.path, _plan_slices(rows, capacity, progress)), "the packing plan")

    def __len__(self) -> int:
        return self._num_sequences

    @property
    def fill_ratio(self) -> float:
        """Share of the tokens that are no padding."""
        return self._num_tokens / (self._num_sequences * self.capacity)

    def __getitem__(self, i: int) -> list[EncodedRow]:
        start, stop = np.frombuffer(os.pread(self._fd, 16, 8 * (len(self.rows) + i)), np.int64)
        return [self.rows[row] for row in np.frombuffer(os.pread(self._fd, 8 * int(stop - start), 8 * int(start)), np.int64).tolist()]

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_fd"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._fd = os.open(self.path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def _open(self) -> int | None:
        """Open the plan and return its descriptor; None if there is no complete one."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        if self._read_tail(fd):
            return fd
        os.close(fd)
        return None

    def _read_tail(self, fd: int) -> bool:
        size = os.fstat(fd).st_size
        tail = np.frombuffer(os.pread(fd, PLAN_TAIL, max(size - PLAN_TAIL, 0)), np.int64).tolist()
        if len(tail) < 4 or size != 8 * (tail[0] + tail[1] + 1) + PLAN_TAIL:
            return False
        num_rows, self._num_sequences, self._num_tokens, checksum = tail
        return num_rows == len(self.rows) and checksum == crc32_of(fd, size - PLAN_TAIL)


def _write_plan(path: Path, slices: Iterator[tuple[np.ndarray, np.ndarray, int]]) -> None:
    """Write int64 values: the row indices of all sequences, the start of each sequence in them and the end of the last, the tail."""
    with atomic_path(path) as temp:
        fd = fs.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            counts, num_rows, num_tokens, checksum = [np.zeros(1, np.int64)], 0, 0, 0
            for members, sizes, tokens in slices:
                raw = members.astype(np.int64).tobytes()
                checksum = zlib.crc32(raw, checksum)
                write_all(fd, raw)
                counts.append(sizes)
                num_rows, num_tokens = num_rows + len(members), num_tokens + tokens
            starts = np.cumsum(np.concatenate(counts))
            tail = np.array([num_rows, len(starts) - 1, num_tokens, zlib.crc32(starts.tobytes(), checksum)], np.int64)
            write_all(fd, starts.tobytes() + tail.tobytes())
            fs.fsync(fd)
        finally:
            fs.close(fd)
