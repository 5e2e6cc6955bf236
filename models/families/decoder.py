"""Settings of the decoder, and its config.json: the architectures Qwen3, Qwen3-MoE and Llama of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Self

from common.errors import UserError
from common.settings import CHANGES_ROUNDING, check_at_least, check_choice
from models.config import ModelConfig, check_required_values, register_model

if TYPE_CHECKING:
    import torch

ATTENTION_KERNELS = ("auto", "flash", "efficient", "math")
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")

# model_type -> transformers class, mixture of experts, query/key norm
ARCHITECTURES = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", True, True),
    "qwen3": ("Qwen3ForCausalLM", False, True),
    "llama": ("LlamaForCausalLM", False, False),
}

# Fields with the same name in DecoderConfig and config.json
SHARED_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta"),
)
SHARED_MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")

# Fields of config.json that must have this value or be absent: the decoder has no other variant
REQUIRED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@dataclass
class RopeScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): extends rotary position embeddings beyond the trained length."""

    factor: float  # extended length / trained length, at least 1
    original_max_position_embeddings: int  # trained length (tokens)
    beta_fast: float  # channels with more rotations than this over the trained length keep their frequency
    beta_slow: float  # frequencies of channels with fewer rotations than this are divided by factor
    attention_factor: float  # factor on cos and sin

    def __post_init__(self) -> None:
        check_at_least("model.rope_scaling.factor", self.factor, 1, 4)


@register_model("decoder")
@dataclass
class DecoderConfig(ModelConfig):
    """Decoder-only transformer, dense or mixture of experts."""

    hidden_size: int  # width of the residual stream (D)
    num_attention_heads: int  # query heads (N)
    num_key_value_heads: int  # key/value heads (K), a divisor of num_attention_heads
    head_dim: int  # width of a head (H), even
    intermediate_size: int  # width of a dense MLP
    rope_theta: float  # base of the rotary position embeddings
    rope_scaling: Optional[RopeScaling]  # YaRN; null: none
    rms_norm_eps: float  # added to the mean square in every norm
    qk_norm: bool  # normalize queries and keys, as Qwen3 does
    dropout: float  # probability, in [0, 1)
    num_experts: int  # experts per layer (E); 0: dense
    num_experts_per_tok: int  # experts that a token is routed to (k)
    moe_intermediate_size: int  # width of an expert
    norm_topk_prob: bool  # renormalize the k routing weights to sum to 1
    router_aux_loss_coef: float  # weight of the load-balancing loss
    attention: str = field(metadata=CHANGES_ROUNDING)  # kernel: auto, flash, efficient or math

    model_class = "models.decoder.Decoder"
    hf_model_types = tuple(ARCHITECTURES)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in SIZES:
            check_at_least(f"model.{key}", getattr(self, key), 1, 64)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"model.num_key_value_heads must divide model.num_attention_heads={self.num_attention_heads}, got {self.num_key_value_heads}",
                f"model.num_key_value_heads={self.num_key_value_heads}",
                f"e.g. model.num_key_value_heads={self.num_attention_heads}",
            )
        if self.head_dim % 2:  # rotary embeddings rotate pairs of channels
            raise UserError(f"model.head_dim must be even, got {self.head_dim}", f"model.head_dim={self.head_dim}", f"e.g. model.head_dim={self.head_dim + 1}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout must be in [0, 1), got {self.dropout}", f"model.dropout={self.dropout}", "e.g. model.dropout=0.1")
        check_choice("model.attention", self.attention, ATTENTION_KERNELS)
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UserError(
                f"model.num_experts_per_tok must be in [1, model.num_experts={self.num_experts}], got {self.num_experts_per_tok}",
                f"model.num_experts_per_tok={self.num_experts_per_tok}",
                "e.g. model.num_experts_per_tok=1",
            )
        if not self.qk_norm:
            raise UserError(
                "model.qk_norm=false is not supported with experts: transformers has no such architecture",
                "model.qk_norm=false",
                "set model.qk_norm=true, or model.num_experts=0",
            )
        if self.norm_topk_prob and self.num_experts_per_tok == 1:
            # A single renormalized weight is always 1, so the language-model loss has no gradient for the router.
            raise UserError(
                "model.norm_topk_prob=true needs model.num_experts_per_tok of at least 2: the router gets no gradient otherwise",
                "model.norm_topk_prob=true",
                "set model.norm_topk_prob=false, or model.num_experts_per_tok=2",
            )

    @property
    def has_dynamic_shapes(self) -> bool:
        return self.num_experts > 0  # the number of tokens of an expert

    def check_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse an attention kernel that PyTorch does not have; it would raise in the first step."""
        if self.attention == "efficient" and device.type == "cpu":
            raise UserError("model.attention=efficient needs a GPU", "model.attention=efficient", "use model.attention=flash or auto")
        if self.attention == "flash" and device.type == "cuda" and dtype.itemsize > 2:
            raise UserError(
                f"model.attention=flash on a GPU computes in 16 bits only, got {dtype}", "model.attention=flash", "precision=bf16, or model.attention=efficient"
            )

    def to_hf_config(self) -> dict[str, Any]:
        """For transformers 4 and 5, which have different names for the rotary settings and the dtype."""
        model_type = next(name for name, (_, moe, qk_norm) in ARCHITECTURES.items() if (moe, qk_norm) == (bool(self.num_experts), self.qk_norm))
        scaling = None if self.rope_scaling is None else {"rope_type": "yarn", **vars(self.rope_scaling)}
        return {
            "architectures": [ARCHITECTURES[model_type][0]],
            "model_type": model_type,
            **{field: getattr(self, field) for field in SHARED_FIELDS + (SHARED_MOE_FIELDS if self.num_experts else ())},
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta} | (scaling or {}),
            "attention_dropout": self.dropout,
            "torch_dtype": "float32",
            "dtype": "float32",
            **REQUIRED_VALUES,
        }

    @classmethod
    def from_hf_config(cls, raw: dict[str, Any], path: Path) -> Self:
        check_required_values(raw, REQUIRED_VALUES, path)
        _, has_experts, qk_norm = ARCHITECTURES[raw["model_type"]]
        rope = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        heads = raw["num_attention_heads"]
        return cls(
            family="decoder",
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
