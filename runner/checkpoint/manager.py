"""Checkpoint manager of a run: save in the background, retain, keep the best weights, load the newest valid checkpoint."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common.errors import TrainingError, UserError
from common.filesystem import describe_disk_error, retry_disk
from runner.checkpoint import atomic_dir
from runner.checkpoint.compatibility import diff_facts
from runner.checkpoint.format import (
    CHECKPOINTS_DIR,
    CheckpointTensors,
    checkpoint_name,
    read_checkpoint_tensors,
    read_state,
    state_file,
    step_of,
)
from runner.checkpoint.saving import (
    AsyncWriter,
    BestWeights,
    RetentionPolicy,
    SaveResult,
    best_dirname,
    copy_to_host,
    discard_best_after,
    point_to_best,
    save_and_prune,
    write_checkpoint,
)

if TYPE_CHECKING:
    from torch import Tensor


class Stateful(Protocol):
    """What a checkpoint saves and restores; the engine's TrainState."""

    progress: Any  # counters; `best_step` is that of the evaluation that later ones are compared with

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of state.json, `progress` among them.

        Raises OSError while a log cannot be written.
        """

    def tensor_sources(self) -> dict[str, dict[str, Callable[[], Tensor]]]:
        """Return file -> name -> function that returns the whole tensor; every rank calls each function."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state."""

    def load_tensors(self, files: CheckpointTensors, source: Path) -> None: ...


class Messages(Protocol):
    def info(self, message: str) -> None: ...

    def warning(self, message: str) -> None: ...


class RunRecord(Protocol):
    """The directory of a run and its run.json; RunMetadata."""

    folder: Path

    def update(self, **fields: Any) -> None: ...

    def check_owned(self) -> None:
        """Raise TrainingError if the directory no longer belongs to this process."""


