"""Environment of a case: what its process really has, and the thread settings from which the best one is chosen."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

OWN = "as its users run it"  # the environment of the benchmark, to which nothing is added
THREADS = ("OMP_", "GOMP_", "KMP_", "MKL_NUM")  # variables that a setting replaces
LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")  # emulate an older processor
PACKAGES = ("common", "data", "models", "runner")  # of the project
RECORDED = (*THREADS, "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def thread_settings(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return name -> variables of the settings that are tried beside `environment`; one that equals it is left out."""
    spin = {"GOMP_SPINCOUNT": "100000", "KMP_BLOCKTIME": "1"}  # about 1 ms: of GCC's library, and of LLVM's and Intel's
    settings = {
        "threads unset": {},
        "OMP_WAIT_POLICY=active": {"OMP_WAIT_POLICY": "active"},
        "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
        "spin 1 ms": spin,
        "a bound thread per core": {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_PROC_BIND": "true"},
    }
    own = {name: value for name, value in environment.items() if name.startswith(THREADS)}
    return {name: variables for name, variables in settings.items() if variables != own}


def with_setting(environment: Mapping[str, str], variables: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment with the thread variables replaced by `variables`; None: unchanged."""
    if variables is None:
        return dict(environment)
    return {name: value for name, value in environment.items() if not name.startswith(THREADS)} | dict(variables)


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that choose threads, kernels and memory; of a path only its last part."""
    return {name: value.rpartition("/")[2] for name, value in sorted(environment.items()) if name.startswith(RECORDED)}


def process_facts(adapts_spinning: bool) -> dict[str, Any]:
    """Return what decides the speed of this process beside its code, as JSON values."""
    torch, libraries = sys.modules.get("torch"), set[str]()
    with suppress(OSError):
        names = {
            Path(line.split()[-1]).name
            for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            if "/" in line
        }
        libraries = {
            name for name in names if name.startswith(("libgomp", "libiomp", "libomp", "libjemalloc", "libtcmalloc"))
        }
    variables = recorded_variables(os.environ)
    # of another checkout (commits.py), the modules may have other names
    modules = (sys.modules.get(name) for name in ("runner.engine.device.cpu", "runner.engine.device.cpu.allocator"))
    allocator = next((module for module in modules if hasattr(module, "keep_freed_memory")), None)
    is_set_by_us = (
        allocator is not None
        and allocator.keep_freed_memory.cache_info().currsize
        and not any(name.startswith("MALLOC_") for name in variables)
    )
    # of another checkout (commits.py), the allocator may be older
    has_pool = is_set_by_us and hasattr(allocator, "pool_size") and allocator.pool_size()
    return {
        "variables": variables,
        "threads": torch.get_num_threads() if torch else None,
        "libraries": sorted(libraries),
        "waiting": "sleeps beside other load" if adapts_spinning else "the library's",
        "allocator": ("pool of large tensors" if has_pool else "keeps freed memory")
        if is_set_by_us
        else "malloc's own",
        "has_engine": "runner.engine" in sys.modules,  # False for every other trainer
    }


def imported_code() -> dict[str, list[str]]:
    """Return the folders from which this process has imported the packages of the project, as a JSON value."""
    paths = (path for name in PACKAGES if name in sys.modules for path in sys.modules[name].__path__)
    return {"folders": sorted({str(Path(path).resolve().parent) for path in paths})}


def describe_facts(facts: Mapping[str, Any]) -> str:
    variables = " ".join(f"{name}={value}" for name, value in facts["variables"].items()) or "no variables"
    return f"{facts['threads']} threads, waiting: {facts['waiting']}, memory: {facts['allocator']}, {variables}"
