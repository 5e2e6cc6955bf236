"""Read and write the safetensors files of a model folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from common.errors import UserError
from common.guarded_files import check_source_file

OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")  # in the messages of safetensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    check_source_file(path)
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f"the file of weights is missing or damaged: {error}", str(path), "write or download the folder again") from error


def write_tensors(path: Path, state: dict[str, Tensor]) -> None:
    """Write a new file with the permissions of any other: safetensors creates files that only their owner can read.

    Raises OSError, e.g. on a full disk.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if number := OS_ERROR.search(str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
    path.chmod(mode)
