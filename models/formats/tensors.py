"""FIXME models.formats.tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from common.errors import UserError

HEAD_KEY, EMBEDDING_KEY = "lm_head.weight", "model.embed_tokens.weight"
PEFT_PREFIX = "base_model.model."
TABLE_ROWS = 6  # of each fault


def tensor_table(faults: dict[str, list[str]]) -> str:
    lines = ["the weights are not those of this model:"]
    for fault, names in faults.items():
        lines += [f"  {len(names)} {fault}"] if names else []
        lines += [f"    {name}" for name in names[:TABLE_ROWS]]
        lines += ["    ..."] if len(names) > TABLE_ROWS else []
    return "\n".join(lines)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError("this file of weights is missing or damaged", str(path), f"write or download it again ({error})") from error


def write_tensors(path: Path, state: dict[str, Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})


def write_json_file(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
