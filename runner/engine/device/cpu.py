"""What a step frees stays with the process: the next step needs as much again."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as glibc's malloc.h numbers them
MAX_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_32BIT = 1 << 30, 1 << 25  # bytes of a block that is kept; older versions take no more than the second


def disable_malloc_trim() -> None:
    """glibc gives freed memory back to the system, which hands it out again page by page, each cleared: up to a tenth of a step on a processor.
    The process then holds what its largest step needs, which it would come to hold anyway. Whoever sets variables of malloc's own is obeyed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt(M_TRIM_THRESHOLD, -1)  # never
    if not mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD):
        mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_32BIT)


def set_passive_omp_wait() -> None:
    """Let torch's threads sleep while they wait for each other. They spin otherwise, and on a busy machine a step then takes
    eight times as long (docs/LOG.md). It has to be said before torch is imported; whoever sets the variable is obeyed."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
