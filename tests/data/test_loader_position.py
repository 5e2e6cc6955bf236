"""Skipping is arithmetic: step 1,000,000 of 10^8 rows needs no more memory than step 1."""

from __future__ import annotations

import tracemalloc

import numpy as np

from data.batching.loader import StepLoader
from data.batching.packing import UnpackedSequences
from data.batching.sampler import ShuffledSampler
from data.types import EncodedRow, TokenSequence

FAR = 1_000_000


class ManyRows:
    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> EncodedRow:
        return EncodedRow((TokenSequence(np.full(9, index % 6400, np.int32), np.ones(9, bool)),), str(index))


def make_loader() -> StepLoader:
    return StepLoader(UnpackedSequences(ManyRows()), ShuffledSampler(10**8, 32, seed=42), batch_size=16, pad_id=0)


def test_loader_skips_a_million_steps_without_memory_for_them():
    next(make_loader().iter_epoch(0))
    tracemalloc.start()
    batches = next(make_loader().iter_epoch(0, skip=FAR))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(batch.names) for batch in batches] == [16, 16]
    assert peak < 50e6


def test_loader_skip_gives_the_same_step_as_iterating_to_it():
    steps = make_loader().iter_epoch(3, skip=FAR - 2)
    next(steps), next(steps)
    assert [batch.names for batch in next(steps)] == [
        batch.names for batch in next(make_loader().iter_epoch(3, skip=FAR))
    ]
