"""Are the weights in `model/` those of the checkpoint that they were exported from? Read without torch: the bytes of each tensor are compared."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from common.guarded_files import open_source_file
from common.limits.parsers import parse_json
from runner.checkpoint.best import find_best_weights
from runner.checkpoint.format import CHECKPOINTS_DIR, TENSOR_FILES

LENGTH_BYTES = 8  # before the header of a safetensors file


def compare_with_checkpoint(folder: Path, export: dict[str, Any], files: list[Path]) -> tuple[bool, str]:
    """Return (whether no tensor differs, what was compared). `export`: of run.json; `files`: the weights in `model/`, whose headers are right."""
    step = export.get("step")
    source = find_best_weights(folder / CHECKPOINTS_DIR, step) if isinstance(step, int) else None
    described = f"{export.get('weights')} weights of step {step}"
    if source is None:
        return True, f"{described}, which are in no checkpoint any more"
    saved = tensor_checksums(source / TENSOR_FILES["model"])
    exported = set[str]().union(*map(tensor_checksums, files))
    equal = len(saved & exported)
    if equal == 0:  # another type or layout
        return True, f"{described}, in another form than in {source.name}"
    return equal == len(saved), f"{described}: {equal} of {len(saved)} tensors are those of {source.name}"


def tensor_checksums(path: Path) -> set[str]:
    """Return the sha256 of the bytes of each tensor in a safetensors file."""
    fd, _ = open_source_file(path)
    with open(fd, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = parse_json(file.read(length))
        checksums = set()
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                file.seek(LENGTH_BYTES + length + start)
                checksums.add(hashlib.sha256(file.read(end - start)).hexdigest())
    return checksums
