"""Settings with which a run needs less memory: each with the estimate of the same formula."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from models.config import LoraConfig
from runner.engine.config import Config
from runner.planning.facts.data import BatchShape, DataFacts
from runner.planning.facts.machine import Machine
from runner.planning.facts.model import ModelSizes, model_facts
from runner.planning.memory import estimate_memory

LORA = LoraConfig(rank=16, alpha=32.0, dropout=0.0, targets=["all-linear"], rslora=False, dora=False, quantize=None, continue_adapter=False)
LORA_OVERRIDE = "'stage.lora={rank: 16, alpha: 32, dropout: 0, targets: [all-linear], rslora: false, dora: false, quantize: null, continue_adapter: false}'"
MAX_HALVINGS = 10


@dataclass(frozen=True)
class Alternative:
    """Settings with which a run might fit, and the estimate of the same formula for them."""

    overrides: str
    memory: int  # bytes
    fits: bool


def find_alternatives(cfg: Config, facts: ModelSizes, data: DataFacts, machine: Machine, process: int, ranks: int) -> list[Alternative]:
    """Return settings that need less memory, each with its estimate. `ranks`: of this machine. One change at a time, and all that fit together where none is enough."""
    found = []

    def add(overrides: str, changed: Config, of_model: ModelSizes, shape: BatchShape) -> bool:
        micro_batches = data.micro_batches * cfg.train.batch_size // changed.train.batch_size
        memory = estimate_memory(changed, of_model, shape, micro_batches, machine.device, process, ranks * cfg.distributed.nnodes)
        total = memory.total * (ranks if machine.device == "cpu" else 1)
        found.append(Alternative(overrides, total, total <= machine.memory))
        return found[-1].fits

    shape, size = data.shape, cfg.train.batch_size
    smaller = cfg
    for _ in range(MAX_HALVINGS):
        if size % 2:
            break
        size, shape = size // 2, shape.halved()
        accumulation = cfg.train.accumulation_steps * (cfg.train.batch_size // size)
        smaller = with_train(cfg, batch_size=size, accumulation_steps=accumulation)
        if add(f"train.batch_size={size} train.accumulation_steps={accumulation}", smaller, facts, shape):
            break
    for mode in ("selective", "full"):
        if cfg.train.activation_checkpointing in ("none", "selective") and mode != cfg.train.activation_checkpointing:
            add(f"train.activation_checkpointing={mode}", with_train(cfg, activation_checkpointing=mode), facts, data.shape)
    bf16 = with_precision(cfg, "bf16")
    if cfg.precision.name in ("fp32", "tf32"):
        add("precision=bf16", bf16, facts, data.shape)
    adapters = with_lora(cfg)
    of_adapters = model_facts(adapters) if adapters is not None else None
    if adapters is not None and of_adapters is not None:
        add(LORA_OVERRIDE, adapters, of_adapters, data.shape)
    if not any(alternative.fits for alternative in found):
        size = smaller.train.batch_size
        together = with_train(bf16, batch_size=size, accumulation_steps=smaller.train.accumulation_steps, activation_checkpointing="full")
        text = f"train.batch_size={size} train.accumulation_steps={together.train.accumulation_steps} train.activation_checkpointing=full precision=bf16"
        if not add(text, together, facts, shape) and of_adapters is not None and (both := with_lora(together)) is not None:
            add(f"{text} {LORA_OVERRIDE}", both, of_adapters, shape)
    return found


def with_train(cfg: Config, **values: Any) -> Config:
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **values))


def with_precision(cfg: Config, name: str) -> Config:
    return dataclasses.replace(cfg, precision=dataclasses.replace(cfg.precision, name=name))


def with_lora(cfg: Config) -> Config | None:
    """Return the config with adapters; None where there are some already, where weights start from scratch, or where the model takes none."""
    if cfg.stage.lora is not None or cfg.init_from == "scratch":
        return None
    changed = dataclasses.replace(cfg, stage=dataclasses.replace(cfg.stage, lora=LORA))
    try:
        model_facts(changed)
    except UserError:  # no layer takes an adapter
        return None
    return changed
