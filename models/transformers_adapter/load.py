"""Weights of a folder of transformers, under the names of its model class."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.errors import UserError
from common.guarded_files import check_source_file
from models.families.transformers import TransformersConfig, create_hf_config
from models.language_model import LanguageModel
from models.transformers_adapter.attention import register_attention
from models.transformers_adapter.model import TransformersModel

MAX_LISTED = 6  # tensors that an error names of each kind


def load_transformers_weights(folder: Path, cfg: TransformersConfig) -> dict[str, Tensor]:
    """Return the fp32 weights in `folder`: safetensors, or files of torch, which are read without executing anything (weights_only=True).

    Raises UserError if a tensor of the model is missing, if the folder has one that the model does not have, or one of another shape.
    """
    register_attention()
    for path in folder.iterdir():
        check_source_file(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=create_hf_config(cfg.config, str(folder)),
            dtype=torch.float32,
            trust_remote_code=False,
            local_files_only=True,
            weights_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"transformers cannot load the weights: {str(error).splitlines()[0]}", str(folder), "download the folder again") from error
    model, report = loaded
    problems = [f"{kind.replace('_', ' ')}: {', '.join(map(str, list(report[kind])[:MAX_LISTED]))}" for kind in report if report[kind]]
    if problems:
        raise UserError("the weights do not fit config.json: " + "; ".join(problems), str(folder), "download the folder again, or choose another")
    state: dict[str, Tensor] = model.state_dict()
    return state


def save_transformers_weights(folder: Path, model: LanguageModel, state: dict[str, Tensor], shard_size: str) -> None:
    """Write the tensors of `state` as model*.safetensors of at most `shard_size`, under the names that published folders of this class have."""
    assert isinstance(model, TransformersModel)
    with TemporaryDirectory(dir=folder) as temporary:
        model.hf.save_pretrained(temporary, state_dict=state, max_shard_size=shard_size)
        for path in Path(temporary).glob("model*.safetensors*"):
            path.rename(folder / path.name)
