"""Which files of a model folder have its weights, and their size, from the headers: compared with config.json before
anything of that size is allocated.
"""

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
from models.formats.json_files import MAX_BASE_MODELS, base_model_of, is_adapter_dir, model_dir, read_json_file

MAX_HEADER_BYTES = 16 << 20  # of a safetensors file; one of 10,000 tensors has 1 MB
MAX_WEIGHT_FILES = 1000  # of weights in a folder
# what config.json and weights may differ by without a limit: a model of 64 MB, which loading compares exactly
SLACK_NUMBERS, SLACK_TENSORS = 16 << 20, 1000
PREFIX_BYTES = 8  # before the header
HALF_BYTES = 2  # of a number in a file of torch, at least
DAMAGED_HINT = "write or download the folder again"
SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"  # names of the weights in one file
INDEX_SUFFIX = ".index.json"  # added to them: of the weights in several files


@dataclass(frozen=True)
class StoredSize:
    numbers: int  # elements of all tensors
    tensors: int

    def __add__(self, other: StoredSize) -> StoredSize:
        return StoredSize(self.numbers + other.numbers, self.tensors + other.tensors)


def stored_size(files: Iterable[Path]) -> StoredSize:
    """Return what the headers of safetensors files declare.

    Raises UserError for a header that is damaged or beyond the limits.
    """
    files = list(files)
    if len(files) > MAX_WEIGHT_FILES:
        raise UserError(f"more than {MAX_WEIGHT_FILES:,} files of weights", str(files[0].parent), DAMAGED_HINT)
    total = StoredSize(0, 0)
    for path in files:
        header = _read_header(path)
        total += StoredSize(sum(math.prod(shape) for shape in header.values()), len(header))
    return total


def _read_header(path: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor.

    The library compares shapes, types and positions when it reads the tensors.
    """
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
    """Raise UserError if the weights of `source` have another order of size than the model `cfg`, before either is
    allocated.

    `source`: what `load_weights` reads. Loading compares the two exactly.
    """
    if (size := cfg.size()) is None:
        return
    if source.is_file():
        stored = _size_of_torch_files([source], size.tensors)
    else:
        folder = source
        for _ in range(MAX_BASE_MODELS):
            folder = model_dir(folder)
            if not is_adapter_dir(folder):
                break
            folder = base_model_of(folder)
        files = weight_files(folder)
        stored = (
            stored_size(files)
            if not files or files[0].suffix == ".safetensors"
            else _size_of_torch_files(files, size.tensors)
        )
    for expected, found, slack, unit in (
        (size.parameters, stored.numbers, SLACK_NUMBERS, "parameters"),
        (size.tensors, stored.tensors, SLACK_TENSORS, "tensors"),
    ):
        if max(expected, found) > 2 * min(expected, found) + slack:
            message = f"the weights do not fit the model: {found:,} {unit} are stored, the model has {expected:,}"
            raise UserError(
                message, str(source), "choose the model=... that these weights belong to, or correct config.json"
            )


def _size_of_torch_files(files: Iterable[Path], tensors: int) -> StoredSize:
    """Return the most numbers that files of torch can have; their headers are pickles and are not read before."""
    return StoredSize(sum(path.stat().st_size for path in files) // HALF_BYTES, tensors)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights of a model folder, [] if there are none: as transformers chooses them, safetensors
    before files of torch.

    Without an index all model*.safetensors. Raises UserError for an index that is damaged or names a file that does not
    exist.
    """
    names = set(os.listdir(folder))
    for name in (SAFETENSORS, TORCH):
        if name in names:
            return [folder / name]
        if name + INDEX_SUFFIX in names:
            shards = read_index(folder / (name + INDEX_SUFFIX))
            if missing := sorted(shards - names):
                raise UserError(
                    f"{len(missing)} of {len(shards)} files of weights are missing, e.g. {missing[0]}",
                    str(folder),
                    "download the folder again",
                )
            return sorted(folder / shard for shard in shards)
        if name == SAFETENSORS and (
            found := [each for each in names if each.startswith("model") and each.endswith(".safetensors")]
        ):
            return sorted(folder / each for each in found)
    return []


def read_index(path: Path) -> set[str]:
    """Return the names of the files in an index of weights. Raises UserError for a name that is a path."""
    shards = read_json_file(path).get("weight_map")
    if not isinstance(shards, dict) or not all(
        isinstance(name, str) and name and name == os.path.basename(name) for name in shards.values()
    ):
        raise UserError(
            "weight_map must give the name of a file in this folder for each tensor", str(path), DAMAGED_HINT
        )
    return set(shards.values())
