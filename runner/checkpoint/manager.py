"""Checkpoint manager of a run: save in the background, retain, keep the best weights, load the newest valid checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common.errors import TrainingError, UserError
from common.filesystem import Chunks, make_dirs
from runner.checkpoint import atomic_dir
from runner.checkpoint.async_writer import AsyncWriter, SaveResult
from runner.checkpoint.best import best_dirname, discard_best_after, point_to_best, prune_best_dirs, referenced_best_steps, write_best_weights
from runner.checkpoint.compatibility import diff_facts
from runner.checkpoint.format import (
    CHECKPOINTS_DIR,
    CheckpointTensors,
    checkpoint_files,
    checkpoint_name,
    read_checkpoint_tensors,
    read_state,
    safetensors_chunks,
    step_of,
)

if TYPE_CHECKING:
    from torch import Tensor


class Stateful(Protocol):
    """What a checkpoint saves and restores; the engine's TrainState."""

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of state.json, `progress` among them. Raises OSError while a log cannot be written."""

    def tensor_sources(self) -> dict[str, dict[str, Callable[[], Tensor]]]:
        """Return file -> name -> function that returns the whole tensor; every rank calls each function."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state."""

    def best_step_so_far(self) -> int | None:
        """Return the step of the best evaluation that later ones are compared with."""

    def load_tensors(self, files: CheckpointTensors, source: Path) -> None: ...


