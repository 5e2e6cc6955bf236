"""Settings with which a run needs less memory: each with the estimate of the same formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.errors import UserError
from models.config import LoraConfig
from runner.engine.config import Config
from runner.planning.facts.cpu import cpu_execution
from runner.planning.facts.data import BatchShape, DataFacts
from runner.planning.facts.machine import Machine
from runner.planning.facts.micro_batch import MicroBatch, half_micro_batch, smaller_micro_batch
from runner.planning.facts.model import ModelSizes, model_facts
from runner.planning.memory import estimate_memory

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
    cfg: Config,
    facts: ModelSizes,
    data: DataFacts,
    machine: Machine,
    process: int,
    ranks: int,
    saved: Mapping[str, str] | None = None,
) -> list[Alternative]:
    """Return settings that need less memory, each with its estimate.

    `ranks`: of this machine; `saved`: kernels of the checkpoint of a resumed run. One change at a time, and all that
    fit together where none is enough.
    """
    found = []
    world, per_batch = ranks * cfg.distributed.nnodes, min(cfg.train.batch_size, data.sequences)

    def add(overrides: str, changed: Config, of_model: ModelSizes, shape: BatchShape, changes: str = "") -> bool:
        per_rank = min(changed.train.batch_size * changed.train.accumulation_steps, -(-data.sequences // world))
        micro_batches = -(-per_rank // changed.train.batch_size)
        cpu = cpu_execution(changed, of_model, replace(data, shape=shape), world, saved)
        memory = estimate_memory(
            changed, of_model, shape, data.steps, micro_batches, machine.device, process, world, cpu
        )
        total = memory.total * (ranks if machine.device == "cpu" else 1)
        found.append(Alternative(overrides, total, total <= machine.memory, changes))
        return found[-1].fits

    shape, smaller = data.shape, cfg
    while (same_rows := smaller_micro_batch(smaller.train.batch_size, smaller.train.accumulation_steps)) is not None:
        half = half_micro_batch(smaller.train.batch_size, smaller.train.accumulation_steps)
        for micro_batch in (half, same_rows) if half is not None else (same_rows,):
            smaller = with_train(cfg, batch_size=micro_batch.size, accumulation_steps=micro_batch.accumulation)
            shape = data.shape.scaled(min(micro_batch.size, per_batch), per_batch)
            fits = add(micro_batch.overrides, smaller, facts, shape, micro_batch.changes)
        if fits:
            break
    for mode in ("selective", "full"):
        if cfg.train.activation_checkpointing in ("none", "selective") and mode != cfg.train.activation_checkpointing:
            add(
                f"train.activation_checkpointing={mode}",
                with_train(cfg, activation_checkpointing=mode),
                facts,
                data.shape,
            )
    bf16 = with_precision(cfg, "bf16")
    if cfg.precision.name in ("fp32", "tf32"):
        add("precision=bf16", bf16, facts, data.shape)
    adapters = with_lora(cfg)
    of_adapters = model_facts(adapters) if adapters is not None else None
    if adapters is not None and of_adapters is not None:
        add(LORA_OVERRIDE, adapters, of_adapters, data.shape)
    if not any(alternative.fits for alternative in found):
        size, steps = smaller.train.batch_size, smaller.train.accumulation_steps
        together = with_train(bf16, batch_size=size, accumulation_steps=steps, activation_checkpointing="full")
        text = f"{MicroBatch(size, steps).overrides} train.activation_checkpointing=full precision=bf16"
        if (
            not add(text, together, facts, shape)
            and of_adapters is not None
            and (both := with_lora(together)) is not None
        ):
            add(f"{text} {LORA_OVERRIDE}", both, of_adapters, shape)
    return found


def with_train(cfg: Config, **values: Any) -> Config:
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **values))


def with_precision(cfg: Config, name: str) -> Config:
    return dataclasses.replace(cfg, precision=dataclasses.replace(cfg.precision, name=name))


def with_lora(cfg: Config) -> Config | None:
    """Return the config with adapters; None where there are some already, where weights start from scratch, or where
    the model takes none.
    """
    if cfg.stage.lora is not None or cfg.init_from == "scratch":
        return None
    changed = dataclasses.replace(cfg, stage=dataclasses.replace(cfg.stage, lora=LORA))
    try:
        model_facts(changed)
    except UserError:  # no layer takes an adapter
        return None
    return changed
