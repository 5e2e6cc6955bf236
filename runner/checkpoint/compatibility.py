"""Facts about a run that its checkpoints store, and what a difference in one of them means for a resume."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from common.settings import OnResume, iter_settings, resume_rules

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Facts that are no settings. data and tokenizer are identified by their content, so that their files may be moved.
ROWS_PER_STEP, DATA_FINGERPRINT, TOKENIZER_FINGERPRINT, FROZEN_WEIGHTS, ENVIRONMENT = (
    "rows_per_step",
    "data_fingerprint",
    "tokenizer_fingerprint",
    "frozen_weights",
    "environment",
)


def describe_run(
    config: Any, *, device: torch.device, num_ranks: int, rows_per_step: int, data: str, tokenizer: str, frozen: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return fact -> value: every setting of `config` (a dataclass), the fingerprints of what it refers to, and the environment.

    `data`, `tokenizer`: fingerprints. `frozen`: weights that training reads and never changes (a base under adapters, a reference);
    no checkpoint contains them.
    """
    facts = dict(iter_settings(config)) | {ROWS_PER_STEP: rows_per_step, DATA_FINGERPRINT: data, TOKENIZER_FINGERPRINT: tokenizer}
    if frozen:
        facts[FROZEN_WEIGHTS] = fingerprint_parameters(frozen)
    return facts | {f"{ENVIRONMENT}.{name}": value for name, value in describe_environment(device, num_ranks).items()}


def describe_environment(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Return what rounding depends on besides settings and data."""
    import numpy
    import torch

    ranks = {"ranks": num_ranks} if num_ranks > 1 else {}
    return ranks | {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def run_rules(config: Any) -> dict[str, str]:
    """Return the rule of every fact that may change; other facts are incompatible."""
    return {ENVIRONMENT: "changes_rounding", **dict(resume_rules(config))}


def rule_of(fact: str, rules: Mapping[str, str]) -> str:
    """Return the rule of a fact: its own, that of the nearest section it is in, or "incompatible"."""
    while fact not in rules and "." in fact:
        fact = fact.rpartition(".")[0]
    return rules.get(fact, "incompatible")


def diff_facts(saved: Mapping[str, Any], current: Mapping[str, Any], rules: Mapping[str, str]) -> dict[str, list[str]]:
    """Return rule -> differences of that rule, each as "key: saved -> current"."""
    differences: dict[str, list[str]] = {rule: [] for rule in get_args(OnResume)}
    for fact in sorted(saved.keys() | current.keys()):
        if saved.get(fact) != current.get(fact):
            differences[rule_of(fact, rules)].append(f"{fact}: {saved.get(fact)} -> {current.get(fact)}")
    return differences


def fingerprint_parameters(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
