"""Global random states of Python, NumPy and torch: seed, save, restore; kernels of a GPU that repeat their bits."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic
from torch import Tensor


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # all devices


def use_deterministic_kernels(is_deterministic: bool) -> None:
    """Let a GPU compute the same bits each time: a resumed run is then bitwise equal to one that was not stopped.

    An operator without such a kernel raises an error that `is_varying_kernel` recognises. torch's attention chooses
    deterministic kernels only if it may raise (`warn_only=False`).
    """
    mark_products_deterministic()
    # a pass over every new tensor, which no result needs
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch's stubs lack it
    torch.use_deterministic_algorithms(is_deterministic)


def mark_products_deterministic() -> None:
    """Let torch take matrix products on a GPU for deterministic, as they are: it gives cuBLAS a workspace for each stream (https://docs.nvidia.com/cuda/cublas/#results-reproducibility).

    It asks for an environment variable, once. While that is set every product parses it: 95 us of the host instead of
    24 (H100, torch 2.11), 12 ms of a step of `minimind_64m`.
    """
    if "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    try:
        one = torch.ones(1, 1, device="cuda")
        one @ one
    finally:
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]


@contextmanager
def allow_varying_kernels() -> Iterator[None]:
    """Compute the block without deterministic kernels: top-p sampling adds up probabilities, for which there is none."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def is_varying_kernel(error: BaseException) -> bool:
    """Return whether an operator without a deterministic kernel has raised `error`."""
    return isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error)


def get_rng_state() -> dict[str, Any]:
    """Return the states as JSON values."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "torch": _to_hex(torch.get_rng_state()),
        # of this process's GPU: on resume others may be visible
        "cuda": [_to_hex(torch.cuda.get_rng_state())] if torch.cuda.is_available() else [],
        **({"mps": _to_hex(torch.mps.get_rng_state())} if torch.backends.mps.is_available() else {}),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_from_hex(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"][0]))
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(_from_hex(state["mps"]))


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
