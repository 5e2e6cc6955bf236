"""config.json of the decoder: the architectures Qwen3, Qwen3-MoE and Llama of transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common.errors import UserError
from models.config import ModelConfig, RopeScaling
from models.formats.files import check_required_values

# model_type -> transformers class, mixture of experts, query/key norm
ARCHITECTURES = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", True, True),
    "qwen3": ("Qwen3ForCausalLM", False, True),
    "llama": ("LlamaForCausalLM", False, False),
}

# Fields with the same name in ModelConfig and config.json
SHARED_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta"),
)
SHARED_MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")

# Fields of config.json that must have this value or be absent: the decoder has no other variant.
REQUIRED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def to_hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """Return config.json for transformers 4 and 5, which have different names for the rotary settings and the dtype."""
    model_type = next(name for name, (_, moe, qk_norm) in ARCHITECTURES.items() if (moe, qk_norm) == (bool(cfg.num_experts), cfg.qk_norm))
    scaling = None if cfg.rope_scaling is None else {"rope_type": "yarn", **vars(cfg.rope_scaling)}
    return {
        "architectures": [ARCHITECTURES[model_type][0]],
        "model_type": model_type,
        **{field: getattr(cfg, field) for field in SHARED_FIELDS + (SHARED_MOE_FIELDS if cfg.num_experts else ())},
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta} | (scaling or {}),
        "attention_dropout": cfg.dropout,
        "torch_dtype": "float32",
        "dtype": "float32",
        **REQUIRED_VALUES,
    }


def from_hf_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """Raises UserError for a variant that the decoder does not have; KeyError or TypeError for a field that is missing or of another type."""
    check_required_values(raw, REQUIRED_VALUES, path)
    _, has_experts, qk_norm = ARCHITECTURES[raw["model_type"]]
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    heads = raw["num_attention_heads"]
    return ModelConfig(
        name=path.parent.name,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        intermediate_size=raw["intermediate_size"],
        max_position_embeddings=raw["max_position_embeddings"],
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_rope_scaling(rope, raw["max_position_embeddings"], path),
        rms_norm_eps=raw["rms_norm_eps"],
        qk_norm=qk_norm,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        dropout=raw.get("attention_dropout", 0.0),
        attention="auto",
        num_experts=(raw.get("num_experts") or raw["num_local_experts"]) if has_experts else 0,
        num_experts_per_tok=raw["num_experts_per_tok"] if has_experts else 1,
        moe_intermediate_size=raw["moe_intermediate_size"] if has_experts else 0,
        norm_topk_prob=raw["norm_topk_prob"] if has_experts else False,
        router_aux_loss_coef=raw.get("router_aux_loss_coef", 0.001) if has_experts else 0.0,
    )


def _rope_scaling(rope: dict[str, Any], max_positions: int, path: Path) -> RopeScaling | None:
    """Absent fields get the defaults of transformers."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    rotates_all_channels = rope.get("partial_rotary_factor", 1.0) == 1.0
    if kind == "default" and rotates_all_channels:
        return None
    if kind != "yarn" or not rotates_all_channels or rope.get("mscale") or rope.get("mscale_all_dim") or rope.get("truncate") is False:
        raise UserError(
            f"rotary position embeddings of type {kind} with these fields are not supported",
            str(path),
            "supported: rope_type default and yarn, partial_rotary_factor 1, no mscale, no mscale_all_dim, no truncate=false",
        )
    return RopeScaling(
        factor=rope["factor"],
        original_max_position_embeddings=rope.get("original_max_position_embeddings") or max_positions,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        attention_factor=rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1.0,
    )
