"""FIXME models.layers.attention_block."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import activation_checkpointing
from models.config import ModelConfig
from models.layers.attention import AttentionMask, attention
from models.layers.chunked_loss import compute_dtype
from models.layers.fused_linear import fused_projection
from models.layers.mlp import MLP, SequenceIndex
from models.layers.moe import MoE
from models.layers.rope import apply_rope

WEIGHT_INIT_STD = 0.02


class KVCache:
    """Keys and values of the positions seen so far, allocated once. `start` is the first position of the next call."""

    def __init__(self, cfg: ModelConfig, rows: int, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (cfg.num_hidden_layers, rows, cfg.num_key_value_heads, positions, cfg.head_dim)
        self.keys, self.values = torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
        self.start = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: (B, K, T, H) of the new positions -> those of all positions so far."""
        end = self.start + k.shape[2]
        self.keys[layer, :, :, self.start : end], self.values[layer, :, :, self.start : end] = k, v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class LayerContext(NamedTuple):
    """What every layer needs beside its input."""

    cos: Tensor  # (B or 1, 1, T, H / 2)
    sin: Tensor
    mask: AttentionMask
    cache: KVCache | None
    slots: SequenceIndex | None  # None: every line is one sequence, without padding
    lean: bool  # keep for the backward pass only what is dear to make again


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (https://arxiv.org/abs/1910.07467), in fp32 whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        # With a bf16 input and fp32 weights PyTorch falls back to a norm that is not fused, and warns.
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)


class Attention(nn.Module):
    """Grouped-query attention (https://arxiv.org/abs/2305.13245), with RMSNorm on queries and keys where asked."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.q_proj = nn.Linear(cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, cfg.num_key_value_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, cfg.num_key_value_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.num_attention_heads * cfg.head_dim, cfg.hidden_size, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim, eps=cfg.rms_norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(cfg.head_dim, eps=cfg.rms_norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (y.view(B, T, -1, self.cfg.head_dim) for y in fused_projection(x, self.q_proj, self.k_proj, self.v_proj))
        q = apply_rope(self.q_norm(q).transpose(1, 2), context.cos, context.sin).to(v.dtype)  # (B, N, T, H)
        k = apply_rope(self.k_norm(k).transpose(1, 2), context.cos, context.sin).to(v.dtype)  # (B, K, T, H)
        v = v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)
        y = attention(
            q, k, v, context.mask, self.cfg.dropout if self.training else 0.0, self.cfg.attention, cached=context.cache is not None, keep=not context.lean
        )
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class DecoderLayer(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.compiled: Callable[[Tensor, LayerContext], tuple[Tensor, Tensor | None]] | None = None
        self.lone = False  # compiled for batches of one line
        self.input_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.self_attn = Attention(cfg, layer)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.mlp = MoE(cfg) if cfg.num_experts else MLP(cfg, cfg.intermediate_size)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        """Compiled is only what lies inside: hooks of those who wrap a layer stay outside. What is no training has shapes of its own,
        and a compiler takes a single line for another program than several: neither is compiled for little."""
        if self.compiled is not None and self.training and (len(x) == 1) == self.lone:
            return self.compiled(x, context)  # a compiler makes again what is cheap, without being asked
        return activation_checkpointing.selective_checkpointing(self.body, x, context) if context.lean else self.body(x, context)

    def body(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        dtype = compute_dtype(x)  # cast once, not for every product
        x = x + self.dropout(self.self_attn(self.input_layernorm(x).to(dtype), context))
        h = self.post_attention_layernorm(x).to(dtype)
        y, aux = self.mlp(h, context.slots) if isinstance(self.mlp, MoE) else (self.mlp(h), None)
        return x + self.dropout(y), aux
