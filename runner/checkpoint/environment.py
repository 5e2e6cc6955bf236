"""What the rounding of a training depends on besides its settings and data: code, libraries, processor, threads, and variables of the environment."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.paths import REPO_ROOT
from common.registry import imported_plugins, plugin_files

if TYPE_CHECKING:
    import torch

# Folders of the code that computes, restores or orders the numbers of a training; plugins are added.
TRAINING_CODE = ("common", "data", "models", "runner/checkpoint", "runner/engine")
CODE_SUFFIXES = (".py", ".cpp", ".h")
# Variables that choose kernels, instruction sets or the order of sums: all of these libraries, except those that change speed or output only.
NUMERIC_VARIABLES = ("ATEN_", "CUBLAS_", "CUDNN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NCCL_", "NVIDIA_TF32_", "OMP_", "ONEDNN_", "TORCHINDUCTOR_")
HARMLESS_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS",  # the number of threads is a fact of its own
    "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "OMP_STACKSIZE", "OMP_DISPLAY_ENV", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME", "KMP_AFFINITY",
    "KMP_DUPLICATE_LIB_OK", "MKL_VERBOSE", "DNNL_VERBOSE", "ONEDNN_VERBOSE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
)  # fmt: skip
MAX_VALUE_LENGTH = 200  # characters of a variable that are recorded
COMPILER_SECONDS = 5.0


def describe_environment(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Return fact -> value, as JSON values, of this process. It costs about 5 ms, most of it for `code_fingerprint`."""
    import numpy
    import torch

    build = [line for line in torch.__config__.show().splitlines() if "CPU capability" not in line]  # MKL and oneDNN among others
    return {
        "code": code_fingerprint(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_build": hashlib.sha256("\n".join(build).encode()).hexdigest()[:16],
        "numpy": numpy.__version__,
        "ranks": num_ranks,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_model": cpu_model(),
        "mkldnn": torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **{f"variables.{name}": value for name, value in numeric_variables(os.environ).items()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **(_describe_cuda() if device.type == "cuda" else {}),
    }


def _describe_cuda() -> dict[str, Any]:
    import torch

    return {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "cudnn_benchmark": torch.backends.cudnn.benchmark}


@cache
def code_fingerprint(root: Path = REPO_ROOT) -> str:
    """Return the sha256 of the Python and C++ files that training executes, those of imported plugins included; of an installed wheel, too."""
    files = {
        f"{folder}/{path.relative_to(root / folder).as_posix()}": path
        for folder in TRAINING_CODE
        for path in (root / folder).rglob("*")
        if path.suffix in CODE_SUFFIXES
    }
    files |= {f"plugin/{path}": file for name in imported_plugins() for path, file in plugin_files(name).items()}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def cpu_model() -> str:
    """Return the name of the processor and a hash of its instruction sets: libraries choose kernels by them. Off Linux: what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = fields.get("flags") or fields.get("Features") or ""
    return f"{fields.get('model name', platform.machine())} {hashlib.sha256(' '.join(sorted(features.split())).encode()).hexdigest()[:8]}"


def numeric_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` that may change a bit of the result."""
    names = sorted(name for name in environment if name.startswith(NUMERIC_VARIABLES) and name not in HARMLESS_VARIABLES)
    return {name: environment[name][:MAX_VALUE_LENGTH] for name in names}


def compiler_version() -> str:
    """Return the first line that the C++ compiler of torch.compile prints about itself, "unknown" if it prints none."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    try:
        done = subprocess.run([compiler or "", "--version"], check=False, capture_output=True, timeout=COMPILER_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.decode("utf-8", "replace").partition("\n")[0][:MAX_VALUE_LENGTH] or "unknown"


def rank_differences(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return "rank<k>.<fact>" -> value of every fact in which rank k, of another machine, differs from rank 0."""
    first = per_rank[0]
    return {f"rank{k}.{fact}": value for k, facts in enumerate(per_rank) for fact, value in facts.items() if value != first.get(fact)}
