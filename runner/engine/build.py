"""A run is built once, from the typed config: its parts, cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from common.errors import UserError
from data.batching.loader import StepLoader
from data.tokenize.tokenizer import Tokenizer
from data.types import sequences_per_row
from models.decoder import Decoder
from models.formats.load import load_into, load_weights
from runner.checkpoint.async_writer import AsyncWriter
from runner.checkpoint.compatibility import ROWS_PER_STEP, describe_run, saved_facts
from runner.engine.config import Config
from runner.engine.data_pipeline import build_data_pipeline, build_loader
from runner.engine.device.compile import check_cuda_graphs, resolve_compile_mode, set_inductor_cache
from runner.engine.device.cpu import disable_malloc_trim
from runner.engine.device.distributed import DistributedContext, init_distributed
from runner.engine.device.precision import Precision
from runner.engine.device.rng import seed_all
from runner.engine.objectives.stage import build_objective
from runner.engine.optim.groups import build_optimizer
from runner.engine.state import TrainState
from runner.tracking.logger import RunLogger


def build_run(cfg: Config, run_dir: Path, attempt: int, update_metadata: Callable[..., None]) -> TrainState:
    """All parts of a run, cheapest first, so that what cannot work is refused before the model is built.

    `cfg.init_from` is a path or "scratch" by now. Raises ValueError(what, where, fix).
    """
    dist = init_distributed(cfg.distributed, cfg.device)
    if dist.device.type == "cpu":
        disable_malloc_trim()
    precision = Precision(cfg.precision, dist.device)
    check_attention_kernel(cfg, dist.device)
    tokenizer = load_tokenizer(cfg)
    pipeline = build_data_pipeline(cfg, tokenizer)
    update_metadata(data=pipeline.files)
    rows = resolve_rows_per_step(cfg, dist, run_dir)
    check_cuda_graphs(cfg.train.compile, dist.device, math.ceil(rows / (dist.size * cfg.train.batch_size)))
    seed_all(cfg.seed)  # every rank begins with the same weights ...
    model = build_model(cfg, needs_start=not has_checkpoints(run_dir)).to(dist.device)
    objective = build_objective(cfg.stage, model)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad} | objective.frozen
    known = describe_run(cfg, dist, rows, frozen, tokenizer.fingerprint, pipeline.fingerprint)
    if dist.rank:
        seed_all(cfg.seed + dist.rank)  # ... and draws its own dropout
    for part in (model, *objective.beside):
        dist.shard(part, part.model.layers, precision.dtype)
    place = (dist.rank, dist.size, dist.device.type == "cuda")
    loader = build_loader(pipeline.train, cfg, tokenizer, rows, *place)
    compiled = resolve_compile_mode(cfg.train.compile, planned_flops(cfg, model, loader), dist.device, torch.get_num_threads(), cfg.model.num_experts > 0)
    if cfg.train.compile == "auto":
        known["environment.compiled"] = compiled.mode  # a run that is made longer, or finds no compiler, may decide anew
    return TrainState(
        cfg=cfg,
        run_dir=run_dir,
        dist=dist,
        tokenizer=tokenizer,
        model=model,
        compile_decision=compiled,
        wrapped=wrap_model(model, cfg, dist, precision, compiled.mode),
        objective=objective,
        pipeline=pipeline,
        loader=loader,
        val_loader=build_loader(pipeline.val, cfg, tokenizer, cfg.train.batch_size * dist.size, *place) if pipeline.val else None,
        optimizers=build_optimizer(cfg.optimizer, model, cfg.model.num_hidden_layers),
        precision=precision,
        logger=RunLogger(run_dir, cfg.tracker, dist.is_rank_zero),
        checkpoint_writer=AsyncWriter(),
        attempt=attempt,
        update_metadata=update_metadata,
        compatibility=known,
    )


def load_tokenizer(cfg: Config) -> Tokenizer:
    """Raises ValueError(what, where, fix) where it has ids that the model does not know."""
    tokenizer = Tokenizer.load(Path(cfg.data.tokenizer))
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} words, the model knows {cfg.model.vocab_size}",
            f"model.vocab_size={cfg.model.vocab_size}",
            f"set model.vocab_size={tokenizer.vocab_size}, or choose another data.tokenizer",
        )
    return tokenizer


def resolve_rows_per_step(cfg: Config, dist: DistributedContext, folder: Path) -> int:
    """Windows of one optimizer step, over all ranks. A run that is continued on more or fewer ranks keeps the number it has:
    each rank then makes fewer or more micro-batches of them. Raises ValueError(what, where, fix)."""
    train, before = cfg.train, saved_facts(folder)
    words = {"train.batch_size": train.batch_size, "train.accumulation_steps": train.accumulation_steps}
    asked = train.batch_size * train.accumulation_steps * dist.size
    rows = before.get(ROWS_PER_STEP, asked)
    if asked != rows and any(before.get(word) != value for word, value in words.items()):
        if dist.size == 1:
            return asked  # refused with all else that does not agree
        share = f"{rows // dist.size}" if rows % dist.size == 0 else f"{rows} on a number of ranks that divides it"
        raise UserError(
            f"a step of this run has {rows} rows",
            " ".join(f"{word}={value}" for word, value in words.items()) + f" on {dist.size} ranks",
            f"leave both words out, or give two whose product is {share}",
        )
    if rows < dist.size:
        raise UserError(
            f"a step of {rows} rows leaves ranks without work", f"distributed.nproc={cfg.distributed.nproc}", f"start at most {rows} ranks, or use larger steps"
        )
    return rows


def build_model(cfg: Config, needs_start: bool) -> Decoder:
    """Random weights from the seed, or those of `cfg.init_from`, loaded strictly.

    A run that is resumed reads them again only where its checkpoints do not hold them: under adapters, or as a reference.
    """
    model = Decoder(cfg.model)
    if cfg.init_from != "scratch" and (needs_start or cfg.stage.lora is not None or cfg.stage.objective == "dpo"):
        load_into(model, load_weights(Path(cfg.init_from)), cfg.init_from)
    model.activation_checkpointing = cfg.train.activation_checkpointing
    return model


def has_checkpoints(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*"))


def check_attention_kernel(cfg: Config, device: torch.device) -> None:
    """Refuse an attention kernel that does not exist for this device and precision; torch would say so in mid-step."""
    kernel, where = cfg.model.attention, f"model.attention={cfg.model.attention}"
    if kernel == "efficient" and device.type == "cpu":
        raise UserError("the memory-efficient kernel needs a GPU", where, "use model.attention=flash or auto")
    if kernel == "flash" and device.type == "cuda" and cfg.precision.name in ("fp32", "tf32"):
        raise UserError("on a GPU the flash kernel takes bf16 and fp16 only", where, "use precision=bf16, or model.attention=efficient")


def planned_flops(cfg: Config, model: Decoder, loader: StepLoader) -> float:
    """Floating-point operations of the whole run on each rank, as the words promise them: its batches may be shorter than they could be."""
    steps = cfg.train.max_steps or cfg.train.epochs * loader.steps_per_epoch
    positions = steps * loader.sampler.global_batch_size / loader.world_size * cfg.data.max_length * sequences_per_row(cfg.stage.data_format)
    return 6.0 * positions * sum(p.numel() for p in model.parameters())


def wrap_model(model: Decoder, cfg: Config, dist: DistributedContext, precision: Precision, mode: str) -> nn.Module:
    if mode != "off":
        set_inductor_cache(Path(cfg.data.cache))
        lines = cfg.train.batch_size * (sequences_per_row(cfg.stage.data_format) if cfg.data.packing == "none" else 1)
        model.compile_layers(single_row=lines == 1, mode=mode)
    with precision.autocast():
        return dist.wrap(model)
