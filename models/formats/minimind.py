"""FIXME models.formats.minimind."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError


def read_pth(path: Path) -> dict[str, Tensor]:
    """A MiniMind weights file: names as ours, half precision, the tied tensor twice."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError("this is no file of weights", str(path), f"give a MiniMind .pth file ({str(error).splitlines()[0]})") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UserError("this file holds more than weights", str(path), "give the weights file, not the one MiniMind resumes from")
    return {name: tensor.float() for name, tensor in state.items()}
