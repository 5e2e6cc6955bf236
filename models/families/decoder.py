"""Settings of the decoder: the Llama, Qwen and Mixtral architectures of transformers. hf_config.py reads and writes
their config.json.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Self

from common.errors import UserError
from common.settings import (
    CHANGES_ROUNDING,
    IGNORED,
    CheckedSettings,
    at_least,
    check_at_least,
    one_of,
    settings_class,
    within,
)
from models.config import ModelConfig, ModelSize, UnsupportedVariantError, register_model
from models.families.hf_config import FAMILIES, SCALING_FIELDS, architecture_of, read_hf_config, write_hf_config

if TYPE_CHECKING:
    import torch

# that a class of transformers may lack
CLASS_SETTINGS = ("qk_norm", "attention_bias", "attention_out_bias", "mlp_bias", "num_experts")


@settings_class
class RopeScaling(CheckedSettings):
    """Extension of rotary position embeddings beyond the trained length: YaRN (https://arxiv.org/abs/2309.00071), that
    of Llama 3.1, or linear (https://arxiv.org/abs/2306.15595).
    """

    SECTION = "model.rope_scaling"

    factor: float = at_least(1, 4)  # extended length / trained length
    original_max_position_embeddings: int = 0  # trained length (tokens); yarn, llama3
    beta_fast: float = 32.0  # channels with more rotations than this over the trained length keep their frequency; yarn
    beta_slow: float = 1.0  # frequencies of channels with fewer rotations than this are divided by factor; yarn
    attention_factor: float = 1.0  # factor on cos and sin; yarn
    # yarn, llama3, or linear: every frequency is divided by factor
    type: str = one_of("yarn", "llama3", "linear", default="yarn")
    low_freq_factor: float = 1.0  # frequencies of channels with fewer rotations than this are divided by factor; llama3
    # channels with more rotations than this over the trained length keep their frequency; llama3
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type != "linear":
            check_at_least(
                "model.rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings, 1, 2048
            )


@register_model("decoder")
@settings_class
class DecoderConfig(ModelConfig):
    """Decoder-only transformer, dense or mixture of experts."""

    hidden_size: int = at_least(1, 64)  # width of the residual stream (D)
    num_attention_heads: int = at_least(1, 64)  # query heads (N)
    num_key_value_heads: int = at_least(1, 64)  # key/value heads (K), a divisor of num_attention_heads
    head_dim: int = at_least(1, 64)  # width of a head (H), even
    intermediate_size: int = at_least(1, 64)  # width of a dense MLP
    rope_theta: float = within("(0, inf)", 1e6, "a positive number")  # base of the rotary position embeddings
    rope_scaling: Optional[RopeScaling]  # null: none
    rms_norm_eps: float = at_least(0, 1e-6)  # added to the mean square in every norm
    qk_norm: bool  # normalize queries and keys, as Qwen3 does
    attention_bias: bool  # query, key and value projections have biases, as in Qwen2
    attention_out_bias: bool  # the output projection of attention has one
    mlp_bias: bool  # the projections of a dense MLP have biases
    dropout: float = within("[0, 1)", 0.1)  # probability
    num_experts: int = at_least(0, 4)  # experts per layer (E); 0: dense
    num_experts_per_tok: int  # experts that a token is routed to (k)
    moe_intermediate_size: int  # width of an expert
    norm_topk_prob: bool  # renormalize the k routing weights to sum to 1
    router_aux_loss_coef: float = at_least(0, 0.001)  # weight of the load-balancing loss
    # kernel: auto, flash, efficient or math
    attention: str = one_of("auto", "flash", "efficient", "math", resume=CHANGES_ROUNDING)
    # class that the model is written as, e.g. phi3; null: the first that computes the same
    model_type: Optional[str] = one_of(*FAMILIES, default=None, resume=IGNORED)

    model_class = "models.decoder.Decoder"
    hf_model_types = tuple(FAMILIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"model.num_key_value_heads must divide model.num_attention_heads={self.num_attention_heads}, got {self.num_key_value_heads}",
                f"model.num_key_value_heads={self.num_key_value_heads}",
                f"e.g. model.num_key_value_heads={self.num_attention_heads}",
            )
        if self.head_dim % 2:  # rotary embeddings rotate pairs of channels
            raise UserError(
                f"model.head_dim must be even, got {self.head_dim}",
                f"model.head_dim={self.head_dim}",
                f"e.g. model.head_dim={self.head_dim + 1}",
            )
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UserError(
                f"model.num_experts_per_tok must be in [1, model.num_experts={self.num_experts}], got {self.num_experts_per_tok}",
                f"model.num_experts_per_tok={self.num_experts_per_tok}",
                "e.g. model.num_experts_per_tok=1",
            )
        if self.num_experts:
            check_at_least("model.moe_intermediate_size", self.moe_intermediate_size, 1, self.intermediate_size)
        if architecture_of(dataclasses.asdict(self)) is None:
            raise UserError(
                "no transformers architecture has this combination of model.qk_norm, biases, experts and model.norm_topk_prob",
                f"model.qk_norm={self.qk_norm} model.mlp_bias={self.mlp_bias} model.num_experts={self.num_experts}",
                "experts without biases: model.qk_norm=true, or model.norm_topk_prob=true; model.qk_norm=true: model.mlp_bias=false, and "
                "model.attention_bias equal to model.attention_out_bias",
            )

        if self.model_type is not None:
            self._check_model_type(self.model_type)

    def _check_model_type(self, model_type: str) -> None:
        """Raise UserError if a model of this type would not be read again with these settings."""
        own = dataclasses.asdict(self)
        try:
            read = read_hf_config(write_hf_config(own), Path("config.json"))
        except UnsupportedVariantError as error:
            raise UserError(error.message, f"model.model_type={model_type}", "model.model_type=null") from error
        if differences := [f"model.{name}={own[name]}" for name in CLASS_SETTINGS if own[name] != read[name]]:
            raise UserError(
                f"a {model_type} has no {', '.join(differences)}",
                f"model.model_type={model_type}",
                "model.model_type=null",
            )

    def size(self) -> ModelSize:
        D, queries, keys = (
            self.hidden_size,
            self.num_attention_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        attention = 2 * D * queries + 2 * D * keys + 2 * self.head_dim * self.qk_norm
        attention += (queries + 2 * keys) * self.attention_bias + D * self.attention_out_bias
        width = self.moe_intermediate_size if self.num_experts else self.intermediate_size
        network, networks = 3 * D * width + (2 * width + D) * self.mlp_bias, self.num_experts or 1
        router = D * self.num_experts
        layer = attention + networks * network + router + 2 * D
        tensors = (
            6
            + 2 * self.qk_norm
            + 3 * self.attention_bias
            + self.attention_out_bias
            + networks * (3 + 3 * self.mlp_bias)
            + bool(self.num_experts)
        )
        head = 0 if self.tie_word_embeddings else 1
        return ModelSize(
            (1 + head) * self.vocab_size * D + self.num_hidden_layers * layer + D,
            2 + head + self.num_hidden_layers * tensors,
        )

    def mathematics(self) -> dict[str, Any]:
        unread = {"attention", "dropout", "router_aux_loss_coef", "model_type"}
        unread |= (
            {"intermediate_size"}
            if self.num_experts
            else {"num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
        )
        settings = {name: value for name, value in super().mathematics().items() if name not in unread}
        if self.rope_scaling is not None:
            read = ("type", *SCALING_FIELDS[self.rope_scaling.type])
            settings["rope_scaling"] = {name: settings["rope_scaling"][name] for name in read}
        return settings

    def training_warnings(self) -> list[str]:
        if self.num_experts and self.norm_topk_prob and self.num_experts_per_tok == 1:
            return [
                "model.norm_topk_prob=true with one expert per token: its weight is always 1, so only the load-balancing loss trains the router; "
                "MiniMind trains so; from random weights model.norm_topk_prob=false trains it by the language-model loss, too"
            ]
        return []

    @property
    def has_dynamic_shapes(self) -> bool:
        return self.num_experts > 0  # the number of tokens of an expert

    @property
    def has_attention_dropout(self) -> bool:
        return self.dropout > 0

    def check_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse an attention kernel that PyTorch does not have; it would raise in the first step."""
        if self.attention == "efficient" and device.type == "cpu":
            raise UserError(
                "model.attention=efficient needs a GPU",
                "model.attention=efficient",
                "use model.attention=flash or auto",
            )
        if self.attention == "flash" and device.type == "cuda" and dtype.itemsize > 2:
            raise UserError(
                f"model.attention=flash on a GPU computes in 16 bits only, got {dtype}",
                "model.attention=flash",
                "precision=bf16, or model.attention=efficient",
            )

    def to_hf_config(self) -> dict[str, Any]:
        return write_hf_config(dataclasses.asdict(self))

    @classmethod
    def from_hf_config(cls, raw: dict[str, Any], path: Path) -> Self:
        settings = read_hf_config(raw, path)
        scaling, model_type = settings.pop("rope_scaling"), raw["model_type"]
        own_type = None if model_type == architecture_of(settings) else model_type
        return cls(**settings, rope_scaling=scaling and RopeScaling(**scaling), model_type=own_type)
