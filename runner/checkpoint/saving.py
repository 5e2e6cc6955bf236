"""What a save copies and writes, on a thread beside the training; the weights of the best evaluation, and which
checkpoints stay on disk.

Tensors are copied to host memory; the writer thread writes a checkpoint or the best weights. These are in the
checkpoint of that step where there is one, otherwise in a folder of their own:

    best-00000040/ model.safetensors  weights of step 40, as in a checkpoint
                   MANIFEST.json      size and checksum, the step, and the loss of its evaluation

After a save the checkpoints that the policy keeps stay; when the disk is full, only what a resume needs.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import filesystem
from common.errors import DISK_ERRORS, FULL_DISK_ERRORS
from common.filesystem import Chunks, read_bounded
from runner.checkpoint import atomic_dir
from runner.checkpoint.format import (
    TENSOR_FILES,
    CheckpointTensors,
    checkpoint_name,
    read_state,
    safetensors_chunks,
    step_of,
    tensor_files,
)

if TYPE_CHECKING:
    from torch import Tensor

BEST_DIR = re.compile(r"best-[0-9]{8}")
BEST_POINTER = "best"  # file with the name of the folder that holds the best weights
MAX_POINTER_BYTES = 200


@dataclass(frozen=True)
class SaveResult:
    """Result of one job of the AsyncWriter."""

    name: str
    seconds: float  # of the job itself, while training continued
    error: BaseException | None


@dataclass(eq=False)
class AsyncWriter:
    """Runs one job at a time in a thread.

    The thread is no daemon: the process exits only after the last save.
    """

    _thread: threading.Thread | None = None
    _results: deque[SaveResult] = field(default_factory=deque)  # filled by the thread, emptied by the caller

    def submit(self, name: str, job: Callable[[], Any]) -> None:
        """Start `job`, after waiting for the previous one."""
        self._join()
        self._thread = threading.Thread(target=self._run, args=(name, job), name=f"save {name}", daemon=False)
        self._thread.start()

    def poll(self) -> list[SaveResult]:
        """Return the results since the last call, without waiting.

        An error is returned, not raised: training may continue.
        """
        return [self._results.popleft() for _ in range(len(self._results))]

    def wait(self) -> list[SaveResult]:
        """Wait for the job in flight, then return the results since the last call."""
        self._join()
        return self.poll()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, name: str, job: Callable[[], Any]) -> None:
        started, error = time.perf_counter(), None
        try:
            job()
        except BaseException as caught:  # noqa: BLE001  every error is handed to the training thread
            error = caught
        self._results.append(SaveResult(name, time.perf_counter() - started, error))


@dataclass(frozen=True)
class BestWeights:
    """Weights of the best evaluation that are not on disk yet."""

    step: int
    loss: float
    weights: Mapping[str, Tensor]  # in host memory

    def write(self, checkpoints: Path) -> None:
        write_best_weights(checkpoints, self.step, self.loss, safetensors_chunks(self.weights))


def copy_to_host(sources: Mapping[str, Callable[[], Tensor]], keep: bool) -> dict[str, Tensor]:
    """Return copies in host memory, {} unless `keep`.

    Sharded tensors are gathered one at a time, to limit device memory.
    """
    copies = {}
    for name, get_tensor in sources.items():
        tensor = get_tensor()
        assert str(tensor.dtype) == "torch.float32", f"{name} would be saved as {tensor.dtype}"
        if keep:
            copies[name] = tensor.to("cpu", copy=True).contiguous()
    return copies


def write_checkpoint(checkpoints: Path, step: int, tensors: CheckpointTensors, files: dict[str, Chunks]) -> None:
    """Commit the checkpoint of `step` with `tensors` and other `files`. Raises OSError."""
    atomic_dir.write_atomic_dir(checkpoints, checkpoint_name(step), tensor_files(tensors) | files, {})
    atomic_dir.write_pointer(checkpoints, "latest", checkpoint_name(step))


def save_and_prune(
    checkpoints: Path, write: Callable[[], None], retention: RetentionPolicy, warn: Callable[[str], None]
) -> None:
    """Runs on the writer thread.

    Older checkpoints are deleted once the new one is on disk; before that, only if the disk is full.
    """
    save_freeing_space(write, checkpoints, retention, warn)
    try:
        prune_checkpoints(checkpoints, retention)
    except OSError as error:
        warn(f"older checkpoints could not be deleted: {error}")


def best_dirname(step: int) -> str:
    return f"best-{step:08d}"


def write_best_weights(checkpoints: Path, step: int, loss: float, weights: Chunks) -> None:
    """Commit the weights of `step` as a folder of their own. Raises OSError."""
    files = {TENSOR_FILES["model"]: weights}
    atomic_dir.write_atomic_dir(checkpoints, best_dirname(step), files, {"step": step, "loss": loss})
    point_to_best(checkpoints, step)


def find_best_weights(checkpoints: Path, step: int) -> Path | None:
    """Return the valid folder whose model.safetensors holds the weights of `step`; None if there is none."""
    candidates = (checkpoints / checkpoint_name(step), checkpoints / best_dirname(step))
    return next((folder for folder in candidates if folder.is_dir() and atomic_dir.verify_dir(folder) is None), None)


def is_weights_name(name: str) -> bool:
    """Return whether `name` is that of a checkpoint or of a folder of best weights."""
    return bool(atomic_dir.STEP_NAME.fullmatch(name) or BEST_DIR.fullmatch(name))


def read_pointer(path: Path) -> str | None:
    """Return the name of a checkpoint, or of a folder of best weights, in the file `latest` or `best`; None if it has
    none.
    """
    try:
        name = read_bounded(path, MAX_POINTER_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
    return name if is_weights_name(name) else None


def point_to_best(checkpoints: Path, step: int | None) -> bool:
    """Write the name of the folder with the weights of `step` to the file `best`; return whether there is such a
    folder.

    Without a step the file is removed: no evaluation of this run counts.
    """
    if step is None:
        (checkpoints / BEST_POINTER).unlink(missing_ok=True)
        return False
    name = next((name for name in (checkpoint_name(step), best_dirname(step)) if (checkpoints / name).is_dir()), None)
    if name is not None:
        atomic_dir.write_pointer(checkpoints, BEST_POINTER, name)
    return name is not None


def prune_best_dirs(checkpoints: Path, needed: Iterable[int]) -> None:
    """Delete the folders of best weights except those of the steps `needed`."""
    kept = {best_dirname(step) for step in needed}
    for folder in best_dirs(checkpoints):
        if folder.name not in kept:
            atomic_dir.discard_dir(folder)


def discard_best_after(checkpoints: Path, step: int) -> None:
    """Delete best weights of later steps than `step`, which a run resumes from: these steps are trained again, perhaps
    with other settings.
    """
    for folder in best_dirs(checkpoints):
        if folder.name > best_dirname(step):
            atomic_dir.discard_dir(folder)


def best_dirs(checkpoints: Path) -> list[Path]:
    """Return the folders of best weights, oldest first."""
    return [folder for folder in sorted(checkpoints.glob("best-*")) if BEST_DIR.fullmatch(folder.name)]


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints are kept: the newest `keep_newest`, every `keep_every` steps (0: none), and the best ones that
    the newest refer to.
    """

    keep_newest: int
    keep_every: int

    def is_milestone(self, step: int) -> bool:
        return self.keep_every > 0 and step % self.keep_every == 0


