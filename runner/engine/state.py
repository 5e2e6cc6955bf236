"""State of one run: its parts, its progress, and what of it a checkpoint stores.

`build.build_run` makes one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from common.errors import PeerLostError, StopRequested, UserError
from models.formats.tensor_files import check_finite
from models.language_model import stored_tensors
from runner.engine.config import Config
from runner.engine.data_pipeline import DataPipeline
from runner.engine.device import rng
from runner.engine.device.compile import CompileDecision
from runner.engine.device.distributed import DistributedContext
from runner.engine.device.heartbeat import enter
from runner.engine.device.mesh import distribute_like, full_tensor
from runner.engine.device.precision import GradStats, Precision
from runner.engine.device.signals import StopRequests
from runner.engine.optim.groups import OptimizerGroup
from runner.engine.optim.schedules import describe_lr_jump
from runner.run_dir.metadata import RunMetadata
from runner.tracking.jsonl import SavedLogs
from runner.tracking.logger import RunLogger

if TYPE_CHECKING:
    from data.batching.loader import StepLoader
    from data.tokenize.tokenizer import Tokenizer
    from models.language_model import LanguageModel
    from runner.checkpoint.manager import CheckpointManager
    from runner.engine.objectives.objective import LossSums, Objective

T = TypeVar("T")


@dataclass
class Progress:
    """Counters that survive in state.json, every field of them."""

    step: int = 0  # optimizer steps done
    branch_step: int = 0  # those of the run that a branch continues
    examples: int = 0  # examples consumed, over all epochs
    loss_tokens: int = 0  # tokens with a label
    tokens: int = 0  # all tokens computed, without padding
    overflows: int = 0  # fp16: steps repeated with a smaller loss scale
    nonfinite_steps: int = 0  # steps skipped for a loss or gradient that is not finite
    consecutive_nonfinite_steps: int = 0  # the last of them, without a finite step in between
    zero_gradient_steps: int = 0  # the last steps, in a row, whose gradient norm is exactly 0
    best_loss: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    eval_loss: float | None = None  # the newest
    evaluated_step: int = 0  # the last step whose evaluation and samples are done: a resumed run does not repeat them
    rows_since: int = 0  # the step at which the rows of evaluations changed
    recent_losses: list[float | None] = field(default_factory=list)  # None: not finite

    def forget_evaluations(self) -> None:
        self.best_loss = self.best_step = self.eval_loss = None
        self.evals_since_best = self.evaluated_step = 0
        self.rows_since = self.step


class StepCounts(NamedTuple):
    """Numbers of a step: of one rank, in this order, before they are summed, then over all ranks; zeros if the loader
    of a rank failed.
    """

    items: float = 0.0  # divisor of the loss
    loss_tokens: int = 0  # tokens with a label
    tokens: int = 0  # all tokens computed, without padding
    examples: int = 0


class StepOutput(NamedTuple):
    """One step, on the device."""

    step: int
    names: list[list[str]]  # file:line of the examples of each of this rank's micro-batches
    counts: StepCounts  # over all ranks
    sums: LossSums  # of the objective, over this rank's micro-batches
    losses: list[Tensor]  # () of each of them, summed over its items
    gradients: GradStats


@dataclass
class TrainState:
    cfg: Config
    metadata: RunMetadata
    dist: DistributedContext
    tokenizer: Tokenizer
    model: LanguageModel  # the bare model: what is saved
    wrapped: nn.Module  # the same model as the training step calls it (DDP, compiled)
    compile_decision: CompileDecision
    objective: Objective
    pipeline: DataPipeline
    loader: StepLoader
    val_loaders: dict[str, StepLoader]  # of each validation set, as in `pipeline.val`
    optimizers: OptimizerGroup
    precision: Precision
    logger: RunLogger
    checkpoints: CheckpointManager
    total_steps: int  # of the whole run
    compatibility: dict[str, Any]  # facts that a checkpoint is compared with before it is loaded
    progress: Progress = field(default_factory=Progress)
    # the newest steps, whose losses are still on the device
    pending_steps: list[StepOutput] = field(default_factory=list)
    saved_logs: SavedLogs | None = None  # what the checkpoint that was loaded knows of the logs
    tracker_id: str | None = None
    stop: StopRequests = field(default_factory=StopRequests)  # of this rank
    first_step: int = 0  # steps that were done when this attempt began
    # weights, optimizer state, counters and logs are those after the same step: it can be saved
    is_consistent: bool = True
    has_joined: bool = False  # a rank failed or was stopped, and all ranks have left their loops at the same place
    thread_reason: str | None = None  # why this process has not torch's own number of threads
    kernel_reasons: dict[str, str] = field(default_factory=dict)  # title -> the kernel that was chosen, and why

    @property
    def run_dir(self) -> Path:
        return self.metadata.folder

    def check_stop(self, has_stopped: bool = False, has_failed: bool = False) -> None:
        """Raise StopRequested if some rank has received a stop signal.

        Every rank must call it. `has_failed`: see `all_reduce_or_raise`.
        """
        self.all_reduce_or_raise([], has_stopped, has_failed)

    def all_reduce_or_raise(
        self, numbers: Sequence[float], has_stopped: bool = False, has_failed: bool = False
    ) -> list[float]:
        """Return the sum over all ranks of each number.

        Raises StopRequested if some rank has received a stop signal.

        `has_failed`: this rank cannot go on and will raise the error; the others raise PeerLostError.
        """
        *sums, stopped, failed = self.dist.all_reduce_sum([*numbers, has_stopped or self.stop(), has_failed])
        self.has_joined = bool(stopped or failed)
        if failed and not has_failed:
            raise PeerLostError("another rank cannot go on; its log has the cause")
        if stopped and not has_failed:
            raise StopRequested
        return sums

    @property
    def stopped_early(self) -> bool:
        return 0 < self.cfg.train.patience <= self.progress.evals_since_best

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.total_steps or self.stopped_early

    @property
    def pause_step(self) -> int | None:
        return self.cfg.train.pause_step(self.total_steps, self.progress.branch_step)

    @property
    def is_at_pause(self) -> bool:
        """Whether the evaluation of train.stop_at is the last thing done."""
        return self.progress.step == self.progress.evaluated_step == self.pause_step

    def is_due(self, every: int) -> bool:
        """Return whether something that happens every `every` steps, and after the last step, happens now.

        0: never.
        """
        return every > 0 and (self.progress.step % every == 0 or self.progress.step == self.total_steps)

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the run is evaluated after this step; on a slice of the training rows after the last one only."""
        is_final = self.cfg.train.final_eval_rows > 0 and self.progress.step == self.total_steps
        intervals = not self.pipeline.evaluates_training_rows and self.is_due(self.cfg.train.eval_every)
        return bool(self.val_loaders) and (is_final or intervals)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of state.json, as JSON values. Every rank must call it; rank 0's result is stored.

        Raises OSError on rank 0 while a line of the logs cannot be written: a position in them is part of the state.
        """
        return {
            "progress": dataclasses.asdict(self.progress),
            "scaler": self.precision.state_dict(),
            "rng": self.dist.gather(rng.get_rng_state()),  # one per rank
            "log": self.logger.position(),
            "log_sha256": self.logger.checksums(),
            "tracker_id": self.logger.tracker_id,
            "evaluation": self.pipeline.evaluation,
            "compatibility": self.compatibility,
            "run": self.metadata.record(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.progress = Progress(**saved["progress"])
        cfg, before = self.cfg, saved["compatibility"]
        if jump := describe_lr_jump(
            self.progress.step, before, self.loader.steps_per_epoch, self.total_steps, cfg.optimizer.lr, cfg.schedule
        ):
            self.logger.info(f"changed from here on: {jump}")
        before, now = saved["evaluation"] or {}, self.pipeline.evaluation or {}
        if before.get("sets") != now.get("sets"):
            self.logger.warning("the validation sets have changed: their numbers are of other rows from here on")
        if before and now and before | {"sets": 0} != now | {"sets": 0} and self.progress.best_step is not None:
            self.progress.forget_evaluations()
            self.logger.warning(
                "the evaluation rows or their loss have changed: best weights are chosen among the evaluations from here on"
            )
        self.precision.load_state_dict(saved["scaler"])
        rank = self.dist.rank
        if rank < len(saved["rng"]):
            rng.set_rng_state(saved["rng"][rank])
        else:  # the checkpoint was saved by fewer ranks
            rng.seed_all((self.cfg.seed + rank + self.progress.step * self.dist.size) % 2**32)
        self.saved_logs, self.tracker_id = SavedLogs.of_state(saved), saved["tracker_id"]

    def follow_run_dir(self) -> None:
        """Let the last save and record of a run whose directory was moved go to where it is now."""
        if folder := self.metadata.follow_move():
            self.logger.move_to(folder)

    def tensor_sources(self) -> dict[str, dict[str, Callable[[], Tensor]]]:
        """Return, per file of a checkpoint ("model", "optimizer"), name -> function that returns the tensor, unsharded.

        Every rank must call each function, in this order: under fsdp it gathers the shards.
        """
        enter("in a save")
        # after a forward pass without a backward pass a layer may still be gathered, and rounded
        self.dist.reshard(self.model)
        files = {"model": saved_tensors(self.model), "optimizer": self.optimizers.state_dict()}
        return {
            file: {name: partial(full_tensor, tensor.detach()) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }

    def load_tensors(self, files: dict[str, dict[str, Tensor]], source: Path) -> None:
        """Copy the tensors of a checkpoint into model and optimizers.

        Raises UserError if one is missing, unknown or of another shape.
        """
        load_strict(saved_tensors(self.model), files["model"], source)
        self.optimizers.load_state_dict(files["optimizer"])


def propagate_failure(batches: Iterator[T], announce: Callable[[bool, bool], object]) -> Iterator[T]:
    """Yield what a loader of this rank yields.

    If it raises, call `announce(has_stopped, has_failed)` first: it joins the collective in which the other ranks wait,
    so that they end, too.
    """
    while True:
        enter("while it waits for data")
        try:
            batch = next(batches)
        except StopIteration:
            return
        except BaseException as error:
            is_stop = isinstance(error, StopRequested)
            announce(is_stop, not is_stop)
            raise
        yield batch


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint holds: adapters alone where the model has some, otherwise all of it, frozen parameters
    and buffers included.
    """
    stored = stored_tensors(model)
    return {name: tensor for name, tensor in stored.items() if ".lora." in name} or stored


