"""Attention within documents, by the fastest exact kernel of each device.

Shapes: B rows, T tokens, C tokens with the cached ones (T without a cache), N query heads, K key/value heads, H head
width.
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
from models.layers.cpu_kernels import fused_attention

SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FUSED_KERNEL = "fused"  # the C++ kernel, where `load_kernels` was called
CPU_KERNELS = {
    "auto": attention_cpu.QUERY_BLOCK,
    FUSED_KERNEL: attention_cpu.QUERY_BLOCK,
    "blocks-32": 32,
    "blocks-64": 64,
    "blocks-128": 128,
}  # -> queries of a block
MASKED_QUERY_CHUNK = 128  # queries per call of the CPU kernel with a mask

AttentionMask = Tensor | BlockMask | None  # (B, 1, T, C), True where attention is allowed; None: causal


def document_mask(document_ids: Tensor, dropout: float) -> AttentionMask:
    """Return the causal mask of packed rows: tokens attend within their document. document_ids: (B, T), -1 for padding."""
    B, T = document_ids.shape
    # FlexAttention skips blocks without allowed pairs; it has no dropout
    if document_ids.device.type == "cuda" and dropout == 0:
        return create_block_mask(document_mask_mod(document_ids), B, None, T, T, device=document_ids.device)
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    # Padding is document -1: each of its tokens attends at least to itself, so that no softmax row is empty.
    return (same & torch.ones(T, T, dtype=torch.bool, device=document_ids.device).tril()).unsqueeze(1)


def document_mask_mod(document_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the same mask as FlexAttention's function of (row, head, query, key)."""
    return lambda b, h, i, j: (i >= j) & (document_ids[b, i] == document_ids[b, j])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    dropout: float,
    kernel: str,
    cached: bool = False,
    save_probs: bool = True,
) -> Tensor:
    """q: (B, N, T, H); k, v: (B, K, C, H) -> (B, N, T, H).

    kernel: model.attention, or one of CPU_KERNELS. cached: `mask` may be any mask, not only one of `document_mask`.
    save_probs: save attention probabilities for the backward pass on the CPU if there are at most MAX_SAVED_PROBS;
    otherwise the backward pass recomputes them.
    """
    if isinstance(mask, BlockMask):
        return _flex()(q, k, v, block_mask=mask, enable_gqa=True)
    if q.device.type == "cpu" and kernel in CPU_KERNELS and dropout == 0 and not cached:
        if kernel == FUSED_KERNEL and fused_attention.supports(q.dtype, q.shape[-1]):
            return fused_attention.fused_attention(q, k, v, mask)[0]
        num_probs = q.shape[0] * q.shape[1] * q.shape[2] ** 2
        save_probs = (
            save_probs and torch.is_grad_enabled() and q.requires_grad and num_probs <= attention_cpu.MAX_SAVED_PROBS
        )
        return attention_cpu.cpu_attention(q, k, v, mask, save_probs, CPU_KERNELS[kernel])[0]
    if q.device.type == "mps":
        k, v = repeat_heads(q, k), repeat_heads(q, v)
    if mask is not None:
        return _masked_attention(q, k, v, mask, dropout)
    # `kernel` applies to plain causal rows only: flash attention on CUDA takes no mask.
    with nullcontext() if kernel not in SDPA_BACKENDS else sdpa_kernel(SDPA_BACKENDS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True)


def repeat_heads(q: Tensor, x: Tensor) -> Tensor:
    """Repeat the heads of keys or values (B, K, C, H) to those of the queries (B, N, T, H): `enable_gqa` is implemented
    for CPU and CUDA.
    """
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Attention in chunks of queries on the CPU, whose kernel computes masked scores too: each chunk gets only the keys
    before its end.
    """
    if q.device.type != "cpu" or torch.compiler.is_compiling():  # a compiler would specialize on the number of chunks
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=True)
    T, C = q.shape[2], k.shape[2]
    chunks = []
    for start in range(0, T, MASKED_QUERY_CHUNK):
        end = min(start + MASKED_QUERY_CHUNK, T)
        keys = C - T + end
        chunks.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end],
                k[:, :, :keys],
                v[:, :, :keys],
                attn_mask=mask[:, :, start:end, :keys],
                dropout_p=dropout,
                enable_gqa=True,
            )
        )
    return torch.cat(chunks, dim=2)


@cache
def _flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)  # uncompiled, FlexAttention computes all scores
