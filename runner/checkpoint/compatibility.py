"""Facts that a checkpoint stores, and what a difference in one of them means for a resume.

The rounding of a training depends on its settings and data, and on code, libraries, processor, threads and variables of
the environment.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from common.filesystem import sha256_of_json
from common.paths import REPO_ROOT
from common.registry import plugin_files
from common.settings import OnResume, resume_rules, setting_values
from runner.checkpoint.format import read_newest_state

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Folders of the code that computes, restores or orders the numbers of a training; plugins are added.
TRAINING_CODE = ("common", "data", "models", "runner/checkpoint", "runner/engine")
CODE_SUFFIXES = (".py", ".cpp", ".h")
# Variables that choose kernels, instruction sets or the order of sums: all of these libraries, except those that change
# speed or output only.
NUMERIC_VARIABLES = (
    *"ATEN_ CUBLAS_ CUDNN_ DNNL_ GOMP_ KMP_ MKL_ NCCL_ NVIDIA_TF32_ OMP_ ONEDNN_ TORCHINDUCTOR_".split(),
)
# OMP_NUM_THREADS and MKL_NUM_THREADS: the number of threads is a fact of its own
HARMLESS_VARIABLES = """
    OMP_NUM_THREADS MKL_NUM_THREADS OMP_WAIT_POLICY OMP_PROC_BIND OMP_PLACES OMP_STACKSIZE OMP_DISPLAY_ENV
    GOMP_SPINCOUNT GOMP_CPU_AFFINITY KMP_BLOCKTIME KMP_AFFINITY KMP_DUPLICATE_LIB_OK MKL_VERBOSE DNNL_VERBOSE
    ONEDNN_VERBOSE NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_SOCKET_IFNAME TORCHINDUCTOR_CACHE_DIR
    ONEDNN_PRIMITIVE_CACHE_CAPACITY
