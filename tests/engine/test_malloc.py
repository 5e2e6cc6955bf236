"""What a step frees is there for the next one."""

import ctypes
import os
import resource

import pytest

from runner.engine.loop import train_step


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt") or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ), reason="somebody else decides"
)
def test_a_step_takes_no_memory_that_the_step_before_gave_back(make_run):
    """Given back, a step of this size asks for 25,000 pages and more, every time."""
    state = make_run("pretrain", "model=tiny", "model.max_position_embeddings=1024", "train.batch_size=64", "data.packing=best_fit", rows=1000)
    [batches] = [batches for _, batches in zip(range(1), state.loader.iter_epoch(0), strict=False)]

    def pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        train_step(state, batches, 1e-4)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min([pages() for _ in range(4)]) < 1000
