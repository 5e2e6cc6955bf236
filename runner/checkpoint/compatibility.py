"""What a checkpoint remembers of the run that saved it, and the one table of what may change when that run is continued."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.engine.config import Config
from runner.engine.device.distributed import DistributedContext

ROWS_PER_STEP = "rows of a step"

# Each fact belongs to the first row that names it; docs/resume.md shows this table.
COMPATIBILITY_RULES = {
    # Nothing of the training depends on these. Data and tokenizer are known by their content, not by their path.
    "free": (
        "model.name", "data.name", "data.path", "data.val_path", "data.tokenizer", "data.shape", "data.on_bad_row", "data.max_bad_fraction", "data.cache", "data.num_workers", "stage.after", "stage.prompts", "tracker.*", "sweep.*", "init_from", "resume",
        "distributed.nproc", "distributed.nnodes", "distributed.timeout", "distributed.max_restarts",
        "train.log_every", "train.eval_every", "train.save_every", "train.sample_every", "train.sample_tokens", "train.keep_checkpoints", "train.keep_every", "train.patience", "train.max_failed_saves", "train.verify_resume",
    ),
    # Allowed, said and recorded: another course from here on, exactly reproducible all the same.
    "course": ("optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "optimizer.eps", "optimizer.grad_clip", "optimizer.layer_decay", "optimizer.momentum", "schedule.*",
               "train.max_steps", "train.epochs", "train.max_nonfinite_steps"),
    # Allowed, said and recorded as exact: false: the same mathematics, summed in another order.
    "inexact": ("model.attention", "train.compile", "train.activation_checkpointing", "train.batch_size", "train.accumulation_steps", "device", "distributed.*", "environment.*"),
    # All else makes it another run.
    "refused": ("*",),
}  # fmt: skip


def describe_run(cfg: Config, world: DistributedContext, rows_of_step: int, frozen: dict[str, Tensor], tokenizer: str, rows: str) -> dict[str, Any]:
    """Dotted word -> value: the config, the fingerprints of what it points to, and the environment.

    `frozen` are weights the training reads and never changes, a base under adapters or a reference: they are in no checkpoint.
    """
    found = dict(_flatten(dataclasses.asdict(cfg), ""))
    found |= {ROWS_PER_STEP: rows_of_step, "content of the data": rows, "content of the tokenizer": tokenizer}
    if frozen:
        found["weights it starts from"] = fingerprint_parameters(frozen)
    return found | {f"environment.{name}": value for name, value in environment_facts(world).items()}


def saved_facts(folder: Path) -> dict[str, Any]:
    """The facts that the newest checkpoint of a run folder holds; none where there is no checkpoint. Whether it is whole is not asked."""
    for path in sorted(folder.glob("checkpoints/step-*/state.json"), reverse=True):
        try:
            return json.loads(path.read_text())["facts"]
        except (OSError, ValueError, KeyError, TypeError):  # torn; loading it will say so
            continue
    return {}


def environment_facts(world: DistributedContext) -> dict[str, Any]:
    """What the bits depend on beside words and data."""
    device = world.device
    ranks = {} if world.size == 1 else {"ranks": world.size}
    return ranks | {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def diff_facts(stored: dict[str, Any], now: dict[str, Any]) -> dict[str, list[str]]:
    """What differs, under the row of RULES it belongs to, each as "word: then -> now"."""
    found: dict[str, list[str]] = {row: [] for row in COMPATIBILITY_RULES}
    for word in sorted(stored.keys() | now.keys()):
        if stored.get(word) != now.get(word):
            found[rule_of(word)].append(f"{word}: {stored.get(word)} -> {now.get(word)}")
    return found


def rule_of(word: str) -> str:
    return next(row for row, patterns in COMPATIBILITY_RULES.items() if any(fnmatch(word, pattern) for pattern in patterns))


def fingerprint_parameters(tensors: dict[str, Tensor]) -> str:
    """sha256 over names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _flatten(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
