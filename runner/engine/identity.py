"""What makes a run this run: the facts a checkpoint must agree with, and those its bits depend on."""
from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.engine.config import Config


def identity(cfg: Config, model: nn.Module, tokenizer: str, rows: str) -> dict[str, Any]:
    """What must be the same for a checkpoint to be continued: dotted word -> value."""
    fixed = {f"model.{word}": value for word, value in dataclasses.asdict(cfg.model).items() if word not in ("name", "attention")}
    fixed |= {f"stage.{word}": value for word, value in dataclasses.asdict(cfg.stage).items() if word not in ("prompts", "after")}
    fixed |= {"optimizer.name": cfg.optimizer.name, "seed": cfg.seed, "precision.name": cfg.precision.name}
    fixed["train.batch_size * train.accumulation_steps"] = cfg.train.batch_size * cfg.train.accumulation_steps
    fixed |= {"data (its bytes and max_length)": rows, "data.tokenizer": tokenizer}
    if cfg.stage.lora is not None:
        fixed["base weights under the adapters"] = fingerprint({name: p for name, p in model.named_parameters() if not p.requires_grad})
    return json.loads(json.dumps(fixed))  # as it will read back


def fingerprint(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def environment(cfg: Config, device: torch.device) -> dict[str, Any]:
    """What the bits depend on beside the words: a run continued under another of these is no longer exact."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "train.compile": cfg.train.compile,
        "train.batch_size": cfg.train.batch_size,
    }


def differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [f"{word}: {stored.get(word)} then, {now.get(word)} now" for word in sorted(stored.keys() | now.keys()) if stored.get(word) != now.get(word)]
