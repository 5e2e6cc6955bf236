"""Attention that stays inside its own sequence, by the fastest exact way that each device has.

Shapes: B lines, T positions, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from models.layers import attention_cpu

SDPA_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
MASKED_QUERY_CHUNK = 128  # where the kernel for processors is given a mask

AttentionMask = Tensor | BlockMask | None  # True where attention may look: (B, 1, T, positions seen); None: causal


def document_mask(sequences: Tensor, dropout: float) -> AttentionMask:
    """For packed lines: a position looks at those before it in its own sequence. sequences: (B, T), -1 for padding."""
    B, T = sequences.shape
    if sequences.device.type == "cuda" and dropout == 0:  # FlexAttention skips the blocks where nothing may look; it knows no dropout
        return create_block_mask(document_mask_mod(sequences), B, None, T, T, device=sequences.device)
    same = sequences.unsqueeze(2) == sequences.unsqueeze(1)
    # Padding is a sequence too, number -1: each position sees itself at least, and no row of the softmax is empty.
    return (same & torch.ones(T, T, dtype=torch.bool, device=sequences.device).tril()).unsqueeze(1)


def document_mask_mod(sequences: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The same, position by position: (line, head, query, key) -> whether."""
    return lambda b, h, i, j: (i >= j) & (sequences[b, i] == sequences[b, j])


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float, kernel: str, cached: bool = False, keep: bool = True) -> Tensor:
    """q: (B, N, T, H); k, v: (B, K, positions seen, H) -> (B, N, T, H). `cached`: the mask may be of any kind, not only what `confined` makes.
    `keep`: attention weights, for the backward pass, where they are not too many; it makes them again otherwise."""
    if isinstance(mask, BlockMask):
        return _flex()(q, k, v, block_mask=mask, enable_gqa=True)
    if q.device.type == "cpu" and kernel == "auto" and dropout == 0 and not cached:
        keep = keep and torch.is_grad_enabled() and q.requires_grad and q.shape[0] * q.shape[1] * q.shape[2] ** 2 <= attention_cpu.SCRATCH_BUFFERS
        return attention_cpu.cpu_attention(q, k, v, mask, keep)[0]
    if mask is not None:
        return _masked(q, k, v, mask, dropout)
    # The choice of a kernel is for plain causal lines: flash attention on CUDA takes no mask.
    with nullcontext() if kernel == "auto" else sdpa_kernel(SDPA_BACKENDS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """In blocks of queries on the CPU, whose kernel would look at every key even where the mask hides it."""
    if q.device.type != "cpu" or torch.compiler.is_compiling():  # a compiler would make a program for each number of positions
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=True)
    T, seen = q.shape[2], k.shape[2]
    parts = []
    for start in range(0, T, MASKED_QUERY_CHUNK):
        end = min(start + MASKED_QUERY_CHUNK, T)
        keys = seen - T + end  # those before the block's end
        parts.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end], k[:, :, :keys], v[:, :, :keys], attn_mask=mask[:, :, start:end, :keys], dropout_p=dropout, enable_gqa=True
            )
        )
    return torch.cat(parts, dim=2)


@cache
def _flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)  # only compiled does it skip anything