@dataclass(eq=False)
class CheckpointManager:
    """Checkpoints of one run. Every rank calls the same methods in the same order; rank 0 writes."""

    record: RunRecord
    retention: RetentionPolicy
    max_failed_saves: int
    messages: Messages
    is_rank_zero: bool = True
    broadcast_flag: Callable[[bool], bool] = lambda flag: flag  # returns rank 0's flag on every rank
    saved_step: int | None = field(default=None, init=False)  # the newest step handed to the writer

    def __post_init__(self) -> None:
        self._writer = AsyncWriter()
        self._writer_warnings: deque[str] = deque()  # filled by the writer thread
        self._failed_saves = 0  # consecutive
        self._weights_in_flight: Mapping[str, Tensor] = {}  # of the checkpoint that is being written
        self._awaited_best: BestWeights | None = None  # of the checkpoint that is being written
        self._unsaved_best: BestWeights | None = None  # could not be written; tried again with the next save
        self._stall = 0.0

    @property
    def dir(self) -> Path:
        return self.record.folder / CHECKPOINTS_DIR

    def save_async(self, step: int, source: Stateful) -> None:
        """Copy the state to rank 0's host memory and hand it to the writer thread, which calls `save_and_prune`, and that
        `write_checkpoint`.

        A step that is saved already is skipped.
        """
        if self.is_rank_zero:
            self.record.check_owned()
            if self._unsaved_best is not None:  # still in flight, or failed
                self.wait_for_save()
                self._submit_best(self._unsaved_best)
        if self.broadcast_flag(step == self.saved_step):
            return None
        started = time.perf_counter()
        tensors = {file: copy_to_host(sources, self.is_rank_zero) for file, sources in source.tensor_sources().items()}
        try:
            state = source.state_dict()
        except OSError as error:
            return self._handle_failure(step, error)
        if not self.is_rank_zero:
            return None
        self._submit(checkpoint_name(step), partial(write_checkpoint, self.dir, step, tensors, state_file(state)))
        self.saved_step, self._weights_in_flight = step, tensors["model"]
        self._stall += time.perf_counter() - started

    def save_best(self, step: int, loss: float, source: Stateful) -> None:
        """Keep the weights of `step`, the current one, whose evaluation loss is the lowest so far.

        The checkpoint of this step holds them where there is one; otherwise the weights alone are copied, and written
        in the background.
        """
        if self.broadcast_flag(step == self.saved_step):
            if self.is_rank_zero:
                self._unsaved_best = None  # a former one: written again, it would be pointed to
                self._awaited_best = BestWeights(step, loss, self._weights_in_flight)
                self._point_to_awaited_best()
            return
        started = time.perf_counter()
        weights = copy_to_host(source.tensor_sources()["model"], self.is_rank_zero)
        if not self.is_rank_zero:
            return
        self._awaited_best = None
        self._submit_best(BestWeights(step, loss, weights))
        self._stall += time.perf_counter() - started

    def _submit_best(self, best: BestWeights | None) -> None:
        self._unsaved_best = best  # until it is reported as saved
        if best is not None:
            self._submit(best_dirname(best.step), partial(best.write, self.dir))

    def _submit(self, name: str, write: Callable[[], None]) -> None:
        self._writer.submit(
            name, partial(save_and_prune, self.dir, write, self.retention, self._writer_warnings.append)
        )

    def save_blocking(self, step: int, source: Stateful) -> None:
        """Save and wait until it is on disk, with the best weights so far; retry until it succeeds or TrainingError is
        raised.
        """
        while True:
            self.save_async(step, source)
            self.wait_for_save()
            self._point_to_awaited_best()
            if self.broadcast_flag(
                self.saved_step == step and self._unsaved_best is None and self._awaited_best is None
            ):
                return

    def report_finished(self) -> None:
        """Report saves that have finished since the last call.

        Raises TrainingError after max_failed_saves consecutive failures.
        """
        self._handle_results(self._writer.poll())

    def wait_for_save(self) -> None:
        """Wait until the save in flight has finished, and report it."""
        self._handle_results(self._writer.wait())

    def close(self) -> None:
        """Wait for the save in flight. Its result is not reported: training has ended."""
        self._writer.wait()

    def take_stall(self) -> float:
        """Return the seconds that training waited for saves since the last call."""
        stall, self._stall = self._stall, 0.0
        return stall

    def load_newest(
        self, source: Stateful, facts: Mapping[str, Any], rules: Mapping[str, str], total_steps: int
    ) -> bool:
        """Load the newest valid checkpoint into `source`; return False if there is no checkpoint yet.

        `facts` and `rules` describe the run as it is now (compatibility.py). Raises UserError if the checkpoint belongs
        to another model, stage, tokenizer or data, if it is beyond `total_steps`, or if no checkpoint is valid.
        """
        checkpoint, skipped = atomic_dir.newest_valid(self.dir)
        for name, reason in skipped:
            message = f"checkpoint {name} skipped: {reason}"
            self.messages.warning(message)
            self.record.update(recovered=[message])
        if checkpoint is None:
            if skipped:
                raise UserError(
                    "no checkpoint of this run is valid: " + "; ".join(f"{name}: {reason}" for name, reason in skipped),
                    self.dir,
                    "restore one from a backup, or start a new run",
                )
            self._forget_later_best(0, None)
            return False
        saved = read_state(checkpoint)
        self.saved_step = step = saved["progress"]["step"]
        if step > total_steps:
            raise UserError(
                f"the run is already at step {step}",
                f"train.max_steps={total_steps}",
                f"give at least {step}; a run cannot go back",
            )
        self._check_compatible(diff_facts(saved["compatibility"], facts, rules), checkpoint)
        source.load_tensors(read_checkpoint_tensors(checkpoint), checkpoint)
        source.load_state_dict(saved)
        self._forget_later_best(step, source.progress.best_step)
        return True

    def _forget_later_best(self, step: int, best_step: int | None) -> None:
        """Delete the best weights that were saved after the checkpoint of `step`, which is resumed from: metrics.jsonl
        is cut back, too.
        """
        if self.is_rank_zero and self.dir.is_dir():
            # first: a kill leaves no pointer to deleted weights, nor do weights that are missing
            retry_disk(lambda: point_to_best(self.dir, best_step) or point_to_best(self.dir, None))
            retry_disk(partial(discard_best_after, self.dir, step))

    def _check_compatible(self, differences: Mapping[str, list[str]], checkpoint: Path) -> None:
        check_compatible(differences, checkpoint, self.record.folder)
        for change in differences["changes_training"]:
            self.messages.info(f"changed from here on: {change}")
        for change in differences["changes_rounding"]:
            self.messages.warning(f"no longer bitwise reproducible: {change}")
        if differences["changes_rounding"]:
            self.record.update(exact=False, inexact_because=differences["changes_rounding"])
        if differences["changes_training"]:
            self.record.update(changed=differences["changes_training"])

    def _handle_results(self, results: list[SaveResult]) -> None:
        while self._writer_warnings:
            self.messages.warning(self._writer_warnings.popleft())
        for result in results:
            step, is_checkpoint = step_of(result.name), result.name == checkpoint_name(step_of(result.name))
            if result.error is None:
                self._failed_saves = 0
                if is_checkpoint:
                    self._weights_in_flight = {}
                elif self._unsaved_best is not None and step == self._unsaved_best.step:
                    self._unsaved_best = None
                self.messages.info(f"saved {result.name} in {result.seconds:.2f} s")
                self.record.update(
                    degraded=None, **({"checkpoint": result.name, "step": step} if is_checkpoint else {})
                )
                self._point_to_awaited_best()
            elif isinstance(result.error, OSError):
                if is_checkpoint and self._awaited_best is not None and step == self._awaited_best.step:
                    self._unsaved_best, self._awaited_best = self._awaited_best, None
                self._handle_failure(step, result.error, is_checkpoint)
            else:
                raise result.error

    def _point_to_awaited_best(self) -> None:
        """Update the file `best`, for users, once the checkpoint that it names is on disk."""
        if (best := self._awaited_best) is None:
            return
        try:
            if retry_disk(partial(point_to_best, self.dir, best.step)):
                self._awaited_best = None
        except OSError as error:
            self._handle_failure(best.step, error, is_checkpoint=False)

    def _handle_failure(self, step: int, error: OSError, is_checkpoint: bool = True) -> None:
        """Continue with the previous checkpoint after a write error, unless too many saves have failed."""
        self.record.check_owned()
        self._failed_saves += 1
        if is_checkpoint:
            self.saved_step = None
        reason = (
            str(error)
            if isinstance(error, atomic_dir.SaveError)
            else f"step {step} was not saved: {describe_disk_error(error, self.record.folder)}"
        )
        self.messages.warning(reason)
        self.record.update(degraded=f"step {step}: {reason}")
        if self._failed_saves >= self.max_failed_saves:
            raise TrainingError(
                f"{self._failed_saves} consecutive saves failed (train.max_failed_saves), the last one with: {reason}"
            )


def check_compatible(differences: Mapping[str, list[str]], checkpoint: Path, run_dir: Path) -> None:
    """Raise UserError for differences that would make another run."""
    if differences["incompatible"]:
        raise UserError(
            "cannot resume, the checkpoint was saved by another configuration:\n    "
            + "\n    ".join(differences["incompatible"]),
            checkpoint,
            f"resume with the saved settings, or start a new run with init_from={run_dir}",
        )


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest valid checkpoint of a run. Raises FileNotFoundError if there is none."""
    checkpoint, _ = atomic_dir.newest_valid(run_dir / CHECKPOINTS_DIR)
    if checkpoint is None:
        raise FileNotFoundError(f"no checkpoint in {run_dir}")
    return checkpoint