class Messages(Protocol):
    def info(self, message: str) -> None: ...

    def warning(self, message: str) -> None: ...


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints are kept: the newest `keep_newest`, every `keep_every` steps (0: none), and the best ones that the newest refer to."""

    keep_newest: int
    keep_every: int

    def protects(self, step: int, best_steps: Collection[int]) -> bool:
        return step in best_steps or (self.keep_every > 0 and step % self.keep_every == 0)


class CheckpointManager:
    """Checkpoints of one run. Every rank calls the same methods in the same order; rank 0 writes."""

    def __init__(
        self,
        run_dir: Path,
        retention: RetentionPolicy,
        max_failed_saves: int,
        messages: Messages,
        update_metadata: Callable[..., None],
        is_rank_zero: bool = True,
        broadcast_flag: Callable[[bool], bool] = lambda flag: flag,
    ) -> None:
        """`update_metadata` writes fields of run.json; `broadcast_flag` returns rank 0's flag on every rank."""
        self.run_dir, self.dir = run_dir, run_dir / CHECKPOINTS_DIR
        self.saved_step = 0  # the newest step handed to the writer
        self._retention, self._max_failed_saves, self._messages, self._update_metadata = retention, max_failed_saves, messages, update_metadata
        self._is_rank_zero, self._broadcast_flag = is_rank_zero, broadcast_flag
        self._writer = AsyncWriter()
        self._failed_saves = 0  # consecutive
        self._awaited_best: int | None = None  # step of the best evaluation, while its checkpoint is being written
        self._stall = 0.0

    def save_async(self, step: int, source: Stateful) -> None:
        """Copy the state to rank 0's host memory and hand it to the writer thread. A step that is saved already is skipped."""
        if self._broadcast_flag(step == self.saved_step):
            return None
        started = time.perf_counter()
        tensors = {file: _copy_to_host(sources, self._is_rank_zero) for file, sources in source.tensor_sources().items()}
        try:
            state = source.state_dict()
        except OSError as error:
            return self._handle_failure(step, error)
        if not self._is_rank_zero:
            return None
        files, size = checkpoint_files(tensors, state), sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
        self._writer.submit(checkpoint_name(step), partial(_write_checkpoint, self.dir, step, files, size, self._retention))
        self.saved_step = step
        self._stall += time.perf_counter() - started

    def save_best(self, step: int, loss: float, source: Stateful) -> None:
        """Keep the weights of `step`, the current one, whose evaluation loss is the lowest so far.

        The checkpoint of this step holds them where there is one; otherwise the weights alone are copied, and written in the background.
        """
        if self._broadcast_flag(step == self.saved_step):
            self._awaited_best = step if self._is_rank_zero else None
            self._point_to_awaited_best()
            return
        started = time.perf_counter()
        weights = _copy_to_host(source.tensor_sources()["model"], self._is_rank_zero)
        if not self._is_rank_zero:
            return
        size = sum(tensor.nbytes for tensor in weights.values())
        content = partial(safetensors_chunks, weights)
        self._writer.submit(best_dirname(step), partial(write_best_weights, self.dir, step, loss, content, size, self._retention.keep_newest))
        self._awaited_best = None
        self._stall += time.perf_counter() - started

    def save_blocking(self, step: int, source: Stateful) -> None:
        """Save and wait until it is on disk; retry until it succeeds or TrainingError is raised."""
        while True:
            self.save_async(step, source)
            self.wait_for_save()
            if self._broadcast_flag(self.saved_step == step):
                return

    def report_finished(self) -> None:
        """Report saves that have finished since the last call. Raises TrainingError after max_failed_saves consecutive failures."""
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

    def load_newest(self, source: Stateful, facts: Mapping[str, Any], rules: Mapping[str, str], total_steps: int) -> bool:
        """Load the newest valid checkpoint into `source`; return False if there is no checkpoint yet.

        `facts` and `rules` describe the run as it is now (compatibility.py). Raises UserError if the checkpoint belongs to another
        model, stage, tokenizer or data, if it is beyond `total_steps`, or if no checkpoint is valid.
        """
        checkpoint, skipped = atomic_dir.newest_valid(self.dir)
        for name, reason in skipped:
            self._messages.warning(f"checkpoint {name} skipped: {reason}")
        if checkpoint is None:
            if skipped:
                raise UserError(
                    "no checkpoint of this run is valid: " + "; ".join(f"{name}: {reason}" for name, reason in skipped),
                    str(self.dir),
                    "restore one from a backup, or start a new run",
                )
            self._forget_later_best(0, None)
            return False
        saved = read_state(checkpoint)
        self.saved_step = saved["progress"]["step"]
        if self.saved_step > total_steps:
            raise UserError(
                f"the run is already at step {self.saved_step}", f"train.max_steps={total_steps}", f"give at least {self.saved_step}; a run cannot go back"
            )
        self._check_compatible(diff_facts(saved["compatibility"], facts, rules), checkpoint)
        source.load_tensors(read_checkpoint_tensors(checkpoint), checkpoint)
        source.load_state_dict(saved)
        self._forget_later_best(self.saved_step, source.best_step_so_far())
        return True

    def _forget_later_best(self, step: int, best_step: int | None) -> None:
        """Delete the best weights that were saved after the checkpoint of `step`, which is resumed from: metrics.jsonl is cut back, too."""
        if self._is_rank_zero and self.dir.is_dir():
            discard_best_after(self.dir, step)
            with suppress(OSError):
                point_to_best(self.dir, best_step)

    def _check_compatible(self, differences: Mapping[str, list[str]], checkpoint: Path) -> None:
        if differences["incompatible"]:
            raise UserError(
                "cannot resume, the checkpoint was saved by another configuration:\n    " + "\n    ".join(differences["incompatible"]),
                str(checkpoint),
                f"resume with the saved settings, or start a new run with init_from={self.run_dir}",
            )
        for change in differences["changes_training"]:
            self._messages.info(f"changed from here on: {change}")
        for change in differences["changes_rounding"]:
            self._messages.warning(f"no longer bitwise reproducible: {change}")
        if differences["changes_rounding"]:
            self._update_metadata(exact=False, inexact_because=differences["changes_rounding"])
        if differences["changes_training"]:
            self._update_metadata(changed=differences["changes_training"])

    def _handle_results(self, results: list[SaveResult]) -> None:
        for result in results:
            step, is_checkpoint = step_of(result.name), result.name == checkpoint_name(step_of(result.name))
            if result.error is None:
                self._failed_saves = 0
                self._messages.info(f"saved {result.name} in {result.seconds:.2f} s")
                self._update_metadata(degraded=None, **({"checkpoint": result.name, "step": step} if is_checkpoint else {}))
                self._point_to_awaited_best()
            elif isinstance(result.error, OSError):
                if not is_checkpoint or step == self._awaited_best:
                    self._messages.warning(f"the weights of the best evaluation, step {step}, could not be saved")
                self._handle_failure(step, result.error, is_checkpoint)
            else:
                raise result.error

    def _point_to_awaited_best(self) -> None:
        """Update the file `best`, for users, once the checkpoint that it names is on disk."""
        with suppress(OSError):
            if self._awaited_best is not None and point_to_best(self.dir, self._awaited_best):
                self._awaited_best = None

    def _handle_failure(self, step: int, error: OSError, is_checkpoint: bool = True) -> None:
        """Continue with the previous checkpoint after a write error, unless too many saves have failed."""
        self._failed_saves += 1
        if is_checkpoint:
            self.saved_step = 0
        self._messages.warning(str(error))
        self._update_metadata(degraded=f"step {step}: {error}")
        if self._failed_saves >= self._max_failed_saves:
            raise TrainingError(f"{self._failed_saves} consecutive saves failed, the last one with: {error}")


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest valid checkpoint of a run. Raises FileNotFoundError if there is none."""
    checkpoint, _ = atomic_dir.newest_valid(run_dir / CHECKPOINTS_DIR)
    if checkpoint is None:
        raise FileNotFoundError(f"no checkpoint in {run_dir}")
    return checkpoint


def _write_checkpoint(checkpoints: Path, step: int, files: Mapping[str, Callable[[], Chunks]], size: int, retention: RetentionPolicy) -> None:
    """Runs on the writer thread. `latest` is updated, and older checkpoints are deleted, only once this one is on disk."""
    make_dirs(checkpoints)
    atomic_dir.write_atomic_dir(checkpoints, checkpoint_name(step), files, {}, expected=size)
    atomic_dir.write_pointer(checkpoints, "latest", checkpoint_name(step))
    best_steps = referenced_best_steps(checkpoints, retention.keep_newest)
    protected = {path.name for path in checkpoints.glob("step-*") if retention.protects(step_of(path.name), best_steps)}
    atomic_dir.prune_dirs(checkpoints, retention.keep_newest, protected)
    prune_best_dirs(checkpoints, best_steps)


def _copy_to_host(sources: Mapping[str, Callable[[], Tensor]], keep: bool) -> dict[str, Tensor]:
    """Return copies in host memory, {} unless `keep`. Sharded tensors are gathered one at a time, to limit device memory."""
    copies = {}
    for name, get_tensor in sources.items():
        tensor = get_tensor()
        assert str(tensor.dtype) == "torch.float32", f"{name} would be saved as {tensor.dtype}"
        if keep:
            copies[name] = tensor.to("cpu", copy=True).contiguous()
    return copies