def load_strict(into: dict[str, Tensor], saved: dict[str, Tensor], source: Path) -> None:
    """Copy `saved` into `into`.

    Raises UserError where names, shapes or kinds of numbers differ, and for values that are not finite.
    """

    def shape(tensor: Tensor | None) -> str:
        return (
            "absent"
            if tensor is None
            else "x".join(map(str, tensor.shape))
            + ("" if tensor.is_floating_point() else f" of {str(tensor.dtype)[6:]}")
        )

    if differing := [
        f"{name}: {own} in the model, {other} in the checkpoint"
        for name in sorted(into.keys() | saved.keys())
        if (own := shape(into.get(name))) != (other := shape(saved.get(name)))
    ]:
        raise UserError(
            "the checkpoint's tensors do not fit this model:\n  " + "\n  ".join(differing[:12]),
            source,
            "resume with the model the run was started with",
        )
    with torch.no_grad():
        for name, tensor in sorted(into.items()):
            check_finite(
                {name: saved[name]},
                str(source),
                "restore it from a backup, or delete it: the checkpoint before it is read instead",
            )
            tensor.copy_(distribute_like(saved[name].to(tensor.device), like=tensor))


def finite_or_none(number: float) -> float | None:
    """Return the number, or None (JSON null) if it is not finite."""
    return number if math.isfinite(number) else None
