"""The order of rows as a function of (seed, epoch): nothing to store, nothing to replay, any position at once."""

from __future__ import annotations

import numpy as np

ROUNDS = 6


def shuffled(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Which row stands at each of `positions` (int, < size) of an epoch: a permutation of range(size).

    A Feistel network over the smallest 4^k >= size, walked until it lands inside (Black & Rogaway 2002,
    https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf): no memory, so 10^8 rows cost what 10 do.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
    rows = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := rows >= size).any():
        rows[outside] = _feistel(rows[outside], half, keys)
    return rows.astype(np.int64)


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
