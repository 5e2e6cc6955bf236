"""What a process that trains on a CPU sets for itself: its memory allocator, and how many threads it computes with
beside the other trainings that this user runs on this machine now.

The bits of a result depend on the number of threads, so a resumed run takes that of its checkpoint.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from common.filesystem import is_private_dir
from common.limits import MEMINFO, MEMORY_LIMITS, control_groups

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
MAX_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_32BIT = 1 << 30, 1 << 25  # bytes; older glibc accepts only the second
LARGE_BLOCK = 1 << 20  # bytes
POOL_SOURCE = Path(__file__).parent / "memory_pool.cpp"
POOL_REGION = 1 << 42  # bytes of addresses; memory is used as tensors need it
POOLED_BLOCK = 1 << 16  # bytes: smaller tensors stay in the heap
PRIMITIVES = 128  # matrix products of different shapes that oneDNN keeps ready; its default is 1,024
THREADS_ENV = "RUNNER_THREADS"  # cores that a sweep gives to each of its parallel jobs
# set by the user, or by the launcher of ranks and jobs: nothing is changed
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

_chosen: int | None = None
MAX_TRAININGS = 1_000  # files that are read
MAX_NUMBER_BYTES = 16  # of a file: a number of threads


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
        library = load_library("memory_pool", [POOL_SOURCE], folder)
    except KernelsUnavailableError as error:
        return str(error)
    limits = os.fsencode(MEMINFO), b"\n".join(map(os.fsencode, control_groups("memory", *MEMORY_LIMITS)))
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


def choose_threads(saved: int | None = None) -> str | None:
    """Set the number of threads of torch for a training; return the reason if it is not torch's own choice.

    In this order: the variables of the environment; `saved`, the number of the checkpoint; the cores that this process
    may use (a container may have fewer than the machine), shared with the other trainings of this user on this machine.
    """
    import torch

    global _chosen
    default = default_threads()
    others = RunningTrainings().threads_of_others()
    if any(name in os.environ for name in THREAD_VARIABLES):
        threads, reason = default, None
    elif saved is not None and saved <= (os.cpu_count() or 1):
        threads, reason = saved, None if saved == default else "as its checkpoint"
    else:
        threads, reason = default, None
        if (limit := cpu_limit()) is not None and limit < threads:
            threads, reason = max(1, int(limit)), f"this container may use {limit:g} cores"
        if others:
            equal = threads // (1 + len(others))
            share = max(1, equal, threads - sum(number or equal for number in others))
            threads, reason = share, f"{len(others)} other training{'s' * (len(others) > 1)} on {threads} cores"
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    _chosen = threads
    RunningTrainings().set_threads(threads)
    return reason


def fix_threads() -> int:
    """Let the trainings of this process, and those that it starts, have one number of threads, whatever other trainings
    begin or end meanwhile; return it.
    """
    return int(os.environ.setdefault(THREAD_VARIABLES[0], str(default_threads())))


def current_threads() -> int:
    """Return the number of threads of torch. torch itself does not tell other threads than the one that has set it."""
    import torch

    return torch.get_num_threads() if _chosen is None else _chosen


@cache
def default_threads() -> int:
    """Return the number that torch chooses: OMP_NUM_THREADS, or the physical cores of this process."""
    import torch

    return torch.get_num_threads()


def available_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def cpu_limit() -> float | None:
    """Return the limit (cores) of the control groups (version 2) of this process; None without one."""
    limits = (_read_limit(folder / "cpu.max") for folder in control_groups("cpu", "cpu.max"))
    return min((limit for limit in limits if limit is not None), default=None)


def _read_limit(file: Path) -> float | None:
    try:
        quota, period = file.read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def threads_per_rank(count: int) -> str:
    """Return OMP_NUM_THREADS for each of `count` ranks: the value of the user, or an equal part of the cores (of the
    job's cores in a sweep).
    """
    given, share = os.environ.get("OMP_NUM_THREADS"), os.environ.get(THREADS_ENV)
    if given and given != share:  # a sweep sets both to the same value
        return given
    return str(max(1, int(share or available_cores()) // count))


class RunningTrainings:
    """A file per process, named by its id and locked while it lives; the file has the number of threads, or nothing
    while it is not chosen.

    Where the folder cannot be used (no temporary folder, owned by someone else), there are no other trainings.
    """

    _descriptor: int | None = None  # of the file of this process

    def __init__(self, folder: Path | None = None) -> None:
        try:
            temporary = tempfile.gettempdir()
        except OSError:  # none can be written to
            temporary = os.devnull
        self._folder = folder or Path(temporary) / f"lm-runner-{os.getuid()}"

    @contextmanager
    def registered(self) -> Iterator[None]:
        """List this process as a training while the block runs."""
        path = self._folder / str(os.getpid())
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if is_private_dir(self._folder, 0o077):
                RunningTrainings._descriptor = os.open(
                    path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                )
                fcntl.flock(RunningTrainings._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            if RunningTrainings._descriptor is not None:
                with suppress(OSError):
                    path.unlink()
                os.close(RunningTrainings._descriptor)
                RunningTrainings._descriptor = None

    def set_threads(self, threads: int) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.pwrite(self._descriptor, f"{threads:{MAX_NUMBER_BYTES}}".encode(), 0)

    def threads_of_others(self) -> list[int]:
        """Return the number of threads of each other training, 0 while it is not chosen.

        Files of processes that died are removed.
        """
        threads = list[int]()
        with suppress(OSError):
            if not is_private_dir(self._folder, 0o077):
                return []
            for name in sorted(os.listdir(self._folder))[:MAX_TRAININGS]:
                if name.isdigit() and name != str(os.getpid()):
                    with suppress(OSError):
                        threads += self._read(self._folder / name)
        return threads

    def _read(self, path: Path) -> list[int]:
        """Return [the number of threads], [] if its process has ended."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(descriptor, MAX_NUMBER_BYTES).strip()
            return [int(text) if text.isdigit() else 0]
        else:
            path.unlink()
            return []
        finally:
            os.close(descriptor)
