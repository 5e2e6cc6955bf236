"""Names and shapes of tensors in model folders whose architecture differs in them from the decoder: Mixtral and Phi-3.

The decoder has `mlp.experts.<e>.gate_proj` where Mixtral has `block_sparse_moe.experts.<e>.w1`, and q_proj, k_proj, v_proj, gate_proj and
up_proj where Phi-3 has qkv_proj and gate_up_proj.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from common.errors import UserError
from models.config import ModelConfig
from models.families.decoder import DecoderConfig

DERIVED_TENSORS = ".rotary_emb.inv_freq"  # in old Llama files; computed from the settings
MIXTRAL_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
PHI3_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # weights of Phi-3, as rows of one
MIXTRAL_NAME = re.compile(r"\.block_sparse_moe\.(gate|experts\.\d+\.(w[123]))\.weight$")
DECODER_NAME = re.compile(r"\.mlp\.(gate|experts\.\d+\.(gate_proj|up_proj|down_proj))\.weight$")


def to_decoder_names(state: dict[str, Tensor], model_type: str, cfg: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a folder with config.json's `model_type` under the decoder's names."""
    state = {name: tensor for name, tensor in state.items() if not name.endswith(DERIVED_TENSORS)}
    if model_type == "mixtral":
        return {MIXTRAL_NAME.sub(_decoder_name, name): tensor for name, tensor in state.items()}
    if model_type == "phi3":
        assert isinstance(cfg, DecoderConfig)
        return {name: tensor for fused, weight in state.items() for name, tensor in _split(fused, weight, cfg).items()}
    return state


def to_folder_names(state: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Return the decoder's tensors under the names of `model_type`."""
    if model_type == "phi3":
        return _fused(state)
    if model_type != "mixtral":
        return state
    return {DECODER_NAME.sub(_mixtral_name, name): tensor for name, tensor in state.items()}


def _decoder_name(match: re.Match[str]) -> str:
    module, matrix = match[1], match[2]
    return f".mlp.{module if matrix is None else module.removesuffix(matrix) + MIXTRAL_EXPERTS[matrix]}.weight"


def _mixtral_name(match: re.Match[str]) -> str:
    module, linear = match[1], match[2]
    names = {name: matrix for matrix, name in MIXTRAL_EXPERTS.items()}
    return f".block_sparse_moe.{module if linear is None else module.removesuffix(linear) + names[linear]}.weight"


def _fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the fused weights of Phi-3, each at the place of its first part."""
    parts = {part: (fused, fused_parts) for fused, fused_parts in PHI3_FUSED.items() for part in fused_parts}
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        part = next((part for part in parts if f".{part}." in name), None)
        if part is None:
            tensors[name] = tensor
            continue
        fused, fused_parts = parts[part]
        if part == fused_parts[0]:
            tensors[name.replace(part, fused)] = torch.cat([state[name.replace(part, other)] for other in fused_parts])
    return tensors


def _split(name: str, weight: Tensor, cfg: DecoderConfig) -> dict[str, Tensor]:
    """Split a fused weight of Phi-3; return {name: weight} of any other."""
    queries, keys = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    sizes = {"qkv_proj": (queries, keys, keys), "gate_up_proj": (cfg.intermediate_size, cfg.intermediate_size)}
    for fused, parts in PHI3_FUSED.items():
        if f".{fused}." in name:
            rows = dict(zip(parts, sizes[fused], strict=True))
            if len(weight) != sum(rows.values()):
                raise UserError(
                    f"the weights do not fit config.json: {name} has {len(weight)} rows, expected {sum(rows.values())}", name, "correct config.json"
                )
            return {name.replace(fused, part): piece for part, piece in zip(rows, weight.split(list(rows.values())), strict=True)}
    return {name: weight}
