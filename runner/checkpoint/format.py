"""Format of a checkpoint on disk.

step-00000120/ model.safetensors      all tensors of the model, fp32 (adapters only under LoRA; tied tensors once)
               optimizer.safetensors  the optimizers' state by parameter name
               state.json             progress, loss scaler, random states, positions in the logs, facts about the run
               MANIFEST.json          sizes and checksums, written last (atomic_dir.py)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import TrainingError, UserError
from common.filesystem import Chunks
from common.limits import parse_json
from runner.checkpoint import atomic_dir

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINT_FORMAT = 3  # of state.json
CHECKPOINTS_DIR = "checkpoints"  # in a run directory
STATE_FILE = "state.json"
TENSOR_FILES = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
MAX_STATE_BYTES = 64 << 20
SAFETENSORS_DTYPES = {
    **{"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"},
    **{"torch.int64": "I64", "torch.int32": "I32", "torch.uint8": "U8", "torch.bool": "BOOL"},  # buffers
}

CheckpointTensors = dict[str, dict[str, "Tensor"]]  # file ("model", "optimizer") -> name -> tensor


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint, or of a folder of best weights."""
    return int(name.rpartition("-")[2])


def state_file(state: Mapping[str, Any]) -> dict[str, Chunks]:
    """Return the name and the content of state.json."""
    return {STATE_FILE: json.dumps({"format": CHECKPOINT_FORMAT, **state}, indent=1).encode()}


def tensor_files(tensors: CheckpointTensors) -> dict[str, Chunks]:
    """Return file name -> content. `tensors` are in host memory."""
    return {TENSOR_FILES[file]: safetensors_chunks(named) for file, named in tensors.items()}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of state.json.

    Raises OSError or ValueError if it is not as it was saved, UserError if another version of this program wrote it.
    """
    state = parse_json(atomic_dir.read_verified(checkpoint, STATE_FILE, MAX_STATE_BYTES))
    found = state.get("format") if isinstance(state, dict) else None
    if found != CHECKPOINT_FORMAT:
        raise UserError(
            f"the checkpoint has format {found}, this version reads format {CHECKPOINT_FORMAT} only",
            checkpoint,
            f"resume with the version that wrote it, or start a new run from its weights: init_from={checkpoint}",
        )
    return state


def read_newest_state(run_dir: Path) -> dict[str, Any] | None:
    """Return the newest state.json of a run that is as it was saved, or None.

    Other files of the checkpoint may be damaged: what is computed with its facts is compared with the checkpoint that
    is loaded later (`CheckpointManager.load_newest`).
    """
    checkpoints = run_dir / CHECKPOINTS_DIR
    for name in atomic_dir.step_names(checkpoints):
        try:
            return read_state(checkpoints / name)
        except UserError:
            raise
        except (OSError, ValueError):  # an incomplete checkpoint; the previous one will be loaded
            continue
    return None


def read_checkpoint_tensors(checkpoint: Path) -> CheckpointTensors:
    import safetensors.torch

    return {file: safetensors.torch.load_file(checkpoint / name) for file, name in TENSOR_FILES.items()}


def read_model_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the model in a checkpoint or a folder of best weights."""
    import safetensors.torch

    return safetensors.torch.load_file(folder / TENSOR_FILES["model"])


def safetensors_chunks(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return a safetensors file as its header and the memory of each tensor, without a copy.

    Raises TrainingError if a value is not finite: a fault of the memory may put a NaN into the weights of a healthy
    run.
    """
    import torch

    from models.formats.tensor_files import all_finite

    header: dict[str, Any] = {}
    chunks: list[bytes | memoryview] = []
    end = 0
    for name, tensor in sorted(tensors.items()):
        if not all_finite(name, tensor):
            raise TrainingError(
                f"{name} contains values that are not finite and was not saved; resume= continues from the previous checkpoint"
            )
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        chunks.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return [len(text).to_bytes(8, "little") + text, *chunks]
