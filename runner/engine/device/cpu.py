"""Process settings for training on a CPU: memory allocator and thread waiting."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
MAX_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_32BIT = 1 << 30, 1 << 25  # bytes; older glibc accepts only the second


def disable_malloc_trim() -> None:
    """Keep freed memory in the process, unless the user has set malloc's environment variables.

    glibc returns freed memory to the system, which clears each page before the next step gets it back: up to a tenth of a step's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt(M_TRIM_THRESHOLD, -1)  # never
    if not mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD):
        mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_32BIT)


def set_passive_omp_wait() -> None:
    """Let torch's threads sleep while they wait for each other, unless the user has set it; call before torch is imported.

    By default they spin, and on a machine with other load a step takes up to eight times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
