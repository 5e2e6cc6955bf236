"""Memory of a process that trains on a CPU: its allocator; and errors of any device that mean a lack of memory."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from common.limits import MEMINFO, memory_cgroups

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
DEFAULT_TRIM_THRESHOLD = 1 << 17  # bytes
MAX_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_32BIT = 1 << 30, 1 << 25  # bytes; older glibc accepts only the second
LARGE_BLOCK = 1 << 20  # bytes
POOL_SOURCE = Path(__file__).parent / "memory_pool.cpp"
POOL_REGION = 1 << 42  # bytes of addresses; memory is used as tensors need it
POOLED_BLOCK = 1 << 16  # bytes: smaller tensors stay in the heap
PRIMITIVES = 128  # matrix products of different shapes that oneDNN keeps ready; its default is 1,024
# of a RuntimeError of PyTorch
OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
)


def separate_large_blocks() -> None:
    """Map each block of at least LARGE_BLOCK bytes on its own until `keep_freed_memory()`; call before the model is
    built.

    The first step compiles and fills caches. Without this, the small objects that it leaves lie between its large
    blocks, and the holes among them fit the blocks of no later step. oneDNN keeps an object per shape of a product, and
    packed rows have many shapes.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVES))
    keep_freed_memory.cache_clear()  # of an earlier run of this process
    if mallopt := _glibc_mallopt():
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


@cache
def keep_freed_memory() -> None:
    """Keep freed memory in the process; call after the first step.

    glibc returns freed memory to the system, which clears each page before the next step gets it back: up to half of a
    step's time.
    """
    if mallopt := _glibc_mallopt():
        _keep_all(mallopt)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory meanwhile, then return it to the system: what is measured before the first step has memory as
    later steps have it.
    """
    mallopt = _glibc_mallopt()
    if mallopt:
        _keep_all(mallopt)
    try:
        yield
    finally:
        if mallopt:
            mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD)
            mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
            ctypes.CDLL(None).malloc_trim(0)


def _keep_all(mallopt: Callable[[int, int], int]) -> None:
    mallopt(M_TRIM_THRESHOLD, -1)  # never
    if not mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD):
        mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_32BIT)


_pool: ctypes.CDLL | None = None  # of this process, once it is used


def use_memory_pool(folder: Path) -> str:
    """Take large tensors of this process from a pool of their own (memory_pool.cpp); return why not, "" if so.
    `folder`: a private one for compiled programs.

    For long runs, because it is compiled. The pool needs the memory that its tensors need, where the heap of glibc has
    up to a half more.
    """
    from models.layers.cpu_kernels.library import KernelsUnavailableError, load_library

    global _pool
    if _pool is not None:
        return ""
    if reason := why_no_memory_pool():
        return reason
    try:
        library = load_library("memory_pool", [POOL_SOURCE], [], folder)
    except KernelsUnavailableError as error:
        return str(error)
    limits = os.fsencode(MEMINFO), b"\n".join(map(os.fsencode, memory_cgroups()))
    if library.lm_runner_use_memory_pool(ctypes.c_size_t(POOL_REGION), ctypes.c_size_t(POOLED_BLOCK), *limits):
        return "no free addresses"
    _pool = library
    return ""


def why_no_memory_pool() -> str:
    """Return why this process would not take tensors from a pool, apart from what its compiler says; "" if it would."""
    if platform.system() != "Linux":
        return f"not on {platform.system()}"
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return "the environment chooses another allocator"
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "the process has a limit of its addresses (ulimit -v)"
    return ""


def pool_size() -> int:
    """Return the bytes of the memory pool, used or free; 0 if this process has none."""
    if _pool is None:
        return 0
    _pool.lm_runner_memory_pool_size.restype = ctypes.c_size_t
    return int(_pool.lm_runner_memory_pool_size())


def _glibc_mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's `mallopt`; None without glibc, and where the user has set malloc's environment variables."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that this machine, or its GPU, has no memory left."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY_TEXTS)
    )
