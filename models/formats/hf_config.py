"""config.json of a Hugging Face folder <-> ModelConfig."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import UserError
from models.config import ModelConfig, RopeScaling

# (mixture of experts, query/key norm) -> the transformers class of the same mathematics, and its model_type
SUPPORTED_ARCHITECTURES = {
    (True, True): ("Qwen3MoeForCausalLM", "qwen3_moe"),
    (False, True): ("Qwen3ForCausalLM", "qwen3"),
    (False, False): ("LlamaForCausalLM", "llama"),
}

# Fields of the same name in our ModelConfig and in config.json
SHARED_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta"),
)
SHARED_MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")

# Fields that must have one value, or be absent: with another one the folder describes a model that ours is not.
REQUIRED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def to_hf_config(cfg: ModelConfig, control: dict[str, int]) -> dict[str, Any]:
    """config.json for transformers 4 and 5, which read the rotary settings and the type under different names."""
    architecture = SUPPORTED_ARCHITECTURES.get((bool(cfg.num_experts), cfg.qk_norm))
    if architecture is None:
        raise UserError(
            "transformers knows no mixture of experts without query/key norm", "model.qk_norm=false", "set model.qk_norm=true or model.num_experts=0"
        )
    scaling = None if cfg.rope_scaling is None else {"rope_type": "yarn", **vars(cfg.rope_scaling)}
    return {
        "architectures": [architecture[0]],
        "model_type": architecture[1],
        **{word: getattr(cfg, word) for word in SHARED_FIELDS + (SHARED_MOE_FIELDS if cfg.num_experts else ())},
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta} | (scaling or {}),
        "attention_dropout": cfg.dropout,
        "torch_dtype": "float32",
        "dtype": "float32",
        **REQUIRED_VALUES,
        **control,
    }


def read_hf_config(folder: Path) -> ModelConfig:
    """Raises ValueError(what, where, fix) where the folder holds no model, or one that ours is not."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError("there is no model here", str(path), "give the folder of a finished run, a Hugging Face folder or a PEFT folder")
    raw = read_json_file(path)
    with complete_config(path):
        return _model_config(raw, path)


def read_json_file(path: Path) -> dict[str, Any]:
    """Raises ValueError(what, where, fix) where the file holds no JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError("this file is not JSON", str(path), f"write the folder again ({error})") from error
    if not isinstance(raw, dict):
        raise UserError("this file holds no fields", str(path), "write the folder again")
    return raw


@contextmanager
def complete_config(path: Path) -> Iterator[None]:
    """Turns a field that is missing or of another type into a refusal that names the file."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise UserError(
            f"a field is missing or of another type than it should be: {error}", str(path), "correct the file, or write the folder again"
        ) from error


def _model_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    kinds = {kind: (experts, norm) for (experts, norm), (_, kind) in SUPPORTED_ARCHITECTURES.items()}
    if raw["model_type"] not in kinds:
        raise UserError(f"a model of type {raw['model_type']} is not one of ours", str(path), f"choose one of {', '.join(kinds)}")
    check_required(raw, REQUIRED_VALUES, path)
    has_experts, qk_norm = kinds[raw["model_type"]]
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    heads = raw["num_attention_heads"]
    return ModelConfig(
        name=path.parent.name,
        **{
            word: raw[word]
            for word in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
        },
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_read_scaling(rope, raw["max_position_embeddings"], path),
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


def _read_scaling(rope: dict[str, Any], positions: int, path: Path) -> RopeScaling | None:
    """Absent fields mean what transformers takes them to mean."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    if kind == "default" and whole:
        return None
    if kind != "yarn" or not whole or rope.get("mscale") or rope.get("mscale_all_dim") or rope.get("truncate") is False:
        raise UserError(
            f"rotary positions of type {kind}, as set here, are not ours", str(path), "only plain rotary positions over the whole head, and YaRN, are supported"
        )
    return RopeScaling(
        factor=rope["factor"],
        original_max_position_embeddings=rope.get("original_max_position_embeddings") or positions,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        attention_factor=rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1.0,
    )


def check_required(raw: dict[str, Any], must: dict[str, Any], path: Path) -> None:
    """Raises ValueError(what, where, fix) for a field that has another value than it must have."""
    for word, value in must.items():
        if (raw.get(word) or value) != value:  # null, {} and [] say the same as absent
            raise UserError(f"{word}={raw[word]} is not supported", str(path), f"only {word}={value} is")
