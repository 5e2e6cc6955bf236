"""What a model is made of. No torch here: the words must be checkable before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from common.errors import UserError

ATTENTION_KERNELS = ("auto", "flash", "efficient", "math")
CHECKPOINTING = ("none", "selective", "whole")  # what the backward pass makes again: nothing, all that is cheap, every layer


@dataclass
class RopeScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): stretches the rotary positions past the trained length."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise UserError(
                "YaRN stretches positions, it cannot shrink them",
                f"model.rope_scaling.factor={self.factor}",
                "use a factor of at least 1, or model.rope_scaling=null",
            )


@dataclass
class ModelConfig:
    """Field names are those of a transformers config; `num_experts=0` is a dense model."""

    name: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Optional[RopeScaling]
    rms_norm_eps: float
    qk_norm: bool
    tie_word_embeddings: bool
    dropout: float
    attention: str
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    router_aux_loss_coef: float

    def __post_init__(self) -> None:
        for word in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            if getattr(self, word) < 1:
                raise UserError("a size must be at least 1", f"model.{word}={getattr(self, word)}", "give a positive whole number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key/value heads evenly",
                f"model.num_key_value_heads={self.num_key_value_heads}",
                "choose a divisor of model.num_attention_heads",
            )
        if self.head_dim % 2:
            raise UserError("rotary embeddings turn channels in pairs", f"model.head_dim={self.head_dim}", "choose an even number")
        if not 0 <= self.dropout < 1:
            raise UserError("dropout is a probability", f"model.dropout={self.dropout}", "choose a value in [0, 1)")
        if self.attention not in ATTENTION_KERNELS:
            raise UserError("unknown attention kernel", f"model.attention={self.attention}", f"choose one of {', '.join(ATTENTION_KERNELS)}")
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UserError(
                f"a token cannot visit {self.num_experts_per_tok} of {self.num_experts} experts",
                f"model.num_experts_per_tok={self.num_experts_per_tok}",
                "choose between 1 and model.num_experts",
            )
        if not self.qk_norm:
            raise UserError(
                "no published mixture of experts of this shape goes without query and key norms",
                "model.qk_norm=false",
                "set model.qk_norm=true, or model.num_experts=0",
            )
        if self.norm_topk_prob and self.num_experts_per_tok == 1:
            # One renormalised weight is always 1: the language-model loss would give the router no gradient.
            raise UserError(
                "with one expert a token, a renormalised weight is always 1 and the router learns nothing",
                "model.norm_topk_prob=true",
                "set model.norm_topk_prob=false, or model.num_experts_per_tok=2",
            )


@dataclass
class LoraConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685): W x + alpha / rank * B A x."""

    rank: int
    alpha: float
    dropout: float
    targets: list[str]

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError("an adapter needs a rank", f"stage.lora.rank={self.rank}", "choose at least 1")
        if not 0 <= self.dropout < 1:
            raise UserError("dropout is a probability", f"stage.lora.dropout={self.dropout}", "choose a value in [0, 1)")
