"""Read and write the files of a model folder: JSON and safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from common.errors import UserError


def read_json_file(path: Path) -> dict[str, Any]:
    """Raises UserError if the file is not a JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"not a JSON file: {error}", str(path), "write or download the folder again") from error
    if not isinstance(raw, dict):
        raise UserError(f"expected a JSON object, got {type(raw).__name__}", str(path), "write or download the folder again")
    return raw


def write_json_file(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def reporting_missing_fields(path: Path) -> Iterator[None]:
    """Turn the KeyError or TypeError of a missing or mistyped field into a UserError that names the file."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise UserError(f"a field is missing or has another type: {error}", str(path), "correct the file, or write or download the folder again") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f"the file of weights is missing or damaged: {error}", str(path), "write or download the folder again") from error


def write_tensors(path: Path, state: dict[str, Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
