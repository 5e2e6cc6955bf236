"""The whole vocabulary of a run: one field a conf/ group, each section declared beside the code that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from common.errors import UserError
from data.config import DataConfig
from data.schemas.schemas import SCHEMAS, STAGE_OF_FORMAT
from models.config import ACTIVATION_CHECKPOINTING_MODES, ModelConfig
from runner.engine.device import compile as compile_module
from runner.engine.device.distributed import DistributedConfig
from runner.engine.device.precision import PrecisionConfig
from runner.engine.objectives.stage import StageConfig
from runner.engine.optim.config import OptimizerConfig
from runner.engine.optim.schedules import ScheduleConfig
from runner.tracking.logger import TrackerConfig


@dataclass
class TrainConfig:
    """Steps are optimizer steps; an interval of 0 switches it off."""

    batch_size: int  # rows a micro-batch holds on each rank
    accumulation_steps: int  # micro-batches one optimizer step is made of
    epochs: int
    max_steps: int  # 0: as many as the epochs hold; otherwise exactly this many, whatever the epochs
    log_every: int
    eval_every: int
    save_every: int
    sample_every: int
    sample_prompts: list[str]  # prompts of the generated samples
    sample_tokens: int  # longest generated answer
    keep_checkpoints: int  # the newest so many stay ...
    keep_every: int  # ... and those of every so many steps; the best one stays in any case
    patience: int  # evaluations without a better loss before the run ends early; 0: never
    max_nonfinite_steps: int  # steps in a row that may be skipped for a non-finite loss or gradient
    max_failed_saves: int  # saves in a row that may fail (a full disk, say) before the run stops
    compile: str
    activation_checkpointing: str  # what the backward pass makes again instead of keeping it: none, selective or full
    verify_resume: bool  # prove, instead of training, that a stop changes no bit of this configuration

    def __post_init__(self) -> None:
        for word in ("batch_size", "accumulation_steps", "epochs", "log_every", "sample_tokens", "max_nonfinite_steps", "max_failed_saves"):
            if getattr(self, word) < 1:
                raise UserError("a count must be at least 1", f"train.{word}={getattr(self, word)}", "give a positive whole number")
        for word in ("max_steps", "eval_every", "save_every", "sample_every", "keep_every", "patience"):
            if getattr(self, word) < 0:
                raise UserError("a count cannot be negative", f"train.{word}={getattr(self, word)}", "choose 0 (off) or more")
        if self.keep_checkpoints < 2:
            # Should the newest turn out torn or rotten, the one before it is what the run continues from.
            raise UserError("fewer than two checkpoints leave nothing to fall back on", f"train.keep_checkpoints={self.keep_checkpoints}", "choose at least 2")
        # As it was called when it was a switch
        self.activation_checkpointing = {"true": "full", "false": "none"}.get(self.activation_checkpointing.lower(), self.activation_checkpointing)
        if self.activation_checkpointing not in ACTIVATION_CHECKPOINTING_MODES:
            raise UserError(
                "unknown way to recompute", f"train.activation_checkpointing={self.activation_checkpointing}", f"choose one of {', '.join(ACTIVATION_CHECKPOINTING_MODES)}"
            )
        if self.compile not in compile_module.COMPILE_MODES:
            raise UserError("unknown compile mode", f"train.compile={self.compile}", f"choose one of {', '.join(compile_module.COMPILE_MODES)}, e.g. auto")


@dataclass
class SweepConfig:
    """Rules of the sweep that a run is a job of. Training does not read them: they become overrides of each job."""

    match_budget: str  # what all jobs have in common: auto, tokens, steps or epochs
    lr_scale: str  # how optimizer.lr follows the batch size: none, linear or sqrt
    zip: list[str]  # swept keys whose values are paired instead of combined

    def __post_init__(self) -> None:
        for key, allowed in (("match_budget", ("auto", "tokens", "steps", "epochs")), ("lr_scale", ("none", "linear", "sqrt"))):
            if (value := getattr(self, key)) not in allowed:
                raise UserError(f"sweep.{key} must be one of {', '.join(allowed)}, got {value}", f"sweep.{key}={value}", f"e.g. sweep.{key}={allowed[0]}")


@dataclass
class Config:
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    precision: PrecisionConfig
    stage: StageConfig
    distributed: DistributedConfig
    tracker: TrackerConfig
    train: TrainConfig
    sweep: SweepConfig
    seed: int
    device: str  # auto | cpu | cuda | cuda:1
    init_from: str  # auto | scratch | a run, an HF folder, a MiniMind .pth
    resume: Optional[str]  # a run folder to continue; rewritten into plain words before composing

    def __post_init__(self) -> None:
        if self.data.max_length > self.model.max_position_embeddings:
            raise UserError(
                f"rows of {self.data.max_length} tokens do not fit a model of {self.model.max_position_embeddings} positions",
                f"data.max_length={self.data.max_length}",
                f"choose at most model.max_position_embeddings={self.model.max_position_embeddings}",
            )
        if self.data.schema and SCHEMAS[self.data.schema].rows != self.stage.data_format:
            rows = SCHEMAS[self.data.schema].rows
            raise UserError(
                f"stage={self.stage.name} reads {self.stage.data_format} rows", f"data.schema={self.data.schema}", f"such rows are for {STAGE_OF_FORMAT[rows]}"
            )
        if self.data.too_long == "split" and self.stage.data_format != "text":
            raise UserError("only a text can be split: a conversation's second half would answer nothing", "data.too_long=split", "use truncate or drop")
        if self.device == "cpu":
            self.distributed.check_device("cpu")
            self.precision.check_device("the CPU", None)
        if not 0 <= self.seed < 2**32:
            raise UserError("a seed is a number of 32 bits", f"seed={self.seed}", "choose one from 0 to 4294967295")
        if self.train.patience and not (self.train.eval_every and (self.data.val_path or self.data.val_fraction)):
            raise UserError(
                "patience counts evaluations, and there are none",
                f"train.patience={self.train.patience}",
                "set train.eval_every, and data.val_path or data.val_fraction",
            )
        if self.train.max_steps and self.schedule.warmup_steps > self.train.max_steps:
            raise UserError(
                "the warmup is longer than the run",
                f"schedule.warmup_steps={self.schedule.warmup_steps}",
                f"choose at most train.max_steps={self.train.max_steps}",
            )
