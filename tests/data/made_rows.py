"""Rows made of numbers, that tell which row they are of."""

from __future__ import annotations

import numpy as np

from data.loader import Single, StepLoader, Windows
from data.order import Order
from data.rows import Row, Sequence


class MadeRows:
    """`lengths[i]` is what row i feeds to the model: one sequence, or with `sides` two of about half of it each."""

    fingerprint = "made"

    def __init__(self, lengths: list[int], sides: int = 1, vocabulary: int = 1000) -> None:
        self.sizes, self.sides, self.vocabulary = np.array(lengths, np.int64), sides, vocabulary

    def __len__(self) -> int:
        return len(self.sizes)

    def lengths(self, start: int, stop: int) -> np.ndarray:
        return self.sizes[start:stop]

    def __getitem__(self, i: int) -> Row:
        draw = np.random.default_rng(i)
        first = int(self.sizes[i]) // self.sides
        parts = [first] if self.sides == 1 else [first, int(self.sizes[i]) - first]
        return Row(tuple(self._sequence(draw, positions) for positions in parts), f"row:{i}")

    def _sequence(self, draw: np.random.Generator, positions: int) -> Sequence:
        learn = draw.random(positions + 1) < 0.6
        learn[0], learn[-1] = False, True
        return Sequence(draw.integers(0, self.vocabulary, positions + 1).astype(np.int32), learn)


def loader(windows: Windows, batch_size: int = 4, accumulation_steps: int = 1, seed: int = 0, packed: bool = False, **more: int) -> StepLoader:
    return StepLoader(windows, Order(len(windows), batch_size * accumulation_steps, seed), batch_size=batch_size, pad_id=0, packed=packed, **more)


def singles(size: int) -> Single:
    return Single(MadeRows([1 + i % 5 for i in range(size)]))


def names(steps) -> list[list[str]]:
    return [[name for batch in batches for name in batch.names] for batches in steps]
