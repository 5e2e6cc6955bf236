"""Packed sequences: which rows share one, and reading them from the token store.

Best fit, another draw each epoch, and never two copies of a row in one sequence. The rows are divided into slices that
are packed one by one. The number of packed sequences of a slice is that of a packing without randomness, so every epoch
has equally many, and which step belongs to which epoch is known without planning the epochs before it.

A plan is read from the cache with pread, so memory does not grow with the number of rows.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.filesystem import crc32_of, dump_sealed_json, load_sealed_json, write_atomic_file
from data.batching.mixture import MixedRows
from data.batching.sampler import ORDER_VERSION, random_bits, shuffled_index
from data.store.cache import ProgressCallback, no_progress, open_or_build
from data.store.reader import OpenFile
from data.types import EncodedRow

PLAN_VERSION = f"2.{ORDER_VERSION}"  # of the algorithm: another plan is another training
ROWS_PER_SLICE = 1 << 16  # rows that are packed together; larger slices hardly fill better
PLAN_SLICE = 1 << 10  # adjacent rows that are read together; these chunks are shuffled, so that a sorted file is mixed
# A draw packs rows in the order of length * (1 + noise * uniform), so that rows whose length is unique get other
# neighbours, too: with
# the first noise that needs no more sequences than there are.
LENGTH_NOISES = (0.3, 0.1, 0.0)


@dataclass
class UnpackedSequences:
    """`unpacked[i]` is the list of row i % len(unpacked) alone."""

    rows: MixedRows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[EncodedRow]:
        return [self.rows[index % len(self.rows)]]

    @property
    def fingerprint(self) -> str:
        """Of the rows, and of what decides their order besides the seed."""
        return hashlib.sha256(f"{self.rows.fingerprint} {ORDER_VERSION}".encode()).hexdigest()


def best_fit_plan(
    lengths: np.ndarray, capacity: int, order: np.ndarray | None = None, distinct: np.ndarray | None = None
) -> list[list[int]]:
    """Return the row indices of each packed sequence: each row into the fullest sequence that has space for it.

    `order`: the rows as they are packed, by default the longest first, which is best-fit decreasing (Johnson 1973,
    "Near-optimal bin packing algorithms": at most 11/9 of the minimal number of bins). `distinct`: (number of rows,)
    equal for copies of one row, which must be adjacent in `order` and share no sequence. Raises ValueError if a row is
    longer than `capacity` tokens.
    """
    order = np.argsort(-lengths, kind="stable") if order is None else order
    names = np.arange(len(order)) if distinct is None else distinct[order]
    sequences: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences with exactly this many free tokens
    available = 0  # bit n is set if by_space[n] is not empty
    closed: list[tuple[int, int]] = []  # (free tokens, sequence) of those that got a copy of the current row
    current = None
    for i, length, name in zip(order.tolist(), lengths[order].tolist(), names.tolist(), strict=True):
        if name != current:
            for space, number in closed:
                by_space[space].append(number)
                available |= 1 << space
            closed, current = [], name
        if fitting := available >> length:
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
        closed.append((space - length, number))
    return sequences


@dataclass(frozen=True)
class _Slice:
    """Rows that are packed together."""

    number: int
    members: np.ndarray  # int64 (n,) their indices
    lengths: np.ndarray  # int64 (n,) tokens
    distinct: np.ndarray  # int64 (n,) from 0, equal for copies of one row
    copies: np.ndarray  # int64 (number of distinct rows,) copies of each

    def plan(self, capacity: int, noise: float, bits: np.ndarray) -> list[list[int]]:
        """Pack the longest rows first, after multiplying each length with 1 + noise * uniform; `bits`: uint64, one per
        distinct row.

        Without noise the number of sequences is the same for all `bits`: they decide only which rows of the same length
        and number of copies change places.
        """
        drawn = bits[self.distinct]
        key = -self.lengths * (1 + noise * (drawn >> np.uint64(11)) * 2.0**-53)
        order = np.lexsort((self.distinct, drawn, -self.copies[self.distinct], key))  # by key, then copies, bits, row
        return best_fit_plan(self.lengths, capacity, order, self.distinct)


def read_slices(rows: MixedRows, progress: ProgressCallback) -> Iterator[_Slice]:
    """Yield the slices: the same for every epoch and seed. Memory does not grow with the number of rows."""
    size = len(rows)
    chunks, chunks_per_slice = -(-size // PLAN_SLICE), ROWS_PER_SLICE // PLAN_SLICE
    for number, start in enumerate(range(0, chunks, chunks_per_slice)):
        shuffled = shuffled_index(np.arange(start, min(start + chunks_per_slice, chunks)), chunks, seed=0, epoch=0)
        spans = [(n * PLAN_SLICE, min((n + 1) * PLAN_SLICE, size)) for n in shuffled.tolist()]
        members, lengths, distinct = (
            np.concatenate([read(*span) for span in spans]) for read in (np.arange, rows.lengths, rows.distinct)
        )
        _, distinct, copies = np.unique(distinct, return_inverse=True, return_counts=True)
        yield _Slice(number, members, lengths, distinct, copies)
        done = min((start + chunks_per_slice) * PLAN_SLICE, size)
        progress(done, size, done)


def count_sequences(part: _Slice, capacity: int) -> int:
    """Return the number of packed sequences of a slice, the same in every epoch: 0.1 % more than without randomness."""
    count = len(part.plan(capacity, 0.0, np.zeros_like(part.copies, np.uint64)))
    return min(count + count // 1000, len(part.members))


def draw_plan(part: _Slice, capacity: int, num_sequences: int, seed: int, epoch: int) -> list[list[int]]:
    """Return exactly `num_sequences` (of `count_sequences`) lists of positions in `part.members`, as a function of seed
    and epoch.
    """
    bits = random_bits(len(part.copies), seed, epoch, part.number)
    plans = (part.plan(capacity, noise, bits) for noise in LENGTH_NOISES)
    sequences = next(plan for plan in plans if len(plan) <= num_sequences)  # without noise it always fits
    while len(sequences) < num_sequences:
        sequences.append([max(sequences, key=len).pop()])
    return sequences


PLAN_TAIL = 8  # bytes: crc32 of all bytes before them
OPEN_PLANS = 2  # batches are prepared in advance: for a while an epoch and the next one are both read


# of one epoch: (start, stop) -> these values of `_plan_values`, int64
EpochPlan = Callable[[int, int], np.ndarray]


class PackedSequences:
    """`packed[i]` is the list of rows of sequence i % len(packed) in epoch i // len(packed).

    Each epoch packs other rows together.
    """

    def __init__(
        self, rows: MixedRows, capacity: int, cache: Path, seed: int = 0, progress: ProgressCallback = no_progress
    ) -> None:
        """`progress` gets (rows done, all rows, rows done), as for a store.

        Raises UserError if `cache` cannot be written.
        """
        self.rows, self.capacity, self.seed = rows, capacity, seed
        self.fingerprint = hashlib.sha256(f"{rows.fingerprint} {capacity} {PLAN_VERSION}".encode()).hexdigest()
        self.path = cache / f"{self.fingerprint}.packing"
        self.progress: ProgressCallback = progress
        self._sizes = open_or_build(self.path, self._read_sizes, self._write_sizes, "the packing plan")
        self._num_sequences = sum(self._sizes)
        self._plans = {0: self._stored_plan(0)}
        self.progress = no_progress

    def __len__(self) -> int:
        return self._num_sequences

    @property
    def fill_ratio(self) -> float:
        """Share of the tokens that are no padding."""
        return self.num_tokens / (self._num_sequences * self.capacity)

    def __getitem__(self, i: int) -> list[EncodedRow]:
        epoch, number = divmod(i, len(self))
        if epoch not in self._plans:
            self._open_epoch(epoch)
        plan, first = self._plans[epoch], len(self.rows) + number
        start, stop = plan(first, first + 2).tolist()
        return [self.rows[row] for row in plan(start, stop).tolist()]

    def __getstate__(self) -> dict:
        return {**vars(self), "_plans": {}, "progress": no_progress}

    def _open_epoch(self, epoch: int) -> None:
        while len(self._plans) >= OPEN_PLANS:
            oldest = next(iter(self._plans))
            del self._plans[oldest]
            if oldest:  # every run begins with the plan of epoch 0
                with suppress(OSError):
                    self._plan_path(oldest).unlink()
        try:
            self._plans[epoch] = self._stored_plan(epoch)
        except UserError:  # a full disk does not end a training: 8 bytes per row in memory do, too
            values = np.concatenate(list(self._plan_values(epoch)))
            self._plans[epoch] = lambda start, stop: values[start:stop]

    def _stored_plan(self, epoch: int) -> EpochPlan:
        path = self._plan_path(epoch)

        def build() -> None:
            write_atomic_file(path, _with_checksum(self._plan_values(epoch)))

        return open_or_build(path, lambda: self._open_plan(path), build, "the packing plan")

    def _plan_path(self, epoch: int) -> Path:
        return self.path.with_name(f"{self.path.name}@{self.seed}-{epoch}")

    def _plan_values(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield int64 values: the row indices of all sequences, then the start of each sequence in them and the end of
        the last.
        """
        counts = [np.zeros(1, np.int64)]
        for part, size in zip(read_slices(self.rows, self.progress), self._sizes, strict=True):
            sequences = draw_plan(part, self.capacity, size, self.seed, epoch)
            counts.append(np.array([len(sequence) for sequence in sequences]))
            yield part.members[np.concatenate(sequences)]
        yield np.cumsum(np.concatenate(counts))

    def _open_plan(self, path: Path) -> EpochPlan | None:
        """Open a stored plan; None if there is no complete one."""
        try:
            file = OpenFile(path)
        except FileNotFoundError:
            return None
        size = 8 * (len(self.rows) + len(self) + 1)
        if os.fstat(file.fd).st_size != size + PLAN_TAIL:
            return None
        if int.from_bytes(os.pread(file.fd, PLAN_TAIL, size), "little") != crc32_of(file.fd, size):
            return None
        return lambda start, stop: np.frombuffer(os.pread(file.fd, 8 * (stop - start), 8 * start), np.int64)

    def _read_sizes(self) -> list[int] | None:
        """Return the number of sequences of each slice; None if the file is missing or damaged."""
        try:
            content = load_sealed_json(self.path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        self.num_tokens: int = content["tokens"]
        return content["sequences"]

    def _write_sizes(self) -> None:
        sizes, tokens = [], 0
        for part in read_slices(self.rows, self.progress):
            sizes.append(count_sequences(part, self.capacity))
            tokens += int(part.lengths.sum())
        write_atomic_file(self.path, dump_sealed_json({"sequences": sizes, "tokens": tokens}))


def _with_checksum(parts: Iterator[np.ndarray]) -> Iterator[bytes]:
    """Yield the bytes of the values, and the tail."""
    checksum = 0
    for part in parts:
        raw = part.tobytes()
        checksum = zlib.crc32(raw, checksum)
        yield raw
    yield checksum.to_bytes(PLAN_TAIL, "little")


Sequences = UnpackedSequences | PackedSequences
