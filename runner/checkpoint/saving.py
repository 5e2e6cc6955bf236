"""What a save of a run writes: copies of its tensors in host memory, then, on the writer thread, a checkpoint or the best weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.filesystem import Chunks
from runner.checkpoint import atomic_dir
from runner.checkpoint.best import write_best_weights
from runner.checkpoint.format import checkpoint_name, safetensors_chunks
from runner.checkpoint.retention import RetentionPolicy, prune_checkpoints, save_freeing_space

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
    """Return copies in host memory, {} unless `keep`. Sharded tensors are gathered one at a time, to limit device memory."""
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


def save_and_prune(checkpoints: Path, write: Callable[[], None], retention: RetentionPolicy, warn: Callable[[str], None]) -> None:
    """Runs on the writer thread. Older checkpoints are deleted once the new one is on disk; before that, only if the disk is full."""
    save_freeing_space(write, checkpoints, retention, warn)
    try:
        prune_checkpoints(checkpoints, retention)
    except OSError as error:
        warn(f"older checkpoints could not be deleted: {error}")
