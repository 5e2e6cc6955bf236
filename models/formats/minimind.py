"""Weights of MiniMind (.pth)."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError


def read_pth(path: Path) -> dict[str, Tensor]:
    """Return fp32 weights. The file holds half precision under the decoder's parameter names, tied weights twice."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"not a file of weights: {str(error).splitlines()[0]}", str(path), "give a MiniMind .pth file of weights") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UserError("the file holds more than weights", str(path), "give MiniMind's file of weights, not its resume file")
    return {name: tensor.float() for name, tensor in state.items()}
