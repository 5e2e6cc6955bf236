"""Weights of a model of transformers: from the names in published folders to those of its class, and back."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.errors import UserError
from models.families.transformers import TransformersConfig, create_hf_config
from models.language_model import LanguageModel
from models.transformers_adapter.attention import register_attention
from models.transformers_adapter.model import TransformersModel

MAX_LISTED_TENSORS = 6  # tensors that an error names of each kind
DOWNLOAD_AGAIN = "download the folder again"
REPORTED = {  # by field of the report of transformers
    "missing_keys": "missing",
    "unexpected_keys": "not known to the model",
    "mismatched_keys": "of another shape",
    "conversion_errors": "not converted",
    "error_msgs": "errors",
}


def to_transformers_names(stored: dict[str, Tensor], cfg: TransformersConfig, where: str) -> dict[str, Tensor]:
    """Return the tensors of a model folder as fp32 weights under the names of its class: transformers renames, merges
    and splits those of some families.

    Raises UserError, about the folder `where`, if a tensor of the model is missing, is stored with another shape, or is
    not known to the class.
    """
    register_attention()
    hf_config = create_hf_config(cfg.config, where)
    with torch.device("meta"):
        meta: Any = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
    cls: Any = type(meta)
    own = meta.state_dict()
    # transformers would cast integers to weights; those that its class does not read, as masks in old files, are no
    # fault
    integers = [
        name
        for name, tensor in stored.items()
        if not tensor.is_floating_point() and (name not in own or own[name].is_floating_point())
    ]
    stored = {name: tensor for name, tensor in stored.items() if name not in integers}
    try:
        model, report = cls.from_pretrained(
            None,
            config=hf_config,
            state_dict=stored,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # of the conversion of foreign tensors
    except (OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        raise UserError(
            f"transformers cannot load the weights: {(str(error) or type(error).__name__).splitlines()[0]}",
            where,
            DOWNLOAD_AGAIN,
        ) from error
    problems = [line for kind, text in REPORTED.items() if (line := _list_tensors(text, report.get(kind)))]
    if integers and (problems or any(name in own for name in integers)):
        problems.append(_list_tensors("of an integer type", integers))
    if problems:
        raise UserError(
            "the weights do not fit config.json: " + "; ".join(problems),
            where,
            f"{DOWNLOAD_AGAIN}; or choose the folder of a causal language model",
        )
    state: dict[str, Tensor] = model.state_dict()
    return state


def _list_tensors(kind: str, names: Any) -> str:
    """Return how many tensors there are of a kind, and the first ones; "" for none."""
    listed = sorted(" ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in names or ())
    return (
        f"{len(listed)} {kind} ({', '.join(listed[:MAX_LISTED_TENSORS])}{', ...' * (len(listed) > MAX_LISTED_TENSORS)})"
        if listed
        else ""
    )


def save_transformers_weights(folder: Path, model: LanguageModel, state: dict[str, Tensor], shard_size: str) -> None:
    """Write the tensors of `state` as model*.safetensors of at most `shard_size`, under the names that published
    folders of this class have.
    """
    assert isinstance(model, TransformersModel)
    with TemporaryDirectory(dir=folder) as temporary:
        model.hf.save_pretrained(temporary, state_dict=state, max_shard_size=shard_size)
        for path in Path(temporary).glob("model*.safetensors*"):
            path.rename(folder / path.name)