def prune_checkpoints(checkpoints: Path, policy: RetentionPolicy) -> None:
    """Delete what the policy does not keep, and what an earlier call could not delete."""
    atomic_dir.remove_temp(checkpoints, kinds=(".del-",))
    keep = max(policy.keep_newest, 2)
    best_steps = needed_best_steps(checkpoints, keep)
    steps = {name: step_of(name) for name in atomic_dir.step_names(checkpoints)}
    protected = {name for name, step in steps.items() if step in best_steps or policy.is_milestone(step)}
    atomic_dir.prune_dirs(checkpoints, keep, protected)
    prune_best_dirs(checkpoints, best_steps)


def needed_best_steps(checkpoints: Path, newest: int | None) -> set[int]:
    """Return the best step of each of the `newest` checkpoints (None: all), since a resume from any of them needs these
    weights, and that of the newest best weights.
    """
    pointed = read_pointer(checkpoints / BEST_POINTER)
    steps = set() if pointed is None else {step_of(pointed)}
    for name in atomic_dir.step_names(checkpoints)[:newest]:
        try:
            steps.add(read_state(checkpoints / name)["progress"].get("best_step"))
        except (OSError, ValueError, LookupError, AttributeError, TypeError):  # damaged: no resume starts from it
            continue
    return {step for step in steps if isinstance(step, int)}


def save_freeing_space(
    save: Callable[[], None], checkpoints: Path, policy: RetentionPolicy, warn: Callable[[str], None]
) -> None:
    """Call `save` until it succeeds: again after RETRY_SECONDS, and on a full disk after deleting the oldest
    checkpoints. Raises its last OSError.
    """
    delays = list(filesystem.RETRY_SECONDS)
    while True:
        try:
            return save()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            need = getattr(error, "need", 0)
            is_full = (
                error.errno in FULL_DISK_ERRORS
                and checkpoints.is_dir()
                and (not delays or atomic_dir.missing_bytes(checkpoints, need) > 0)
            )
            if is_full and (names := free_space(checkpoints, need, policy)):
                warn(
                    f"the disk is full: deleted {', '.join(names)} to save the newest state; the newest valid checkpoint and the best weights stay"
                )
                continue
            if not delays:
                raise
        time.sleep(delays.pop(0))


def free_space(checkpoints: Path, need: int, policy: RetentionPolicy) -> list[str]:
    """Delete the oldest checkpoints until `need` bytes fit, at least one; return their names.

    [] if deleting all of them would not suffice.

    The newest valid checkpoint and the best weights stay. Checkpoints of train.keep_every go after the others.
    """
    missing, best = atomic_dir.missing_bytes(checkpoints, need), needed_best_steps(checkpoints, 1)
    valid = atomic_dir.valid_names(checkpoints)
    surplus = sorted(
        (name for name in valid[1:] if step_of(name) not in best),
        key=lambda name: (policy.is_milestone(step_of(name)), name),
    )
    old_best = [folder for folder in best_dirs(checkpoints) if step_of(folder.name) not in best]
    if not surplus or sum(map(_size, [*old_best, *(checkpoints / name for name in surplus)])) < missing:
        return []
    deleted: list[str] = []
    for name in surplus:
        if deleted and not atomic_dir.missing_bytes(checkpoints, need):
            break
        atomic_dir.discard_dir(checkpoints / name)
        prune_best_dirs(checkpoints, needed_best_steps(checkpoints, None))
        deleted.append(name)
    return deleted


def _size(folder: Path) -> int:
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
