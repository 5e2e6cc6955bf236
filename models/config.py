"""Settings of models and adapters. Imports no torch, so that settings are checked before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from common.checks import check_at_least, check_choice
from common.errors import UserError

ATTENTION_KERNELS = ("auto", "flash", "efficient", "math")
ACTIVATION_CHECKPOINTING_MODES = ("none", "selective", "full")  # recompute nothing, all but matmuls and attention, or whole layers
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    "max_position_embeddings",
)


@dataclass
class RopeScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): extends rotary position embeddings beyond the trained length."""

    factor: float  # extended length / trained length, at least 1
    original_max_position_embeddings: int  # trained length (tokens)
    beta_fast: float  # channels with more rotations than this over the trained length keep their frequency
    beta_slow: float  # channels with fewer rotations than this are divided by factor
    attention_factor: float  # factor on cos and sin

    def __post_init__(self) -> None:
        check_at_least("model.rope_scaling.factor", self.factor, 1, 4)


@dataclass
class ModelConfig:
    """Decoder-only transformer, dense or mixture of experts. Field names are those of a transformers config."""

    name: str  # name of the architecture, for reports
    vocab_size: int  # tokens of the vocabulary (V)
    hidden_size: int  # width of the residual stream (D)
    num_hidden_layers: int  # layers
    num_attention_heads: int  # query heads (N)
    num_key_value_heads: int  # key/value heads (K), a divisor of num_attention_heads
    head_dim: int  # width of a head (H), even
    intermediate_size: int  # width of a dense MLP
    max_position_embeddings: int  # longest sequence (tokens)
    rope_theta: float  # base of the rotary position embeddings
    rope_scaling: Optional[RopeScaling]  # YaRN settings; null: none
    rms_norm_eps: float  # added to the mean square in every norm
    qk_norm: bool  # normalize queries and keys (Qwen3)
    tie_word_embeddings: bool  # the output layer shares its weight with the embedding
    dropout: float  # probability, in [0, 1)
    attention: str  # kernel: auto, flash, efficient or math
    num_experts: int  # experts per layer (E); 0: dense
    num_experts_per_tok: int  # experts that a token is routed to (k)
    moe_intermediate_size: int  # width of an expert
    norm_topk_prob: bool  # renormalize the k routing weights to sum to 1
    router_aux_loss_coef: float  # weight of the load-balancing loss

    def __post_init__(self) -> None:
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


@dataclass
class LoraConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685): W x + alpha / rank * B A x."""

    rank: int  # rows of A and columns of B, at least 1
    alpha: float  # scale of the adapter's output, times 1 / rank
    dropout: float  # on the adapter's input; probability, in [0, 1)
    targets: list[str]  # names of the linear layers that get an adapter, e.g. [q_proj,v_proj]

    def __post_init__(self) -> None:
        check_at_least("stage.lora.rank", self.rank, 1, 8)
        if not 0 <= self.dropout < 1:
            raise UserError(f"stage.lora.dropout must be in [0, 1), got {self.dropout}", f"stage.lora.dropout={self.dropout}", "e.g. stage.lora.dropout=0.1")
