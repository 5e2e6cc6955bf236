"""Facts about a run that its checkpoints store, and what a difference in one of them means for a resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from common.settings import OnResume, resume_rules, setting_values
from runner.checkpoint.environment import describe_environment

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
CODE = f"{ENVIRONMENT}.code"  # fingerprint of the code; decides whether code has changed
WRITTEN_BY = "written_by"  # git commit of the code and hash of uncommitted changes, for messages: a commit may change documentation only
UNRECORDED_CODE = "the checkpoint does not record its code and environment: a version of this program without that wrote it"


def describe_run(
    config: Any, *, device: torch.device, num_ranks: int, rows_per_step: int, data: str, tokenizer: str, frozen: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return fact -> value: every setting of `config` (a dataclass), the fingerprints of what it refers to, and the environment.

    `data`, `tokenizer`: fingerprints. `frozen`: weights that training reads and never changes (a base under adapters, a reference);
    no checkpoint contains them.
    """
    facts = setting_values(config) | {ROWS_PER_STEP: rows_per_step, DATA_FINGERPRINT: data, TOKENIZER_FINGERPRINT: tokenizer}
    if frozen:
        facts[FROZEN_WEIGHTS] = fingerprint_parameters(frozen)
    return facts | environment_facts(describe_environment(device, num_ranks))


def environment_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` as facts of a run whose differences change the rounding."""
    return {f"{ENVIRONMENT}.{name}": value for name, value in values.items()}


def recorded_environment(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` of all `environment_facts` among `facts`."""
    return {fact.partition(".")[2]: value for fact, value in sorted(facts.items()) if fact.startswith(f"{ENVIRONMENT}.")}


def run_rules(config: Any) -> dict[str, str]:
    """Return the rule of every fact that may change; other facts are incompatible."""
    return {ENVIRONMENT: "changes_rounding", WRITTEN_BY: "ignored", **resume_rules(config)}


def settings_fingerprint(config: Any) -> str:
    """Return the sha256 of all settings that a number of the training depends on."""
    rules = run_rules(config)
    values = {key: value for key, value in setting_values(config).items() if rule_of(key, rules) != "ignored"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def rule_of(fact: str, rules: Mapping[str, str]) -> str:
    """Return the rule of a fact: its own, that of the nearest section it is in, or "incompatible"."""
    while fact not in rules and "." in fact:
        fact = fact.rpartition(".")[0]
    return rules.get(fact, "incompatible")


def diff_facts(saved: Mapping[str, Any], current: Mapping[str, Any], rules: Mapping[str, str]) -> dict[str, list[str]]:
    """Return rule -> differences of that rule, each as "key: saved -> current", or as a sentence."""
    differences: dict[str, list[str]] = {rule: [] for rule in get_args(OnResume)}
    lacks_code = CODE in current and CODE not in saved
    for fact in sorted(saved.keys() | current.keys()):
        is_unrecorded = lacks_code and fact not in saved and fact.startswith(f"{ENVIRONMENT}.")
        if saved.get(fact) != current.get(fact) and not is_unrecorded:
            text = f"{fact}: {saved.get(fact)} -> {current.get(fact)}{_cause(fact, saved, current)}" if fact != CODE else describe_changed_code(saved, current)
            differences[rule_of(fact, rules)].append(text)
    if lacks_code:
        differences["changes_rounding"].append(UNRECORDED_CODE)
    return differences


def _cause(fact: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return what a changed fingerprint says: whether the tokenizer or the rows differ."""
    if fact == TOKENIZER_FINGERPRINT:
        return " (the tokenizer or its chat template differs)"
    if fact != DATA_FINGERPRINT:
        return ""
    is_same = saved.get(TOKENIZER_FINGERPRINT) == current.get(TOKENIZER_FINGERPRINT)
    return " (the rows differ, or how they are encoded; the tokenizer is the same)" if is_same else " (the tokens of the rows: the tokenizer differs)"


def describe_changed_code(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return "code changed: A -> B": commits if both are known and differ, otherwise the first digits of the code's fingerprints."""
    before, now = (facts.get(f"{WRITTEN_BY}.commit") for facts in (saved, current))
    if before and now and before != now:
        return f"code changed: {before[:12]} -> {now[:12]}"
    uncommitted = f" (uncommitted changes to {now[:12]})" if before and now else ""
    return f"code changed: {str(saved[CODE])[:12]} -> {str(current.get(CODE))[:12]}{uncommitted}"


def fingerprint_parameters(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
