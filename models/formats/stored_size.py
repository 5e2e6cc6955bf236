"""Size of the weights in safetensors files, read from their headers: compared with config.json before anything of that size is allocated."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.guarded_files import open_source_file
from common.limits.parsers import parse_json
from models.config import ModelConfig
from models.formats.json_files import MAX_BASE_MODELS, base_model_of, is_adapter_dir, model_dir

MAX_HEADER_BYTES = 16 << 20  # of a safetensors file; one of 10,000 tensors has 1 MB
MAX_WEIGHT_FILES = 1000  # of weights in a folder
SLACK_NUMBERS, SLACK_TENSORS = 16 << 20, 1000  # what config.json and weights may differ by without a limit: a model of 64 MB, which loading compares exactly
PREFIX_BYTES = 8  # before the header
HALF_BYTES = 2  # of a number in a .pth file of MiniMind
DAMAGED_HINT = "write or download the folder again"


@dataclass(frozen=True)
class StoredSize:
    numbers: int  # elements of all tensors
    tensors: int

    def __add__(self, other: StoredSize) -> StoredSize:
        return StoredSize(self.numbers + other.numbers, self.tensors + other.tensors)


def stored_size(files: Iterable[Path]) -> StoredSize:
    """Return what the headers of safetensors files declare. Raises UserError for a header that is damaged or beyond the limits."""
    files = list(files)
    if len(files) > MAX_WEIGHT_FILES:
        raise UserError(f"more than {MAX_WEIGHT_FILES:,} files of weights", str(files[0].parent), DAMAGED_HINT)
    total = StoredSize(0, 0)
    for path in files:
        header = _read_header(path)
        total += StoredSize(sum(math.prod(shape) for shape in header.values()), len(header))
    return total


def _read_header(path: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor. The library compares shapes, types and positions when it reads the tensors."""
    fd, size = open_source_file(path)
    with open(fd, "rb") as file:
        length = int.from_bytes(file.read(PREFIX_BYTES), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - PREFIX_BYTES):
            limit = f"at most {MAX_HEADER_BYTES:,} are read" if length > MAX_HEADER_BYTES else f"the file has {size:,}"
            raise _damaged(path, f"its header has {length:,} bytes, {limit}")
        text = file.read(length)
    try:
        header = {name: entry for name, entry in parse_json(text).items() if name != "__metadata__"}
        end = PREFIX_BYTES + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        shapes = {name: _shape(entry) for name, entry in header.items()}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _damaged(path, str(error)) from error
    if end != size:
        raise _damaged(path, f"it has {size:,} bytes, its header describes {end:,}")
    return shapes


def _shape(entry: Mapping[str, Any]) -> list[int]:
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"a shape is {str(shape)[:60]}")
    return shape


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"the file of weights is damaged: {what}", str(path), DAMAGED_HINT)


def check_size_of_weights(cfg: ModelConfig, source: Path) -> None:
    """Raise UserError if the weights of `source` have another order of size than the model `cfg`, before either is allocated.

    `source`: what `load_weights` reads. Loading compares the two exactly.
    """
    if (size := cfg.size()) is None:
        return
    if source.is_file():
        stored = StoredSize(source.stat().st_size // HALF_BYTES, size.tensors)
    else:
        folder = source
        for _ in range(MAX_BASE_MODELS):
            folder = model_dir(folder)
            if not is_adapter_dir(folder):
                break
            folder = base_model_of(folder)
        stored = stored_size(weight_files(folder))
    for expected, found, slack, unit in (
        (size.parameters, stored.numbers, SLACK_NUMBERS, "parameters"),
        (size.tensors, stored.tensors, SLACK_TENSORS, "tensors"),
    ):
        if max(expected, found) > 2 * min(expected, found) + slack:
            message = f"the weights do not fit the model: {found:,} {unit} are stored, the model has {expected:,}"
            raise UserError(message, str(source), "choose the model=... that these weights belong to, or correct config.json")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder."""
    return sorted(folder / name for name in os.listdir(folder) if name.startswith("model") and name.endswith(".safetensors"))
