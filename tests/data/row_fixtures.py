"""Rows made of numbers, that tell which row they are of."""

from __future__ import annotations

import numpy as np

from data.batching.batch import UnpackedWindows, Windows
from data.batching.loader import StepLoader
from data.batching.sampler import ShuffledSampler
from data.types import EncodedRow, TokenSequence


class MadeRows:
    """`lengths[i]` is what row i feeds to the model: one sequence, or with `sides` two of about half of it each."""

    fingerprint = "made"

    def __init__(self, lengths: list[int], sides: int = 1, vocabulary: int = 1000) -> None:
        self.sizes, self.sides, self.vocabulary = np.array(lengths, np.int64), sides, vocabulary

    def __len__(self) -> int:
        return len(self.sizes)

    def lengths(self, start: int, stop: int) -> np.ndarray:
        return self.sizes[start:stop]

    def __getitem__(self, i: int) -> EncodedRow:
        draw = np.random.default_rng(i)
        first = int(self.sizes[i]) // self.sides
        parts = [first] if self.sides == 1 else [first, int(self.sizes[i]) - first]
        return EncodedRow(tuple(self._sequence(draw, positions) for positions in parts), f"row:{i}")

    def _sequence(self, draw: np.random.Generator, positions: int) -> TokenSequence:
        learn = draw.random(positions + 1) < 0.6
        learn[0], learn[-1] = False, True
        return TokenSequence(draw.integers(0, self.vocabulary, positions + 1).astype(np.int32), learn)


def loader(windows: Windows, batch_size: int = 4, accumulation_steps: int = 1, seed: int = 0, packed: bool = False, **more: int) -> StepLoader:
    return StepLoader(windows, ShuffledSampler(len(windows), batch_size * accumulation_steps, seed), batch_size=batch_size, pad_id=0, packed=packed, **more)


def singles(size: int) -> UnpackedWindows:
    return UnpackedWindows(MadeRows([1 + i % 5 for i in range(size)]))


def names(steps) -> list[list[str]]:
    return [[name for batch in batches for name in batch.names] for batches in steps]
