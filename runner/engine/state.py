"""A run: the parts one training holds, and how far it has come. `build` makes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.engine.config import Config
from runner.engine.data_pipeline import DataPipeline
from runner.engine.device.compile import CompileDecision
from runner.engine.device.distributed import DistributedContext
from runner.engine.device.precision import Precision
from runner.engine.optim.groups import OptimizerGroup
from runner.tracking.logger import RunLogger

if TYPE_CHECKING:
    from torch import nn

    from data.batching.loader import StepLoader
    from data.tokenize.chat_template import ChatTemplate
    from data.tokenize.tokenizer import Tokenizer
    from models.decoder import Decoder
    from runner.checkpoint.async_writer import AsyncWriter
    from runner.engine.objectives.objective import Objective
    from runner.engine.step_output import StepOutput


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
class TrainState:
    cfg: Config
    folder: Path
    world: DistributedContext
    tokenizer: Tokenizer
    model: Decoder  # the bare model: what is saved
    wrapped: nn.Module  # the same model as the training step calls it (DDP, compiled)
    compiling: CompileDecision
    objective: Objective
    feed: DataPipeline
    loader: StepLoader
    val_loader: StepLoader | None
    optimizers: OptimizerGroup
    precision: Precision
    track: RunLogger
    writer: AsyncWriter
    attempt: int  # how many times this folder has been launched, this time included
    note: Callable[..., None]  # puts facts into the run's record, run.json
    facts: dict[str, Any]  # what a checkpoint is held against when it is taken up
    progress: Progress = field(default_factory=Progress)
    unread: list[StepOutput] = field(default_factory=list)  # the newest steps, while their losses wait on the device
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

    def due(self, every: int) -> bool:
        """Whether what happens every so many steps, and after the last, happens now."""
        return every > 0 and (self.progress.step % every == 0 or self.progress.step == self.total_steps)


def chat_template(run: TrainState) -> ChatTemplate | None:
    """How the model is spoken to; None where it only continues text."""
    from data.tokenize.chat_template import ChatTemplate

    return None if run.cfg.stage.rows == "text" else ChatTemplate(run.tokenizer)


def finite_or_none(number: float) -> float | None:
    """As JSON can say it."""
    return number if math.isfinite(number) else None
