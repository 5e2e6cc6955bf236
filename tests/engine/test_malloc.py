"""Memory that a step frees stays in the process for the next step."""

import ctypes
import os
import resource

import pytest

from runner.engine.loop import train_step


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt") or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ),
    reason="no glibc, or the environment configures malloc",
)
def test_malloc_trim_is_disabled_so_that_steps_reuse_their_pages(make_run):
    """Otherwise each step of this size has more than 25,000 page faults."""
    state = make_run("pretrain", "model=tiny", "model.max_position_embeddings=1024", "train.batch_size=64", "data.packing=best_fit", rows=1000)
    batches = next(state.loader.iter_epoch(0))

    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        train_step(state, batches, 1e-4)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min(page_faults() for _ in range(4)) < 1000
