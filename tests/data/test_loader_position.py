"""Where a run stands in its data is computed: step 1,000,000 of 10^8 rows is found as fast as step 1, and in no more memory."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np

from data.batching.batch import UnpackedWindows
from data.batching.loader import StepLoader
from data.batching.sampler import ShuffledSampler
from data.types import EncodedRow, TokenSequence

FAR = 1_000_000


class Rows:
    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> EncodedRow:
        return EncodedRow((TokenSequence(np.full(9, index % 6400, np.int32), np.ones(9, bool)),), str(index))


def loader() -> StepLoader:
    return StepLoader(UnpackedWindows(Rows()), ShuffledSampler(10**8, 32, seed=42), batch_size=16, pad_id=0, packed=False)


def test_the_millionth_step_costs_no_time_and_no_memory():
    next(loader().steps(0))
    tracemalloc.start()
    began = time.perf_counter()
    batches = next(loader().steps(0, skip=FAR))
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(batch.names) for batch in batches] == [16, 16]
    assert seconds < 1 and peak < 50e6


def test_what_is_found_there_is_what_would_have_come():
    walked = loader().steps(3, skip=FAR - 2)
    next(walked), next(walked)
    assert [batch.names for batch in next(walked)] == [batch.names for batch in next(loader().steps(3, skip=FAR))]
