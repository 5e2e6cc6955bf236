"""Settings with which a run needs less memory: each with the estimate of the same formula."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from common.errors import UserError
from models.config import LoraConfig
from runner.engine.config import Config
from runner.planning.data import DataFacts
from runner.planning.machine import Machine
from runner.planning.memory import estimate_memory
from runner.planning.micro_batch import MicroBatch, half_micro_batch, smaller_micro_batch
from runner.planning.model import ModelSizes, model_facts

LORA = LoraConfig(
    rank=16,
    alpha=32.0,
    dropout=0.0,
    targets=["all-linear"],
    rslora=False,
    dora=False,
    quantize=None,
    continue_adapter=False,
)
LORA_OVERRIDE = "'stage.lora={rank: 16, alpha: 32, dropout: 0, targets: [all-linear], rslora: false, dora: false, quantize: null, continue_adapter: false}'"


@dataclass(frozen=True)
class Alternative:
    """Settings with which a run might fit, and the estimate of the same formula for them."""

    overrides: str
    memory: int  # bytes
    fits: bool
    changes: str = ""  # what differs in the training, where that is not named by the override itself


def find_alternatives(
    cfg: Config, model: ModelSizes, data: DataFacts, machine: Machine, ranks: int, process: int
) -> list[Alternative]:
    """Return settings that need less memory, each with its estimate.

    One change at a time, and all that fit together where none is enough.
    """
    found = []

    def add(overrides: str, changed: Config, model: ModelSizes, data: DataFacts, changes: str = "") -> bool:
        memory = estimate_memory(changed, model, data, machine, ranks, process).of_device
        found.append(Alternative(overrides, memory, memory <= machine.memory, changes))
        return found[-1].fits

    per_batch = min(cfg.train.batch_size, data.sequences)
    size, accumulation, smallest = cfg.train.batch_size, cfg.train.accumulation_steps, data
    fits = False
    while not fits and (same_rows := smaller_micro_batch(size, accumulation)) is not None:
        half = half_micro_batch(size, accumulation)
        for micro_batch in (half, same_rows) if half is not None else (same_rows,):
            size, accumulation = micro_batch.size, micro_batch.accumulation
            rows = math.ceil(data.shape.rows * min(size, per_batch) / per_batch)
            smallest = replace(data, shape=replace(data.shape, rows=rows), micro_batches=accumulation)
            changed = with_train(cfg, batch_size=size, accumulation_steps=accumulation)
            fits = add(micro_batch.overrides, changed, model, smallest, micro_batch.changes)
    for mode in ("selective", "full"):
        if cfg.train.activation_checkpointing in ("none", "selective") and mode != cfg.train.activation_checkpointing:
            changed = with_train(cfg, activation_checkpointing=mode)
            add(f"train.activation_checkpointing={mode}", changed, model, data)
    bf16 = replace(cfg, precision=replace(cfg.precision, name="bf16"))
    if cfg.precision.name in ("fp32", "tf32"):
        add("precision=bf16", bf16, model, data)
    if adapters := with_lora(cfg):
        add(LORA_OVERRIDE, *adapters, data)
    if not any(alternative.fits for alternative in found):
        together = with_train(bf16, batch_size=size, accumulation_steps=accumulation, activation_checkpointing="full")
        text = f"{MicroBatch(size, accumulation).overrides} train.activation_checkpointing=full precision=bf16"
        if not add(text, together, model, smallest) and (adapters := with_lora(together)):
            add(f"{text} {LORA_OVERRIDE}", *adapters, smallest)
    return found


def with_train(cfg: Config, **values: Any) -> Config:
    return replace(cfg, train=replace(cfg.train, **values))


def with_lora(cfg: Config) -> tuple[Config, ModelSizes] | None:
    """Return the config with adapters, and the sizes of its model; None where there are some already, where weights
    start from scratch, or where the model takes none.
    """
    if cfg.stage.lora is not None or cfg.init_from == "scratch":
        return None
    changed = replace(cfg, stage=replace(cfg.stage, lora=LORA))
    try:
        return changed, model_facts(changed)
    except UserError:  # no layer takes an adapter
        return None