""".split()
MAX_VALUE_LENGTH = 200  # characters of a variable that are recorded
COMPILER_SECONDS = 5.0


def environment_without_torch() -> dict[str, Any]:
    """Return those facts of `describe_environment` that need no import of torch."""
    import numpy

    return {
        "code": code_fingerprint(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "cpu_model": cpu_model(),
        **{f"variables.{name}": value for name, value in numeric_variables(os.environ).items()},
    }


def describe_environment(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Return fact -> value, as JSON values, of this process.

    It costs about 5 ms, most of it for `code_fingerprint`.
    """
    import torch

    # MKL and oneDNN among others
    build = [line for line in torch.__config__.show().splitlines() if "CPU capability" not in line]
    facts = environment_without_torch() | {
        "torch": torch.__version__,
        "torch_build": hashlib.sha256("\n".join(build).encode()).hexdigest()[:16],
        "ranks": num_ranks,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    if device.type == "cuda":
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": nvidia_driver()}
        # which compiles the kernels of the GPU; as it is installed: importing it takes a second
        facts["triton"] = version("triton") if find_spec("triton") else None
        facts["cudnn_benchmark"] = torch.backends.cudnn.benchmark
    return facts


def nvidia_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the first line that the NVIDIA driver says of itself (Linux); None if there is no driver."""
    try:
        return file.read_text(errors="replace").partition("\n")[0][:MAX_VALUE_LENGTH]
    except OSError:
        return None


@cache
def code_fingerprint(root: Path = REPO_ROOT) -> str:
    """Return the sha256 of the Python and C++ files that training executes, those of imported plugins included; of an
    installed wheel, too.
    """
    files = {
        f"{folder}/{path.relative_to(root / folder).as_posix()}": path
        for folder in TRAINING_CODE
        for path in (root / folder).rglob("*")
        if path.suffix in CODE_SUFFIXES
    }
    files |= {f"plugin/{path}": file for path, file in plugin_files().items()}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def cpu_model() -> str:
    """Return the name of the processor and a hash of its instruction sets: libraries choose kernels by them. Off Linux:
    what Python knows.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = fields.get("flags") or fields.get("Features") or ""
    return f"{fields.get('model name', platform.machine())} {hashlib.sha256(' '.join(sorted(features.split())).encode()).hexdigest()[:8]}"


def numeric_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` that may change a bit of the result."""
    names = sorted(
        name for name in environment if name.startswith(NUMERIC_VARIABLES) and name not in HARMLESS_VARIABLES
    )
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
    return {
        f"rank{k}.{fact}": value
        for k, facts in enumerate(per_rank)
        for fact, value in facts.items()
        if value != first.get(fact)
    }


# Facts that are no settings. data and tokenizer are identified by their content, so that their files may be moved.
ROWS_PER_STEP, DATA_FINGERPRINT, TOKENIZER_FINGERPRINT, FROZEN_WEIGHTS, ENVIRONMENT = (
    "rows_per_step",
    "data_fingerprint",
    "tokenizer_fingerprint",
    "frozen_weights",
    "environment",
)
CODE = f"{ENVIRONMENT}.code"  # fingerprint of the code; decides whether code has changed
# git commit of the code and hash of uncommitted changes, for messages: a commit may change documentation only
WRITTEN_BY = "written_by"


def describe_run(
    config: Any,
    *,
    device: torch.device,
    num_ranks: int,
    rows_per_step: int,
    data: str,
    tokenizer: str,
    frozen: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return fact -> value: every setting of `config` (a dataclass), the fingerprints of what it refers to, and the
    environment.

    `data`, `tokenizer`: fingerprints. `frozen`: weights that training reads and never changes (a base under adapters, a
    reference); no checkpoint contains them.
    """
    facts = setting_values(config) | {
        ROWS_PER_STEP: rows_per_step,
        DATA_FINGERPRINT: data,
        TOKENIZER_FINGERPRINT: tokenizer,
    }
    if frozen:
        facts[FROZEN_WEIGHTS] = fingerprint_parameters(frozen)
    return facts | environment_facts(describe_environment(device, num_ranks))


def environment_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` as facts of a run whose differences change the rounding."""
    return {f"{ENVIRONMENT}.{name}": value for name, value in values.items()}


def recorded_environment(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` of all `environment_facts` among `facts`."""
    return {
        fact.partition(".")[2]: value for fact, value in sorted(facts.items()) if fact.startswith(f"{ENVIRONMENT}.")
    }


def run_rules(config: Any) -> dict[str, str]:
    """Return the rule of every fact that may change; other facts are incompatible."""
    return {ENVIRONMENT: "changes_rounding", WRITTEN_BY: "ignored", **resume_rules(config)}


def settings_fingerprint(config: Any) -> str:
    """Return the sha256 of all settings that a number of the training depends on."""
    rules = run_rules(config)
    values = {key: value for key, value in setting_values(config).items() if rule_of(key, rules) != "ignored"}
    return sha256_of_json(values)


def rule_of(fact: str, rules: Mapping[str, str]) -> str:
    """Return the rule of a fact: its own, that of the nearest section it is in, or "incompatible"."""
    while fact not in rules and "." in fact:
        fact = fact.rpartition(".")[0]
    return rules.get(fact, "incompatible")


def diff_facts(saved: Mapping[str, Any], current: Mapping[str, Any], rules: Mapping[str, str]) -> dict[str, list[str]]:
    """Return rule -> differences of that rule, each as "key: saved -> current", or as a sentence."""
    differences: dict[str, list[str]] = {rule: [] for rule in get_args(OnResume)}
    for fact in sorted(saved.keys() | current.keys()):
        before, now = saved.get(fact), current.get(fact)
        if before != now and (
            fact in saved or now is False or now not in ([], 0)
        ):  # a setting that is newer than the run, and off
            text = (
                f"{fact}: {before} -> {now}{_cause(fact, saved, current)}"
                if fact != CODE
                else describe_changed_code(saved, current)
            )
            differences[rule_of(fact, rules)].append(text)
    return differences


def _cause(fact: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return what a changed fingerprint says: what differs."""
    if fact == FROZEN_WEIGHTS:
        return " (the weights of init_from, which the run reads again, have changed: restore them)"
    if fact == TOKENIZER_FINGERPRINT:
        return " (the tokenizer or its chat template differs)"
    if fact != DATA_FINGERPRINT:
        return ""
    is_same = saved.get(TOKENIZER_FINGERPRINT) == current.get(TOKENIZER_FINGERPRINT)
    return (
        " (the rows differ, or how they are encoded; the tokenizer is the same)"
        if is_same
        else " (the tokens of the rows: the tokenizer differs)"
    )


def describe_changed_code(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return "code changed: A -> B": commits if both are known and differ, otherwise the first digits of the code's
    fingerprints.
    """
    before, now = (facts.get(f"{WRITTEN_BY}.commit") for facts in (saved, current))
    if before and now and before != now:
        return f"code changed: {before[:12]} -> {now[:12]}"
    uncommitted = f" (uncommitted changes to {now[:12]})" if before and now else ""
    return f"code changed: {str(saved[CODE])[:12]} -> {str(current.get(CODE))[:12]}{uncommitted}"


def has_other_frozen_weights(run_dir: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether `tensors`, the frozen weights of a run, were others when its newest checkpoint was saved."""
    saved = (read_newest_state(run_dir) or {}).get("compatibility", {}).get(FROZEN_WEIGHTS)
    return saved is not None and saved != fingerprint_parameters(tensors)


def fingerprint_parameters(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
