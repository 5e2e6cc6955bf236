"""A decoder-only transformer of the Qwen3 shape, dense or mixture of experts; parameter names are transformers' own.

Shapes: B lines, T positions, S sequences (of packed lines several a line, else one), D hidden size, N query heads, K key/value heads,
H head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import recompute
from models.attention import Mask, attend, confined
from models.config import ModelConfig, RopeScaling
from models.feed_forward import Experts, FeedForward, Slots
from models.linear import project
from models.loss import IGNORE as IGNORE
from models.loss import Head, compute_dtype

INIT_STD = 0.02


class Output(NamedTuple):
    logits: Tensor | None  # (B, T, V), when no labels are given
    nll: Tensor | None  # (B, T) fp32, -log p(label), 0 where there is none; or () their sum
    aux: Tensor | None  # (S,) each sequence's load-balancing loss, None for a dense model


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


class Context(NamedTuple):
    """What every layer needs beside its input."""

    cos: Tensor  # (B or 1, 1, T, H / 2)
    sin: Tensor
    mask: Mask
    cache: KVCache | None
    slots: Slots | None  # None: every line is one sequence, without padding
    lean: bool  # keep for the backward pass only what is dear to make again


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), halves as pairs. x: (B, heads, T, H)"""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rotary_frequencies(cfg: ModelConfig) -> tuple[Tensor, float]:
    """Radians a position for each pair of channels (H / 2,), and the factor on cos and sin."""
    pairs = torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim
    plain = 1.0 / cfg.rope_theta**pairs
    if cfg.rope_scaling is None:
        return plain, 1.0
    return _yarn(plain, cfg, cfg.rope_scaling)


def _yarn(plain: Tensor, cfg: ModelConfig, scaling: RopeScaling) -> tuple[Tensor, float]:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): fast channels stay, slow ones are stretched, a ramp between."""

    def channel(rotations: float) -> float:
        """The channel pair that turns this often over the original length."""
        return cfg.head_dim * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

    low, high = max(math.floor(channel(scaling.beta_fast)), 0), min(math.ceil(channel(scaling.beta_slow)), cfg.head_dim - 1)
    ramp = ((torch.arange(cfg.head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp, scaling.attention_factor


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

    def forward(self, x: Tensor, context: Context) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (y.view(B, T, -1, self.cfg.head_dim) for y in project(x, self.q_proj, self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q).transpose(1, 2), context.cos, context.sin).to(v.dtype)  # (B, N, T, H)
        k = rotate(self.k_norm(k).transpose(1, 2), context.cos, context.sin).to(v.dtype)  # (B, K, T, H)
        v = v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)
        y = attend(
            q, k, v, context.mask, self.cfg.dropout if self.training else 0.0, self.cfg.attention, cached=context.cache is not None, keep=not context.lean
        )
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.compiled: Callable[[Tensor, Context], tuple[Tensor, Tensor | None]] | None = None
        self.lone = False  # compiled for batches of one line
        self.input_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.self_attn = Attention(cfg, layer)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.mlp = Experts(cfg) if cfg.num_experts else FeedForward(cfg, cfg.intermediate_size)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Compiled is only what lies inside: hooks of those who wrap a layer stay outside. What is no training has shapes of its own,
        and a compiler takes a single line for another program than several: neither is compiled for little."""
        if self.compiled is not None and self.training and (len(x) == 1) == self.lone:
            return self.compiled(x, context)  # a compiler makes again what is cheap, without being asked
        return recompute.selective(self.body, x, context) if context.lean else self.body(x, context)

    def body(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        dtype = compute_dtype(x)  # cast once, not for every product
        x = x + self.dropout(self.self_attn(self.input_layernorm(x).to(dtype), context))
        h = self.post_attention_layernorm(x).to(dtype)
        y, aux = self.mlp(h, context.slots) if isinstance(self.mlp, Experts) else (self.mlp(h), None)
        return x + self.dropout(y), aux


class Stack(nn.Module):
    """All but the head; a module of its own because that is what the names `model.layers...` say."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)


class Decoder(nn.Module):
    frequencies: Tensor

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.activation_checkpointing = "none"  # or selective, whole: what the backward pass makes again
        self.model = Stack(cfg)
        self.lm_head = Head(cfg.hidden_size, cfg.vocab_size, bias=False)
        self.dropout = nn.Dropout(cfg.dropout)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=INIT_STD)
        if cfg.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        frequencies, self.rope_factor = rotary_frequencies(cfg)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        lengths: Tensor | None = None,
        sequences: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: Mask = None,
        cache: KVCache | None = None,
        summed: bool = False,
    ) -> Output:
        """input_ids, labels, position_ids: (B, T); lengths: (S,) positions of each sequence; padding lies on the right of a line.

        labels[b, t] is the token to predict at position t, IGNORE for none. Packed lines bring `sequences` (B, T), which sequence
        a position belongs to (-1 for padding), and position_ids that begin anew with each; attention stays inside. With a cache,
        `mask` says where to look, and the logits (B, 1, V) are those of the last position alone: a long prompt would fill the
        memory with the others. `summed` asks for the sum of the losses alone, which costs less.
        """
        T = input_ids.shape[1]
        x = self.dropout(self.model.embed_tokens(input_ids))  # (B, T, D)
        if sequences is not None:
            mask = confined(sequences, self.cfg.dropout if self.training else 0.0)
        again = self.activation_checkpointing if self.training and torch.is_grad_enabled() else "none"
        context = Context(*self._angles(T, position_ids), mask, cache, self._slots(T, lengths, sequences), lean=again == "selective")
        balance = []
        for layer in self.model.layers:
            x, aux = recompute.whole(layer, x, context) if again == "whole" else layer(x, context)
            balance.append(aux)
        if cache is not None:
            cache.start += T
            x = x[:, -1:]
        x = self.model.norm(x)
        aux = self.cfg.router_aux_loss_coef * torch.stack(balance).sum(0) if self.cfg.num_experts else None
        if labels is None:
            return Output(self.lm_head(x), None, aux)
        return Output(None, self.lm_head(x, labels, summed), aux)

    def compile_layers(self, *, lone: bool, **options: Any) -> None:
        """From now on training runs through compiled layers, one program for all of them and for every shape: were there one for the
        shapes that come first and another for the others, a resumed run would round otherwise. `lone`: batches have one line;
        `options` are torch.compile's."""
        from torch._functorch import config as saved

        # Left to itself torch keeps what a product of the backward program reads, though it is made again in passing: silu(gate) * up, a norm's
        # output. A quarter less is kept, for 1 % of a step's time.
        saved.ban_recompute_materialized_backward = False
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            layer.lone = lone
            layer.compiled = torch.compile(layer.body, dynamic=True, fullgraph=not self.cfg.num_experts, **options)

    def _slots(self, T: int, lengths: Tensor | None, sequences: Tensor | None) -> Slots | None:
        if lengths is None or not self.cfg.num_experts:
            return None  # only the balance of experts asks
        S, t = len(lengths), torch.arange(T, device=lengths.device)
        if sequences is None:
            return Slots(torch.where(t < lengths.unsqueeze(1), torch.arange(S, device=t.device).unsqueeze(1), S), lengths)
        return Slots(torch.where(sequences < 0, S, sequences), lengths)

    def _angles(self, T: int, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin (B or 1, 1, T, H / 2) in fp32: bf16 cannot tell position 257 from 258."""
        positions = torch.arange(T, device=self.frequencies.device).unsqueeze(0) if position_ids is None else position_ids
        angles = (positions.unsqueeze(-1) * self.frequencies).unsqueeze(1)  # (B or 1, 1, T, H / 2)
        return angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
