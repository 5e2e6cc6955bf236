"""A run: the parts one training holds, built once from the typed config, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.engine.config import Config
from runner.engine.distributed import World, join_world
from runner.engine.feed import Feed, loader_of, open_feed
from runner.engine.optim import Optimizers, build_optimizer
from runner.engine.precision import Precision
from runner.engine.stage import prepare
from runner.engine.track import Track

if TYPE_CHECKING:
    import torch
    from torch import nn

    from data.chat import ChatTemplate
    from data.loader import StepLoader
    from data.tokenizer import Tokenizer
    from models.decoder import Decoder
    from runner.engine.objective import Objective
    from runner.engine.writer import Writer


class RunFailed(Exception):
    """Training cannot go on; the last good checkpoint is intact."""


class Interrupted(Exception):
    """Training was asked to stop, and has saved."""

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__(f"stopped after step {step}, saved")
        self.folder = folder


@dataclass
class Progress:
    """How far a run has come. It survives in state.json, every field of it."""

    step: int = 0  # optimizer steps done
    rows: int = 0  # rows consumed, over all epochs
    tokens: int = 0  # tokens that carried loss
    overflows: int = 0  # fp16: steps tried again with a smaller scale
    nonfinite: int = 0  # steps given up for a non-finite loss or gradient ...
    nonfinite_in_a_row: int = 0  # ... and how many of them came last
    best_loss: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    eval_loss: float | None = None  # the newest
    looked_at: int = 0  # the last step whose evaluation and samples are done: a resumed run repeats neither
    last_losses: list[float | None] = field(default_factory=list)  # None: not finite


@dataclass
class Run:
    cfg: Config
    folder: Path
    world: World
    tokenizer: Tokenizer
    model: Decoder  # the bare model: what is saved
    wrapped: nn.Module  # the same model as the training step calls it (compiled)
    objective: Objective
    feed: Feed
    loader: StepLoader
    val_loader: StepLoader | None
    optimizers: Optimizers
    precision: Precision
    track: Track
    writer: Writer
    attempt: int  # how many times this folder has been launched, this time included
    note: Callable[..., None]  # puts facts into the run's record, run.json
    facts: dict[str, Any]  # what a checkpoint is held against when it is taken up
    progress: Progress = field(default_factory=Progress)
    saved_step: int = 0  # the newest step handed to the writer
    failed_saves: int = 0  # in a row
    save_stall: float = 0.0  # seconds training stood still for saving since the last log line
    log_position: dict[str, int] | None = None  # where the logs stood at the checkpoint we come from
    tracker_id: str | None = None

    @property
    def total_steps(self) -> int:
        return self.cfg.train.max_steps or self.cfg.train.epochs * self.loader.steps_per_epoch

    @property
    def stopped_early(self) -> bool:
        return 0 < self.cfg.train.patience <= self.progress.evals_since_best

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.total_steps or self.stopped_early


def build_run(cfg: Config, folder: Path, attempt: int, note: Callable[..., None]) -> Run:
    """All parts of a run, cheapest first, so that what cannot work is refused before the model is built.

    `cfg.init_from` is a path or "scratch" by now. Raises ValueError(what, where, fix).
    """
    from data.tokenizer import Tokenizer
    from runner.engine.identity import facts
    from runner.engine.randomness import seed_all
    from runner.engine.writer import Writer

    world = join_world(cfg.device)
    precision = Precision(cfg.precision, world.device)
    check_kernel(cfg, world.device)
    tokenizer = Tokenizer.load(Path(cfg.data.tokenizer))
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} words, the model knows {cfg.model.vocab_size}",
            f"model.vocab_size={cfg.model.vocab_size}",
            f"set model.vocab_size={tokenizer.vocab_size}, or choose another data.tokenizer",
        )
    feed = open_feed(cfg, tokenizer)
    note(data=feed.files)
    seed_all(cfg.seed + world.rank)
    model = build_model(cfg, needs_start=not has_checkpoints(folder))
    model.to(world.device)
    objective = prepare(cfg.stage, model)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad} | objective.frozen
    return Run(
        cfg=cfg,
        folder=folder,
        world=world,
        tokenizer=tokenizer,
        model=model,
        wrapped=wrap(model, cfg),
        objective=objective,
        feed=feed,
        loader=loader_of(feed.train, cfg, tokenizer, cfg.train.accumulation_steps),
        val_loader=loader_of(feed.val, cfg, tokenizer, accumulation_steps=1) if feed.val else None,
        optimizers=build_optimizer(cfg.optimizer, model, cfg.model.num_hidden_layers),
        precision=precision,
        track=Track(folder, cfg.tracker, world.leads),
        writer=Writer(),
        attempt=attempt,
        note=note,
        facts=facts(cfg, world.device, frozen, tokenizer.fingerprint, feed.fingerprint),
    )


def build_model(cfg: Config, needs_start: bool) -> Decoder:
    """Random weights from the seed, or those of `cfg.init_from`, loaded strictly.

    A run that is resumed reads them again only where its checkpoints do not hold them: under adapters, or as a reference.
    """
    from models.decoder import Decoder

    model = Decoder(cfg.model)
    if cfg.init_from != "scratch" and (needs_start or cfg.stage.lora is not None or cfg.stage.objective == "dpo"):
        from models.hub import load_into, load_weights

        load_into(model, load_weights(Path(cfg.init_from)), cfg.init_from)
    model.activation_checkpointing = cfg.train.activation_checkpointing
    return model


def has_checkpoints(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*"))


def check_kernel(cfg: Config, device: torch.device) -> None:
    """Refuse an attention kernel that does not exist for this device and precision; torch would say so in mid-step."""
    kernel, where = cfg.model.attention, f"model.attention={cfg.model.attention}"
    if kernel == "efficient" and device.type == "cpu":
        raise ValueError("the memory-efficient kernel needs a GPU", where, "use model.attention=flash or auto")
    if kernel == "flash" and device.type == "cuda" and cfg.precision.name == "fp32":
        raise ValueError("on a GPU the flash kernel takes bf16 and fp16 only", where, "use precision=bf16, or model.attention=efficient")


def wrap(model: Decoder, cfg: Config) -> nn.Module:
    if cfg.train.compile != "off":
        model.compile_layers(mode=cfg.train.compile)
    return model


def chat_template(run: Run) -> ChatTemplate | None:
    """How the model is spoken to; None where it only continues text."""
    from data.chat import ChatTemplate

    return None if run.cfg.stage.rows == "text" else ChatTemplate(run.tokenizer)
