"""FIXME runner.checkpoint.format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.errors import TrainingError
from common.filesystem import Chunks

FileContents = dict[str, Callable[[], Chunks]]

CHECKPOINT_FORMAT = 1  # of state.json
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # as safetensors names them


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def safetensors_chunks(tensors: dict[str, Tensor]) -> list[bytes | memoryview]:
    """A safetensors file (https://huggingface.co/docs/safetensors) as its header and the memory of each tensor: nothing is copied.

    Also on the writer thread. No NaN is ever committed, however it came into the memory of a healthy run.
    """
    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    end = 0
    for name, tensor in sorted(tensors.items()):
        if not all_finite(tensor):
            raise TrainingError(f"{name} is no longer finite and was not saved; resume= continues from the checkpoint before")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": SAFETENSORS_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        parts.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return [len(text).to_bytes(8, "little") + text, *parts]


def total_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def describe_shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "x".join(map(str, tensor.shape))


def all_finite(tensor: Tensor) -> bool:
    low, high = tensor.aminmax()  # a NaN anywhere comes out as both; isfinite() takes longer than writing the file
    return math.isfinite(low.item() + high.item())
