"""Which files of a model folder have its weights, and their size, from the headers: compared with config.json before
anything of that size is allocated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from common.errors import UserError
from common.guarded_files import DOWNLOAD_HINT, LFS_POINTER, check_pointer, open_source_file
from models.config import ModelConfig, ModelSize
from models.formats.json_files import base_model_dir, read_json_file

MAX_HEADER_BYTES = 16 << 20  # of a safetensors file; one of 10,000 tensors has 1 MB
MAX_WEIGHT_FILES = 1000  # of weights in a folder
# what config.json and weights may differ by without a limit: a model of 64 MB, which loading compares exactly
SLACK_NUMBERS, SLACK_TENSORS = 16 << 20, 1000
PREFIX_BYTES = 8  # before the header
HALF_BYTES = 2  # of a number in a file of torch, at least
SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"  # names of the weights in one file
INDEX_SUFFIX = ".index.json"  # added to them: of the weights in several files


def stored_size(files: Sequence[Path]) -> ModelSize:
    """Return what the headers of safetensors files declare.

    Raises UserError for a header that is damaged or beyond the limits.
    """
    if len(files) > MAX_WEIGHT_FILES:
        raise UserError(f"more than {MAX_WEIGHT_FILES:,} files of weights", files[0].parent, DOWNLOAD_HINT)
    shapes = [shape for path in files for shape in _read_shapes(path)]
    return ModelSize(sum(map(math.prod, shapes)), len(shapes))


def _read_shapes(path: Path) -> list[list[int]]:
    """Return the shape of each tensor in a safetensors file, whose header has a limit and describes the whole file."""
    fd, size = open_source_file(path)
    with open(fd, "rb") as file:
        beginning = file.read(len(LFS_POINTER))
    check_pointer(path, beginning)
    length = int.from_bytes(beginning[:PREFIX_BYTES], "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - PREFIX_BYTES):
        limit = f"at most {MAX_HEADER_BYTES:,} are read" if length > MAX_HEADER_BYTES else f"the file has {size:,}"
        raise _damaged(path, f"its header has {length:,} bytes, {limit}")
    try:
        with safe_open(path, "np") as header:
            return [header.get_slice(name).get_shape() for name in header.keys()]  # noqa: SIM118  safe_open cannot be iterated
    except SafetensorError as error:
        raise _damaged(path, f"{error}; the file has {size:,} bytes") from error


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"the file of weights is damaged: {what}", path, DOWNLOAD_HINT)


def check_size_of_weights(cfg: ModelConfig, source: Path) -> None:
    """Raise UserError if the weights of `source` have another order of size than the model `cfg`, before either is
    allocated.

    `source`: what `load_weights` reads. Loading compares the two exactly.
    """
    if (size := cfg.size()) is None:
        return
    folder = source if source.is_file() else base_model_dir(source)
    files = [source] if source.is_file() else weight_files(folder)
    if files and files[0].suffix != ".safetensors":  # the headers of files of torch are pickles: the most they can have
        stored = ModelSize(sum(path.stat().st_size for path in files) // HALF_BYTES, size.tensors)
    else:
        stored = stored_size(files)
    for expected, found, slack, unit in (
        (size.parameters, stored.parameters, SLACK_NUMBERS, "parameters"),
        (size.tensors, stored.tensors, SLACK_TENSORS, "tensors"),
    ):
        if max(expected, found) > 2 * min(expected, found) + slack:
            message = f"the weights do not fit the model: {found:,} {unit} are stored, the model has {expected:,}"
            raise UserError(
                message, source, "choose the model=... that these weights belong to, or correct config.json"
            )


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
                    folder,
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
        raise UserError("weight_map must give the name of a file in this folder for each tensor", path, DOWNLOAD_HINT)
    return set(shards.values())
