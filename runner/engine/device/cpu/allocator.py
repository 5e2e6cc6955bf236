"""Memory allocator of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
MAX_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_32BIT = 1 << 30, 1 << 25  # bytes; older glibc accepts only the second
LARGE_BLOCK = 1 << 20  # bytes
PRIMITIVES = 128  # matrix products of different shapes that oneDNN keeps ready; its default is 1,024


def separate_large_blocks() -> None:
    """Map each block of at least LARGE_BLOCK bytes on its own until `keep_freed_memory()`; call before the model is built.

    The first step compiles and fills caches. Without this, the small objects that it leaves lie between its large blocks, and the holes
    among them fit the blocks of no later step. oneDNN keeps an object per shape of a product, and packed rows have many shapes.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVES))
    keep_freed_memory.cache_clear()  # of an earlier run of this process
    if mallopt := _glibc_mallopt():
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


@cache
def keep_freed_memory() -> None:
    """Keep freed memory in the process; call after the first step.

    glibc returns freed memory to the system, which clears each page before the next step gets it back: up to half of a step's time.
    """
    if mallopt := _glibc_mallopt():
        mallopt(M_TRIM_THRESHOLD, -1)  # never
        if not mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD):
            mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_32BIT)


def _glibc_mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's `mallopt`; None without glibc, and where the user has set malloc's environment variables."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
