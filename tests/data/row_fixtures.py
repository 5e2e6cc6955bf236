"""Encoded rows of random numbers, whose name tells which row it is."""

from __future__ import annotations

import numpy as np

from data.batching.loader import StepLoader
from data.batching.packing import Sequences, UnpackedSequences
from data.batching.sampler import ShuffledSampler
from data.types import EncodedRow, TokenSequence


class RandomRows:
    """Row i has `lengths[i]` input tokens in `sequences_per_row` sequences (1 or 2) of about the same length."""

    fingerprint = "random rows"

    def __init__(self, lengths: list[int], sequences_per_row: int = 1, vocab_size: int = 1000) -> None:
        self.sizes, self.sequences_per_row, self.vocab_size = np.array(lengths, np.int64), sequences_per_row, vocab_size

    def __len__(self) -> int:
        return len(self.sizes)

    def lengths(self, start: int, stop: int) -> np.ndarray:
        return self.sizes[start:stop]

    def distinct(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)

    def __getitem__(self, i: int) -> EncodedRow:
        rng = np.random.default_rng(i)
        first = int(self.sizes[i]) // self.sequences_per_row
        lengths = [first] if self.sequences_per_row == 1 else [first, int(self.sizes[i]) - first]
        return EncodedRow(tuple(self._sequence(rng, length) for length in lengths), f"row:{i}")

    def _sequence(self, rng: np.random.Generator, length: int) -> TokenSequence:
        loss_mask = rng.random(length + 1) < 0.6
        loss_mask[0], loss_mask[-1] = False, True
        return TokenSequence(rng.integers(0, self.vocab_size, length + 1).astype(np.int32), loss_mask)


def make_loader(
    sequences: Sequences,
    batch_size: int = 4,
    accumulation_steps: int = 1,
    seed: int = 0,
    **options: int,
) -> StepLoader:
    sampler = ShuffledSampler(len(sequences), batch_size * accumulation_steps, seed)
    return StepLoader(sequences, sampler, batch_size=batch_size, pad_id=0, **options)


def unpacked(size: int) -> UnpackedSequences:
    return UnpackedSequences(RandomRows([1 + i % 5 for i in range(size)]))


def names_of(steps) -> list[list[str]]:
    return [[name for batch in batches for name in batch.names] for batches in steps]
