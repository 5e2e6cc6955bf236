"""Memory of this machine, and a limit on what a piece of work may allocate."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUPS_OF_PROCESS, MEMORY_CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CGROUP_LIMITS = ("memory.max", "memory.limit_in_bytes")  # cgroup 2, 1


def machine_memory() -> int:
    """Return the bytes of memory that this process could get at most: of the machine, its container, or its `ulimit
    -v`.
    """
    return smallest_limit()[0]


def smallest_limit() -> tuple[int, str]:
    """Return (bytes, what sets them) of the smallest limit on the memory of this process."""
    limits = [(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "memory of the machine")]
    for path in (folder / name for folder in memory_cgroups() for name in CGROUP_LIMITS):
        with suppress(OSError, ValueError):  # ValueError: "max"
            limits.append((int(path.read_text()), f"container, {path}"))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min([*limits, *([] if soft == resource.RLIM_INFINITY else [(soft, "address space, ulimit -v")])])


def memory_cgroups() -> list[Path]:
    """Return the folders of the control groups that limit the memory of this process: its own, and those that they are
    in.

    In a container the path of its own may be that of the host: then only the root of the container exists.
    """
    try:
        lines = [line.split(":", 2) for line in CGROUPS_OF_PROCESS.read_text().splitlines()]
    except OSError:
        lines = []
    folders = [MEMORY_CGROUPS, MEMORY_CGROUPS / "memory"]
    for _, controllers, path in lines:
        if not controllers or "memory" in controllers.split(","):
            roots = [MEMORY_CGROUPS / "memory"] if controllers else [MEMORY_CGROUPS, MEMORY_CGROUPS / "unified"]
            folders += [Path(f"{root}/{parent}") for root in roots for parent in (path, *Path(path).parents)]
    return [folder for folder in dict.fromkeys(folders) if any(os.path.exists(folder / name) for name in CGROUP_LIMITS)]


@contextmanager
def allocating_at_most(size: int) -> Iterator[None]:
    """Let allocations of this process fail, with MemoryError, that would enlarge its address space by more than `size`
    bytes.

    The limit is that of the whole process: other threads should be idle.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + size
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def peak_resident_bytes() -> int:
    """Return the largest memory of this process so far (VmHWM of Linux)."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
