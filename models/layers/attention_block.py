"""Decoder layer: attention with its key/value cache, norms and the residual stream.

Shapes: B rows, T tokens, D hidden size, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.families.decoder import DecoderConfig, RopeScaling
from models.layers.attention import FUSED_KERNEL, AttentionMask, attention
from models.layers.mlp import MLP, DocumentIndex, MoE
from models.layers.ops import CHECKPOINTING, compute_dtype
from models.layers.projections import fused_projection

WEIGHT_INIT_STD = 0.02


class KVCache:
    """Keys and values of the tokens computed so far, allocated once for `max_length` tokens."""

    def __init__(
        self, cfg: DecoderConfig, rows: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (2, cfg.num_hidden_layers, rows, cfg.num_key_value_heads, max_length, cfg.head_dim)
        self.keys_values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0  # cached tokens per row

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: (B, K, T, H) of the new tokens -> (B, K, length + T, H) of all tokens."""
        end = self.length + k.shape[2]
        keys, values = self.keys_values[0, layer], self.keys_values[1, layer]
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        return keys[:, :, :end], values[:, :, :end]

    @staticmethod
    def join(parts: Sequence[tuple[KVCache, list[int]]], length: int, capacity: int) -> KVCache:
        """Return a cache of the last `length` tokens of these rows of caches; zeros are before a shorter row."""
        joined = copy(parts[0][0])
        joined.keys_values, joined.length = (
            torch.cat(
                [
                    # sizes below 0 cut
                    F.pad(
                        cache.keys_values[:, :, rows, :, : cache.length],
                        (0, 0, length - cache.length, capacity - length),
                    )
                    for cache, rows in parts
                ],
                dim=2,
            ),
            length,
        )
        return joined


class LayerContext(NamedTuple):
    """Inputs that all layers share."""

    # (B or 1, 1, T, 2, H/2) each: factors of the first and of the second half of the channels, (cos, sin) and (-sin, cos)
    rotation: tuple[Tensor, Tensor]
    mask: AttentionMask
    cache: KVCache | None
    documents: DocumentIndex | None  # None: each row is one document without padding
    selective: bool  # selective activation checkpointing: also recompute the attention probabilities


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (https://arxiv.org/abs/1910.07467), computed in fp32 for every input dtype."""

    def forward(self, x: Tensor) -> Tensor:
        # With a bf16 input and fp32 weights PyTorch warns and uses a norm that is not fused.
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)


class Attention(nn.Module):
    """Grouped-query attention (https://arxiv.org/abs/2305.13245), with RMSNorm on queries and keys if `qk_norm`."""

    def __init__(self, cfg: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer, self.attention_kernel = cfg, layer, cfg.attention
        self.q_proj = nn.Linear(cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim, bias=cfg.attention_bias)
        self.k_proj = nn.Linear(cfg.hidden_size, cfg.num_key_value_heads * cfg.head_dim, bias=cfg.attention_bias)
        self.v_proj = nn.Linear(cfg.hidden_size, cfg.num_key_value_heads * cfg.head_dim, bias=cfg.attention_bias)
        self.o_proj = nn.Linear(cfg.num_attention_heads * cfg.head_dim, cfg.hidden_size, bias=cfg.attention_out_bias)
        self.q_norm = RMSNorm(cfg.head_dim, eps=cfg.rms_norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(cfg.head_dim, eps=cfg.rms_norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        B, T, _ = x.shape
        use_kernel = self.attention_kernel == FUSED_KERNEL
        projected = fused_projection(x, self.q_proj, self.k_proj, self.v_proj, use_kernel=use_kernel)
        q, k, v = (y.view(B, T, -1, self.cfg.head_dim) for y in projected)
        q = apply_rope(self.q_norm(q).transpose(1, 2), context.rotation).to(v.dtype)  # (B, N, T, H)
        k = apply_rope(self.k_norm(k).transpose(1, 2), context.rotation).to(v.dtype)  # (B, K, T, H)
        v = v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)
        dropout = self.cfg.dropout if self.training else 0.0
        y = attention(
            q,
            k,
            v,
            context.mask,
            dropout,
            self.attention_kernel,
            cached=context.cache is not None,
            save_probs=not context.selective,
        )
        y = y.transpose(1, 2).reshape(B, T, -1)
        if use_kernel and y.dtype == torch.bfloat16:
            return fused_projection(y, self.o_proj, use_kernel=True)[0]
        return self.o_proj(y)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). (B, T, D) -> (B, T, D)."""

    def __init__(self, cfg: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.self_attn = Attention(cfg, layer)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.mlp = MoE(cfg) if cfg.num_experts else MLP(cfg, cfg.intermediate_size)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        """Return the output and the use of the experts (2, S, E), None for a dense model."""
        return CHECKPOINTING["selective"](self.body, x, context) if context.selective else self.body(x, context)

    def body(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        """What is compiled: there the compiler decides what to recompute."""
        dtype = compute_dtype(x)  # one cast per norm, not one per matrix product
        x = x + self.dropout(self.self_attn(self.input_layernorm(x).to(dtype), context))
        h = self.post_attention_layernorm(x).to(dtype)
        y, expert_use = self.mlp(h, context.documents) if isinstance(self.mlp, MoE) else (self.mlp(h), None)
        return x + self.dropout(y), expert_use


def apply_rope(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate channel pairs (i, i + H/2) of queries or keys (https://arxiv.org/abs/2104.09864). x: (B, heads, T, H);
    rotation: (B or 1, 1, T, 2, H/2) each.

    Without torch.cat, whose output compiled layers would save for the backward pass: they compute this again from the
    projections.
    """
    first, second = x.chunk(2, dim=-1)
    return (first.unsqueeze(-2) * rotation[0] + second.unsqueeze(-2) * rotation[1]).flatten(-2)


def rope_frequencies(cfg: DecoderConfig) -> tuple[Tensor, float]:
    """Return the frequency of each channel pair, (H/2,) in radians per position, and the factor on cos and sin."""
    exponents = torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim
    frequencies = 1.0 / cfg.rope_theta**exponents
    scaling = cfg.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.type == "linear":
        return frequencies / scaling.factor, 1.0
    return (
        _llama3_frequencies(frequencies, scaling)
        if scaling.type == "llama3"
        else _yarn_frequencies(frequencies, cfg, scaling)
    )


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Llama 3.1: keep high frequencies, divide low ones by `factor`, interpolate between by the rotations over the
    trained length.
    """
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep), 1.0


def _yarn_frequencies(frequencies: Tensor, cfg: DecoderConfig, scaling: RopeScaling) -> tuple[Tensor, float]:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): keep high frequencies, divide low ones by `factor`,
    interpolate between.
    """

    def channel(rotations: float) -> float:
        """Return the (fractional) index of the channel pair that makes this many rotations over the trained length."""
        return (
            cfg.head_dim
            * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(cfg.rope_theta))
        )

    low, high = (
        max(math.floor(channel(scaling.beta_fast)), 0),
        min(math.ceil(channel(scaling.beta_slow)), cfg.head_dim - 1),
    )
    ramp = ((torch.arange(cfg.head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / scaling.factor * ramp, scaling.attention_factor
