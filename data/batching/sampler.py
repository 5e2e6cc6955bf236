"""The order of rows as a function of (seed, epoch): nothing to store, nothing to replay, any position at once."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from data.types import RowSource

FEISTEL_ROUNDS = 6
SORT_WINDOW_STEPS = 64  # steps whose rows are sorted by length together: more would pad less and mix less


class ShuffledSampler:
    """Which of `size` items stand in each step of an epoch: `global_batch` of them, in the last step what is left."""

    def __init__(self, size: int, global_batch: int, seed: int) -> None:
        self.size, self.global_batch, self.seed = size, global_batch, seed

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.size // self.global_batch)

    def step(self, epoch: int, step: int) -> np.ndarray:
        return self._between(epoch, step, step + 1)

    def _between(self, epoch: int, step: int, end: int) -> np.ndarray:
        positions = np.arange(step * self.global_batch, min(end * self.global_batch, self.size))
        return shuffled_index(positions, self.size, self.seed, epoch)


class LengthGroupedSampler(ShuffledSampler):
    """Rows of like length stand in one step, steps of all lengths follow on each other.

    The shuffled rows of SORTED_STEPS steps are sorted by length and cut into steps, and these are shuffled again.
    """

    def __init__(self, rows: RowSource, global_batch: int, seed: int) -> None:
        super().__init__(len(rows), global_batch, seed)
        self.rows = rows
        self._sorted = lru_cache(maxsize=1)(self._sort)

    def step(self, epoch: int, step: int) -> np.ndarray:
        block = step // SORT_WINDOW_STEPS
        steps = min(SORT_WINDOW_STEPS, self.steps - block * SORT_WINDOW_STEPS)
        place = int(shuffled_index(np.array([step % SORT_WINDOW_STEPS]), steps, self.seed, epoch)[0]) * self.global_batch
        return self._sorted(epoch, block)[place : place + self.global_batch]

    def _sort(self, epoch: int, block: int) -> np.ndarray:
        rows = self._between(epoch, block * SORT_WINDOW_STEPS, (block + 1) * SORT_WINDOW_STEPS)
        lengths = np.concatenate([self.rows.lengths(row, row + 1) for row in rows.tolist()])
        return rows[np.argsort(lengths, kind="stable")]


def shuffled_index(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Which row stands at each of `positions` (int, < size) of an epoch: a permutation of range(size).

    A Feistel network over the smallest 4^k >= size, walked until it lands inside (Black & Rogaway 2002,
    https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf): no memory, so 10^8 rows cost what 10 do.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(FEISTEL_ROUNDS, np.uint64)
    rows = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := rows >= size).any():
        rows[outside] = _feistel(rows[outside], half, keys)
    return rows.astype(np.int64)


def hash64(values: np.ndarray, seed: int) -> np.ndarray:
    """A 64-bit number for each value, the same for ever: a draw that needs no generator."""
    return _mix(values.astype(np.uint64) + np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
