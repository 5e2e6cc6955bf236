"""What a save copies and writes, on a thread beside the training.

Tensors are copied to host memory; the writer thread writes a checkpoint or the best weights.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.filesystem import Chunks
from runner.checkpoint import atomic_dir
from runner.checkpoint.format import checkpoint_name, safetensors_chunks
from runner.checkpoint.retention import RetentionPolicy, prune_checkpoints, save_freeing_space, write_best_weights


@dataclass(frozen=True)
class SaveResult:
    """Result of one job of the AsyncWriter."""

    name: str
    seconds: float  # of the job itself, while training continued
    error: BaseException | None


class AsyncWriter:
    """Runs one job at a time in a thread.

    The thread is no daemon: the process exits only after the last save.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._results: deque[SaveResult] = deque()  # filled by the thread, emptied by the caller

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


if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BestWeights:
    """Weights of the best evaluation that are not on disk yet."""

    step: int
    loss: float
    weights: Mapping[str, Tensor]  # in host memory

    def write(self, checkpoints: Path) -> None:
        size = sum(tensor.nbytes for tensor in self.weights.values())
        write_best_weights(checkpoints, self.step, self.loss, partial(safetensors_chunks, self.weights), size)


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


def write_checkpoint(checkpoints: Path, step: int, files: Mapping[str, Callable[[], Chunks]], size: int) -> None:
    atomic_dir.write_atomic_dir(checkpoints, checkpoint_name(step), files, {}, expected=size)
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
