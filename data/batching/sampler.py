"""Order of the items of an epoch as a function of (seed, epoch): no state to save, and skipping to any step is O(1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

ORDER_VERSION = 2  # of the functions here: with another order a checkpoint would repeat some rows and skip others
# up to this size a permutation is drawn as a whole: six rounds on a few bits do not reach all of them equally often
SMALL_SIZE = 1 << 12
FEISTEL_ROUNDS = 6
# steps whose rows are sorted by length together: more steps mean less padding, but less shuffling
SORT_WINDOW_STEPS = 64


@dataclass(eq=False)
class ShuffledSampler:
    """Indices of each step: `global_batch_size` of `size` items in random order, fewer in the last step of an epoch."""

    size: int
    global_batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.size // self.global_batch_size)

    def indices(self, epoch: int, step: int) -> np.ndarray:
        """Return the item indices of step `step` of the epoch, int64 (n,)."""
        return self._indices_between(epoch, step, step + 1)

    def num_items(self, epoch: int, step: int) -> int:
        """Return the length of `indices`, without computing them."""
        return min(self.global_batch_size, self.size - self._first_position(epoch, step))

    def _first_position(self, epoch: int, step: int) -> int:
        """Return the number of items in the steps of the epoch before this one, as they are divided into steps."""
        return step * self.global_batch_size

    def _indices_between(self, epoch: int, start: int, end: int) -> np.ndarray:
        positions = np.arange(start * self.global_batch_size, min(end * self.global_batch_size, self.size))
        return shuffled_index(positions, self.size, self.seed, epoch)


@dataclass(eq=False)
class LengthGroupedSampler(ShuffledSampler):
    """Steps of rows with similar lengths, in random order.

    The shuffled rows of SORT_WINDOW_STEPS steps are sorted by length and divided into steps, and these steps are
    shuffled again.
    """

    lengths: Callable[[int, int], np.ndarray]  # of the rows [start, stop)

    def __post_init__(self) -> None:
        self._sorted = lru_cache(maxsize=1)(self._sort)

    def indices(self, epoch: int, step: int) -> np.ndarray:
        window = step // SORT_WINDOW_STEPS
        start = self._first_position(epoch, step) - window * SORT_WINDOW_STEPS * self.global_batch_size
        return self._sorted(epoch, window)[start : start + self.global_batch_size]

    def _first_position(self, epoch: int, step: int) -> int:
        first = step // SORT_WINDOW_STEPS * SORT_WINDOW_STEPS
        steps = min(SORT_WINDOW_STEPS, self.steps_per_epoch - first)
        return (
            first + int(shuffled_index(np.array([step - first]), steps, self.seed, epoch)[0])
        ) * self.global_batch_size

    def _sort(self, epoch: int, window: int) -> np.ndarray:
        rows = self._indices_between(epoch, window * SORT_WINDOW_STEPS, (window + 1) * SORT_WINDOW_STEPS)
        lengths = np.concatenate([self.lengths(row, row + 1) for row in rows.tolist()])
        return rows[np.argsort(lengths, kind="stable")]


def shuffled_index(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the item at each of `positions` (int, < size) of an epoch: a permutation of range(size).

    Above SMALL_SIZE a Feistel network over the smallest 4^k >= size, repeated until the result is below size (Black &
    Rogaway 2002, https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf): no memory, so 10^8 items cost as much as 10^4.
    """
    if size <= SMALL_SIZE:
        return _small_permutation(size, seed, epoch)[positions]
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(FEISTEL_ROUNDS, np.uint64)
    items = _feistel(positions.astype(np.uint64), half_bits, keys)
    while (outside := items >= size).any():
        items[outside] = _feistel(items[outside], half_bits, keys)
    return items.astype(np.int64)


@lru_cache(maxsize=8)
def _small_permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of range(size), each equally likely: the order of independent random numbers."""
    return np.argsort(random_bits(size, seed, epoch), kind="stable")


def random_bits(size: int, *seeds: int) -> np.ndarray:
    """Return random uint64 (size,) as a function of `seeds`; NumPy guarantees this stream for all its versions."""
    return np.random.Philox(np.random.SeedSequence(seeds)).random_raw(size)


def hash64(values: np.ndarray, seed: int) -> np.ndarray:
    """Return a 64-bit hash of each value: a random draw without a generator, the same on every machine."""
    return _mix(values.astype(np.uint64) + np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])


def _feistel(values: np.ndarray, half_bits: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half_bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Finalizer of splitmix64: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
