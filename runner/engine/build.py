"""Build a run from its config: every part once, settings and data before the model, so that their errors come early."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from data.tokenize.origin import open_tokenizer
from data.tokenize.tokenizer import Tokenizer
from models.formats.load import model_with_weights, weights_under_adapter
from models.language_model import LanguageModel, create_model, freeze, stored_tensors
from models.layers.adapter import check_quantization, quantize_linear_layers
from models.layers.cpu_kernels.upcast_products import upcast_products
from models.lora import lora_warnings
from runner.checkpoint.compatibility import (
    ROWS_PER_STEP,
    describe_run,
    environment_facts,
    rank_differences,
    recorded_environment,
)
from runner.checkpoint.format import read_model_tensors, read_newest_state
from runner.checkpoint.manager import CheckpointManager, newest_checkpoint
from runner.checkpoint.saving import RetentionPolicy
from runner.engine.config import Config
from runner.engine.data_pipeline import build_data_pipeline, build_loader
from runner.engine.device.compile import check_cuda_graphs
from runner.engine.device.cpu import choose_threads, separate_large_blocks
from runner.engine.device.distributed import DistributedContext, init_distributed
from runner.engine.device.precision import Precision, PrecisionConfig
from runner.engine.device.rng import seed_all, use_deterministic_kernels
from runner.engine.device.signals import StopRequests, do_unless_stopped
from runner.engine.evaluation import encode_sample_prompts
from runner.engine.kernels import (
    choose_run_kernels,
    has_one_shape,
    kernel_facts,
    wrap_model,
)
from runner.engine.objectives.config import prepare_stage
from runner.engine.objectives.objective import Objective
from runner.engine.optim.groups import build_optimizer
from runner.engine.optim.mup import mup_warnings, scale_initial_weights
from runner.engine.optim.schedules import check_warmup
from runner.engine.state import TrainState, load_strict, saved_tensors
from runner.run_dir.metadata import RunMetadata
from runner.tracking.logger import RunLogger


def build_model(cfg: Config, load_initial_weights: bool) -> LanguageModel:
    """Return a model with random weights from the current seed, or with those of `cfg.init_from`.

    A resumed run needs the initial weights only if its checkpoints do not contain them: under adapters, or for a
    reference model.
    """
    source = initial_weights_of(cfg) if load_initial_weights or cfg.stage.lora or cfg.stage.needs_reference else None
    model = model_with_weights(cfg.model, source) if source else create_model(cfg.model)
    if not source and cfg.optimizer.mup_base_width:
        scale_initial_weights(cfg.optimizer, model)
    model.activation_checkpointing = cfg.train.activation_checkpointing
    return model


def initial_weights_of(cfg: Config) -> Path | None:
    """Return where the weights of the model come from, without an adapter that is trained on; None: they are random."""
    return None if cfg.init_from == "scratch" else weights_under_adapter(cfg.stage.lora, Path(cfg.init_from))


def prepare_model(
    cfg: Config, device: torch.device, resumed_run: Path | None, **facts: Any
) -> tuple[LanguageModel, Objective, dict[str, Any]]:
    """Return the model, the objective, and the facts of the run: `facts`, and what `describe_run` adds."""
    seed_all(cfg.seed)
    model = build_model(cfg, load_initial_weights=resumed_run is None)
    if resumed_run is not None and model.probes_weights and not (cfg.stage.lora or cfg.stage.needs_reference):
        load_saved_weights(model, resumed_run)
    if cfg.stage.lora and cfg.stage.lora.quantize:
        quantize_linear_layers(model, device)
    model = model.to(device)
    is_packed = cfg.data.packing != "none"
    model.kernels_description = model.prepare(is_packed)
    model.has_packed_rows = is_packed
    objective = prepare_stage(cfg.stage, model, cfg.init_from)
    freeze(model, cfg.train.freeze)
    saved = saved_tensors(model)
    # what no checkpoint holds: a base model, a reference; the same on every rank
    frozen = {
        name: tensor for name, tensor in stored_tensors(model).items() if name not in saved
    } | objective.frozen_parameters
    return model, objective, describe_run(cfg, device=device, frozen=frozen, **facts)


def load_saved_weights(model: LanguageModel, run_dir: Path) -> None:
    """Load the newest valid checkpoint's weights: random ones may not show how a model computes.

    `TrainState` loads them again with all other state.
    """
    with suppress(FileNotFoundError):
        checkpoint = newest_checkpoint(run_dir)
        load_strict(saved_tensors(model), read_model_tensors(checkpoint), checkpoint)


def build_run(cfg: Config, metadata: RunMetadata, stop: StopRequests | None = None) -> TrainState:
    """Build all parts of the run in the directory of `metadata`.

    `cfg.init_from` is a path or "scratch".

    Raises UserError if the settings, the data and the machine do not fit together, StopRequested if `stop()` on some
    rank.
    """
    dist, run_dir = init_distributed(cfg.distributed, cfg.device), metadata.folder
    saved = read_newest_state(run_dir)
    old_facts: dict[str, Any] = saved["compatibility"] if saved else {}
    upcast_products(False)  # an earlier run in this process may have chosen otherwise
    thread_reason = configure_cpu(old_facts) if dist.device.type == "cpu" else None
    if dist.device.type == "cuda":
        use_deterministic_kernels(cfg.train.deterministic)
    own_precision = cfg.precision.on(dist.device.type, old_facts.get("precision.name")).name
    cfg = replace(cfg, precision=PrecisionConfig(dist.gather(own_precision)[0]))
    precision = Precision(cfg.precision, dist.device)
    cfg.model.check_device(dist.device, precision.dtype)
    cfg.model.check_memory()
    if cfg.stage.lora and cfg.stage.lora.quantize:
        check_quantization(dist.device)
    tokenizer = load_tokenizer(cfg, run_dir)
    stop = stop or StopRequests()
    pipeline = do_unless_stopped(dist, stop, partial(build_data_pipeline, cfg, tokenizer, metadata.data_files))
    metadata.update(data=pipeline.files, evaluation=pipeline.evaluation)
    rows_per_step = resolve_rows_per_step(cfg, dist.size, old_facts)
    if dist.device.type == "cuda":
        check_cuda_graphs(cfg.train.compile, dist.device, math.ceil(rows_per_step / (dist.size * cfg.train.batch_size)))
    ranks = (dist.rank, dist.size, dist.device.type == "cuda")
    loader = build_loader(pipeline.train, cfg, tokenizer, rows_per_step, *ranks)
    rows_per_batch = cfg.train.batch_size * dist.size
    val_loaders = {
        name: build_loader(rows, cfg, tokenizer, rows_per_batch, *ranks) for name, rows in pipeline.val.items()
    }
    total_steps = cfg.train.total_steps(loader.steps_per_epoch)
    check_warmup(total_steps, cfg.schedule)
    build = partial(
        prepare_model,
        cfg,
        dist.device,
        None if saved is None else run_dir,
        num_ranks=dist.size,
        rows_per_step=rows_per_step,
        data=pipeline.train.fingerprint,
        tokenizer=tokenizer.fingerprint,
    )
    model, objective, facts = do_unless_stopped(dist, stop, build)
    models = (model, *objective.extra_models)
    if dist.size > 1:
        distribute(cfg, dist, precision, models)
    optimizers = build_optimizer(cfg.optimizer, model, cfg.model.num_hidden_layers, cfg.train.ema_decay)
    kernels = choose_run_kernels(cfg, models, optimizers, loader, precision, dist, old_facts, stop)
    facts |= kernel_facts(model, dist.device, kernels)
    if dist.size > 1:
        facts |= environment_facts(rank_differences(dist.gather(recorded_environment(facts))))
    if has_one_shape(cfg, dist.device, kernels.compilation.mode):
        loader.pad_to_one_shape()
    logger = open_logger(cfg, metadata, model, dist)
    wrapped = wrap_model(model, cfg, dist, precision, kernels.compilation.mode)
    return TrainState(
        cfg=cfg,
        metadata=metadata,
        dist=dist,
        tokenizer=tokenizer,
        stop=stop,
        model=model,
        compile_decision=kernels.compilation,
        wrapped=wrapped,
        objective=objective,
        pipeline=pipeline,
        loader=loader,
        val_loaders=val_loaders,
        optimizers=optimizers,
        precision=precision,
        logger=logger,
        checkpoints=CheckpointManager(
            metadata,
            RetentionPolicy(cfg.train.keep_checkpoints, cfg.train.keep_every),
            cfg.train.max_failed_saves,
            logger,
            dist.is_rank_zero,
            dist.broadcast_flag,
        ),
        total_steps=total_steps,
        compatibility=facts,
        thread_reason=thread_reason,
        kernel_reasons=kernels.reasons,
    )


def configure_cpu(old_facts: dict[str, Any]) -> str | None:
    """Set up this process for training on a CPU, as for the checkpoint with the facts `old_facts`; return why it has not
    torch's own number of threads.
    """
    separate_large_blocks()
    threads = recorded_environment(old_facts).get("threads")
    return choose_threads(threads if isinstance(threads, int) and threads > 0 else None)


def open_logger(cfg: Config, metadata: RunMetadata, model: LanguageModel, dist: DistributedContext) -> RunLogger:
    """Return the logger of a run, after the warnings about its model."""
    logger = RunLogger(metadata.folder, cfg.tracker, dist.is_rank_zero, metadata.check_owned)
    for warning in [
        *cfg.model.training_warnings(),
        *(lora_warnings(model, cfg.stage.lora) if cfg.stage.lora else ()),
        *(mup_warnings(cfg.optimizer, cfg.init_from) if cfg.optimizer.mup_base_width else ()),
    ]:
        logger.warning(warning)
    return logger


def load_tokenizer(cfg: Config, run_dir: Path) -> Tokenizer:
    """Raises UserError if there is none, if the model has no embedding for some of its tokens, if conversations need a
    chat template that it lacks, or if it cannot encode the prompts of samples.
    """
    tokenizer = open_tokenizer(cfg.data, cfg.init_from, run_dir)
    cfg.check_vocabulary(tokenizer.vocab_size)
    if not tokenizer.chat_template and cfg.stage.data_format != "text":
        fix = f"copy data/tokenize/chatml.jinja to {Path(cfg.data.tokenizer) / 'chat_template.jinja'}; or data.tokenizer=DIR, a folder with the same tokens and a template"
        raise UserError(
            f"stage={cfg.stage.name} trains on conversations, and the tokenizer has no chat template",
            f"data.tokenizer={cfg.data.tokenizer}",
            fix,
        )
    if cfg.train.sample_prompts != "auto":
        encode_sample_prompts(cfg, tokenizer)
    return tokenizer


def resolve_rows_per_step(cfg: Config, num_ranks: int, old_facts: dict[str, object]) -> int:
    """Return the batch rows per step over all ranks.

    `old_facts`: those of the checkpoint to resume, {} if there is none.

    A run that is resumed on another number of ranks keeps its rows per step; each rank then computes more or fewer
    micro-batches.
    """
    requested = cfg.train.batch_size * cfg.train.accumulation_steps * num_ranks
    rows = old_facts.get(ROWS_PER_STEP, requested)
    assert isinstance(rows, int)
    settings = {"train.batch_size": cfg.train.batch_size, "train.accumulation_steps": cfg.train.accumulation_steps}
    typed = " ".join(f"{key}={value}" for key, value in settings.items())
    if requested != rows and any(old_facts.get(key) != value for key, value in settings.items()):
        if num_ranks == 1:
            return requested  # refused together with all other incompatible settings
        share = f"{rows // num_ranks}" if rows % num_ranks == 0 else f"{rows}, on a number of ranks that divides it"
        raise UserError(
            f"cannot resume: the run has {rows} rows per step, {typed} on {num_ranks} ranks are {requested}",
            typed,
            f"remove both, or give two whose product is {share}",
        )
    if rows < num_ranks:
        raise UserError(
            f"{rows} rows per step are fewer than {num_ranks} ranks",
            f"{typed} distributed.nproc={cfg.distributed.nproc}",
            f"distributed.nproc={rows}, or larger steps",
        )
    return rows


def distribute(cfg: Config, dist: DistributedContext, precision: Precision, models: Iterable[LanguageModel]) -> None:
    """Give each rank a dropout of its own and, under fsdp, its shard of `models`."""
    if dist.rank:
        seed_all(cfg.seed + dist.rank)
    for model in models:
        dist.shard(model, model.layers, precision.dtype)
