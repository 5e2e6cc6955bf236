"""Memory that a step frees stays in the process for the next step."""

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from runner.engine.loop import train_step

ROOT = Path(__file__).parents[2]
RESIDENT_AFTER_FREE = """
from runner.engine.device.cpu import keep_freed_memory, separate_large_blocks

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

def mb_left_by_a_freed_block(mb):
    before = resident_mb()
    block = bytearray(mb << 20)
    block[:: 4096] = bytes(len(block) // 4096)
    del block
    return resident_mb() - before

for mb in (64, 256):
    separate_large_blocks()
    first = mb_left_by_a_freed_block(mb)
    keep_freed_memory()
    print(first, mb_left_by_a_freed_block(mb))
"""
needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt")
    or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ),
    reason="no glibc, or the environment configures malloc",
)


@pytest.mark.slow
@needs_glibc
def test_memory_freed_in_the_first_step_is_returned_and_later_kept() -> None:
    child = subprocess.run(
        [sys.executable, "-c", RESIDENT_AFTER_FREE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for line in child.stdout.splitlines():  # two runs of one process
        returned, kept = map(float, line.split())
        assert returned < 8 and kept > 56


@pytest.mark.slow
@needs_glibc
def test_malloc_trim_is_disabled_so_that_steps_reuse_their_pages(make_run):
    """Otherwise each step of this size has more than 25,000 page faults."""
    state = make_run(
        "pretrain",
        "model=tiny",
        "model.max_position_embeddings=1024",
        "train.batch_size=64",
        "data.packing=best_fit",
        rows=1000,
    )
    batches = next(state.loader.iter_epoch(0))

    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        train_step(state, batches, 1e-4)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min(page_faults() for _ in range(4)) < 1000
