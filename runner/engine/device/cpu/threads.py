"""How many threads a training computes with.

The bits of a result depend on it, so a resumed run takes the number of its checkpoint.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from runner.engine.device.cpu.running_trainings import RunningTrainings

THREADS_ENV = "RUNNER_THREADS"  # cores that a sweep gives to each of its parallel jobs
# set by the user, or by the launcher of ranks and jobs: nothing is changed
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CGROUP_ROOT, PROC_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_chosen: int | None = None


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
    try:
        name = next(line for line in PROC_CGROUP.read_text(encoding="utf-8").splitlines() if line.startswith("0::"))[3:]
    except (OSError, UnicodeDecodeError, StopIteration):
        return None
    folder = Path(os.path.normpath(f"{CGROUP_ROOT}/{name}"))
    folders = [folder, *folder.parents] if folder.is_relative_to(CGROUP_ROOT) else [CGROUP_ROOT]
    limits = [
        limit
        for each in folders
        if each.is_relative_to(CGROUP_ROOT) and (limit := _read_limit(each / "cpu.max")) is not None
    ]
    return min(limits, default=None)


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
