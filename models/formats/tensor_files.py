"""Read and write the safetensors files of a model folder."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from common.errors import UserError
from common.guarded_files import check_source_file


def read_tensors(path: Path) -> dict[str, Tensor]:
    check_source_file(path)
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f"the file of weights is missing or damaged: {error}", str(path), "write or download the folder again") from error


def write_tensors(path: Path, state: dict[str, Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
