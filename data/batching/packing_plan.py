"""Which rows share a packed sequence: best fit, another draw each epoch, and never two copies of a row.

The rows are divided into slices that are packed one by one. The number of packed sequences of a slice is that of a packing without
randomness, so every epoch has equally many, and which step belongs to which epoch is known without planning the epochs before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.batching.sampler import ORDER_VERSION, random_bits, shuffled_index
from data.store.cache import ProgressCallback
from data.types import RowSource

PLAN_VERSION = f"2.{ORDER_VERSION}"  # of the algorithm: another plan is another training
ROWS_PER_SLICE = 1 << 16  # rows that are packed together; larger slices hardly fill better
PLAN_SLICE = 1 << 10  # adjacent rows that are read together; these chunks are shuffled, so that a sorted file is mixed
# A draw packs rows in the order of length * (1 + noise * uniform), so that rows whose length is unique get other neighbours, too: with
# the first noise that needs no more sequences than there are.
LENGTH_NOISES = (0.3, 0.1, 0.0)


def best_fit_plan(lengths: np.ndarray, capacity: int, order: np.ndarray | None = None, distinct: np.ndarray | None = None) -> list[list[int]]:
    """Return the row indices of each packed sequence: each row into the fullest sequence that has space for it.

    `order`: the rows as they are packed, by default the longest first, which is best-fit decreasing (Johnson 1973, "Near-optimal bin
    packing algorithms": at most 11/9 of the minimal number of bins). `distinct`: (number of rows,) equal for copies of one row, which
    must be adjacent in `order` and share no sequence. Raises ValueError if a row is longer than `capacity` tokens.
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
    distinct: np.ndarray  # int64 (n,) equal for copies of one row

    def plan(self, capacity: int, noise: float, bits: np.ndarray) -> list[list[int]]:
        """Pack the longest rows first, after multiplying each length with 1 + noise * uniform; `bits`: uint64, one per distinct row.

        Without noise the number of sequences is the same for all `bits`: they decide only which rows of the same length and number of
        copies change places.
        """
        drawn = bits[self._inverse]
        key = -self.lengths * (1 + noise * (drawn >> np.uint64(11)) * 2.0**-53)
        order = np.lexsort((self._inverse, drawn, -self._copies[self._inverse], key))  # by key, then copies, bits, row
        return best_fit_plan(self.lengths, capacity, order, self._inverse)

    @cached_property
    def _unique(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.unique(self.distinct, return_inverse=True, return_counts=True)

    @property
    def _inverse(self) -> np.ndarray:
        return self._unique[1]

    @property
    def _copies(self) -> np.ndarray:
        return self._unique[2]

    @property
    def num_distinct(self) -> int:
        return len(self._unique[0])


def read_slices(rows: RowSource, progress: ProgressCallback) -> Iterator[_Slice]:
    """Yield the slices: the same for every epoch and seed. Memory does not grow with the number of rows."""
    size = len(rows)
    chunks, chunks_per_slice = -(-size // PLAN_SLICE), ROWS_PER_SLICE // PLAN_SLICE
    for number, start in enumerate(range(0, chunks, chunks_per_slice)):
        shuffled = shuffled_index(np.arange(start, min(start + chunks_per_slice, chunks)), chunks, seed=0, epoch=0)
        spans = [(n * PLAN_SLICE, min((n + 1) * PLAN_SLICE, size)) for n in shuffled.tolist()]
        members, lengths, distinct = (np.concatenate([read(*span) for span in spans]) for read in (np.arange, rows.lengths, rows.distinct))
        yield _Slice(number, members, lengths, distinct)
        done = min((start + chunks_per_slice) * PLAN_SLICE, size)
        progress(done, size, done)


def count_sequences(part: _Slice, capacity: int) -> int:
    """Return the number of packed sequences of a slice, the same in every epoch: 0.1 % more than without randomness."""
    count = len(part.plan(capacity, 0.0, np.zeros(part.num_distinct, np.uint64)))
    return min(count + count // 1000, len(part.members))


def draw_plan(part: _Slice, capacity: int, num_sequences: int, seed: int, epoch: int) -> list[list[int]]:
    """Return exactly `num_sequences` (of `count_sequences`) lists of positions in `part.members`, as a function of seed and epoch."""
    bits = random_bits(part.num_distinct, seed, epoch, part.number)
    plans = (part.plan(capacity, noise, bits) for noise in LENGTH_NOISES)
    sequences = next(plan for plan in plans if len(plan) <= num_sequences)  # without noise it always fits
    while len(sequences) < num_sequences:
        sequences.append([max(sequences, key=len).pop()])
    return sequences
