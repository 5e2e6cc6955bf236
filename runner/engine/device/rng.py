"""Global random states of Python, NumPy and torch: seed, save, restore."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # all devices


def get_rng_state() -> dict[str, Any]:
    """Return the states as JSON values."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": [_to_hex(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        **({"mps": _to_hex(torch.mps.get_rng_state())} if torch.backends.mps.is_available() else {}),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_from_hex(state["torch"]))
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_from_hex(device) for device in state["cuda"]])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(_from_hex(state["mps"]))


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
