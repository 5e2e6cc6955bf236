"""Attention within documents, by the fastest exact kernel of each device.

On the CPU blocks of queries against the keys that they can attend to, by plain matrix products: PyTorch's flash kernel
computes masked scores too, and its bf16 products reach a sixth of the speed of a matrix product. These are custom
operators: the compiler does not trace them, and the number of keys of a block may depend on the data.

Shapes: B rows, T tokens, C tokens with the cached ones (T without a cache) or keys of a block, N query heads, K
key/value heads, H head width, r = N / K query heads per key head, Q queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from models.layers.cpu_kernels.fused_attention import fused_attention, supports
from models.layers.ops import custom_op, empty_gradients, empty_heads

QUERY_BLOCK = 64  # queries of a block
# Queries, and keys, of a block of FlexAttention. With heads of 16 and rows of 64 tokens its gradients in 16 bits were
# wrong by a factor of 8, without an error (H100, torch 2.11, triton 3.6; right with heads of 32 and rows of 256)
FLEX_BLOCK, MIN_FLEX_WIDTH = 128, 32
# its tiles in fp32: torch's own need 82 to 183 KB of shared memory with heads of 96 or 128, a block of a T4 has 64, of an
# RTX 4090 99, of an A100 163
FLEX_OPTIONS_FP32: Any = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 2}
# (query, key) pairs of a boolean mask on a GPU; FlexAttention computes rows with more of them, compiled or not
MAX_MASKED_PAIRS = 1 << 28
# attention probabilities of a layer saved for the backward pass; a larger number is recomputed
MAX_SAVED_PROBS = 1 << 24
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FUSED_KERNEL = "fused"  # the C++ kernel, where `load_kernels` was called
CPU_KERNELS = ("auto", FUSED_KERNEL)
MASKED_QUERY_CHUNK = 128  # queries per call of the CPU kernel with a mask

# (B, 1, T, C), True where attention is allowed, or as `additive_mask`; None: causal, T is C or 1
AttentionMask = Tensor | BlockMask | None


def document_mask(
    document_ids: Tensor, dropout: float = 0.0, head_width: int = MIN_FLEX_WIDTH, is_compiled: bool = False
) -> AttentionMask:
    """Return the causal mask of packed rows: tokens attend within their document. document_ids: (B, T), -1 for padding.

    is_compiled: the layers are compiled. FlexAttention skips blocks without allowed pairs; it has no dropout, and where
    it is compiled alone the first step takes half a minute longer (H100, torch 2.11).
    """
    if document_ids.is_cuda and fits_flex_attention(document_ids.shape, dropout, head_width, is_compiled):
        return document_blocks(document_ids)
    return boolean_document_mask(document_ids)


def additive_mask(mask: AttentionMask, dtype: torch.dtype) -> AttentionMask:
    """Return a boolean mask of a GPU as what is added to scores of `dtype`: every layer would convert it, and save a mask
    of its own for the backward pass.
    """
    if not (isinstance(mask, Tensor) and mask.is_cuda):
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def fits_flex_attention(shape: Sequence[int], dropout: float, head_width: int, is_compiled: bool) -> bool:
    """Return whether FlexAttention is exact and worth its compilation on a GPU. shape: (B, T)."""
    B, T = shape
    return (
        dropout == 0
        and head_width >= MIN_FLEX_WIDTH
        and T > FLEX_BLOCK  # a single block would have a program of its own
        and (is_compiled or B * T * T > MAX_MASKED_PAIRS)
    )


def document_blocks(document_ids: Tensor) -> BlockMask:
    """Return the same mask for FlexAttention, from the first token of each document: the T x T mask, from which torch
    makes one, is never in memory.
    """
    T, device = document_ids.shape[1], document_ids.device
    position = torch.arange(T, device=device)
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    start = torch.where(is_first, position, 0).cummax(-1).values  # (B, T): first token of the document of each token
    block = torch.arange(-(-T // FLEX_BLOCK), device=device)
    query, key = block[None, :, None], block  # (1, Q, 1), (Q,): numbers of blocks
    first, last = start[:, ::FLEX_BLOCK], start[:, (block * FLEX_BLOCK + FLEX_BLOCK - 1).clamp(max=T - 1)]  # (B, Q)
    allowed = (key >= (first // FLEX_BLOCK)[..., None]) & (key <= query)  # some query attends to some key
    # every query attends to every key; as torch, none of a block that ends after the row
    full = (key * FLEX_BLOCK >= last[..., None]) & (key < query) & ((query + 1) * FLEX_BLOCK <= T)
    masked = allowed & ~full
    mask = BlockMask.from_kv_blocks(
        *_listed_blocks(masked),
        *_listed_blocks(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=document_mask_mod(document_ids),
        seq_lengths=(T, T),
        compute_q_blocks=False,  # torch makes them from the lists, with ten times as many launches
    )
    mask.q_num_blocks, mask.q_indices = _listed_blocks(masked.mT)
    mask.full_q_num_blocks, mask.full_q_indices = _listed_blocks(full.mT)
    return mask


def _listed_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks: (B, Q, Q), bool -> the number of blocks in each row (B, 1, Q), and theirs first (B, 1, Q, Q)."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int().unsqueeze(1), order.int().contiguous().unsqueeze(1)  # as FlexAttention reads them


def boolean_document_mask(document_ids: Tensor) -> Tensor:
    T = document_ids.shape[1]
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

    kernel: model.attention, or one of CPU_KERNELS, as `attention_choice` (runner/engine/kernel_choice.py) chooses; on a
    GPU `document_mask` decides whether it is FlexAttention. cached: `mask` may be any mask, not only one of
    `document_mask`. save_probs: save attention probabilities for the backward pass on the CPU if there are at most
    MAX_SAVED_PROBS; otherwise the backward pass recomputes them.
    """
    if isinstance(mask, BlockMask):
        options = FLEX_OPTIONS_FP32 if q.dtype == torch.float32 else None
        if torch.compiler.is_compiling():
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
        return _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
    if q.device.type == "cpu" and kernel in CPU_KERNELS and dropout == 0 and not cached:
        if kernel == FUSED_KERNEL and supports(q.dtype, q.shape[-1]):
            return fused_attention(q, k, v, mask)[0]
        num_probs = q.shape[0] * q.shape[1] * q.shape[2] ** 2
        save_probs = save_probs and torch.is_grad_enabled() and q.requires_grad and num_probs <= MAX_SAVED_PROBS
        return cpu_attention(q, k, v, mask, save_probs)[0]
    if needs_repeated_heads(q, mask, kernel):
        k, v = repeat_heads(q, k), repeat_heads(q, v)
    if mask is not None:
        return _masked_attention(q, k, v, mask, dropout)
    is_causal = not cached or q.shape[2] > 1  # a single token attends to all cached ones
    # `kernel` applies to plain causal rows only: flash attention on CUDA takes no mask.
    with nullcontext() if kernel not in SDPA_BACKENDS else sdpa_kernel(SDPA_BACKENDS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=is_causal, enable_gqa=True)


def needs_repeated_heads(q: Tensor, mask: Tensor | None, kernel: str) -> bool:
    """Return whether no fast kernel has groups of heads: on mps none has, on CUDA the one for fp32 and masks has not."""
    is_flash = mask is None and kernel != "efficient" and q.dtype != torch.float32
    return q.device.type == "mps" or (q.is_cuda and not is_flash)


def repeat_heads(q: Tensor, x: Tensor) -> Tensor:
    """Repeat the heads of keys or values (B, K, C, H) to those of the queries (B, N, T, H)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Attention in chunks of queries on the CPU, whose kernel computes masked scores too: each chunk gets only the keys
    before its end.
    """
    # a compiler would specialize on the number of chunks
    if q.device.type != "cpu" or q.shape[2] == 1 or torch.compiler.is_compiling():
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
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)  # uncompiled, FlexAttention computes all scores


class AttentionBlock(NamedTuple):
    """Queries [start, end), which attend to keys [first_key, end)."""

    start: int
    end: int
    first_key: int
    mask: Tensor | None

    def queries(self, x: Tensor, K: int) -> Tensor:
        """Return the block of x (B, N, T, H) as (B, K, r * Q, H)."""
        B, N, _, H = x.shape
        return x[:, :, self.start : self.end].reshape(B, K, -1, H)

    def write_queries(self, x: Tensor, values: Tensor) -> None:
        """Write `values` (B, K, r * Q, H) to the block of x (B, N, T, H)."""
        B, N, _, H = x.shape
        x[:, :, self.start : self.end] = values.view(B, N, -1, H)

    def keys(self, x: Tensor) -> Tensor:
        """Return a view of keys or values (B, K, C, H)."""
        return x[:, :, self.first_key : self.end]

    def probs(self, q: Tensor, k: Tensor) -> Tensor:
        """Return attention probabilities (B, K, r * Q, C) of the block's queries (B, K, r * Q, H)."""
        scores = q @ self.keys(k).transpose(-2, -1)
        B, K, _, C = scores.shape
        Q = self.end - self.start
        per_head = scores.view(B, K, -1, Q, C)
        if self.mask is None:
            per_head[..., C - Q :].masked_fill_(torch.ones(Q, Q, dtype=torch.bool).triu(1), -torch.inf)
        else:
            hidden = (~self.mask[:, :, self.start : self.end, self.first_key : self.end]).unsqueeze(2)
            # inf + -inf is NaN: a score that overflows in one document must not reach another
            if scores.dtype == torch.float16:
                per_head.masked_fill_(hidden, -torch.inf)
            else:  # faster than masked_fill_, which expands the mask to every head
                per_head.add_(torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, -torch.inf))
        return scores.softmax(-1)


def attention_blocks(T: int, mask: Tensor | None) -> Iterator[AttentionBlock]:
    """Cut T queries into blocks.

    `mask` (B, 1, T, T) is one of `document_mask`: the first key of a token is never before that of an earlier token.
    """
    starts = range(0, T, QUERY_BLOCK)
    first_keys = [0] * len(starts) if mask is None else mask[:, 0, ::QUERY_BLOCK].int().argmax(-1).amin(0).tolist()
    for start, first_key in zip(starts, first_keys, strict=True):
        yield AttentionBlock(start, min(start + QUERY_BLOCK, T), first_key, mask)


@custom_op("lm_runner::attention", is_saved=True)
def cpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, save_probs: bool) -> tuple[Tensor, Tensor]:
    """q: (B, N, T, H); k, v: (B, K, T, H) -> (B, N, T, H), and the probabilities of all blocks, flat; empty without
    `save_probs`.
    """
    out, saved = empty_heads(q), _probs_buffer(q, save_probs)
    q, k, v, offset = q * q.shape[-1] ** -0.5, k.contiguous(), v.contiguous(), 0
    for block in attention_blocks(q.shape[2], mask):
        p = block.probs(block.queries(q, k.shape[1]), k)
        block.write_queries(out, p @ block.keys(v))
        if save_probs:
            saved[offset : offset + p.numel()] = p.flatten()
            offset += p.numel()
    return out, saved


@torch.library.register_fake("lm_runner::attention")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, save_probs: bool) -> tuple[Tensor, Tensor]:
    return empty_heads(q), _probs_buffer(q, save_probs)


@custom_op("lm_runner::attention_backward")
def cpu_attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, saved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """g: (B, N, T, H), gradient of the output; saved: probabilities of the forward pass, or empty -> gradients of q, k
    and v.
    """
    dq, K, scale, offset = empty_heads(q), k.shape[1], q.shape[-1] ** -0.5, 0
    q, k, v = q * scale, k.contiguous(), v.contiguous()
    dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for block in attention_blocks(q.shape[2], mask):
        q_block, g_block = block.queries(q, K), block.queries(g, K)
        size = q_block.shape[0] * K * q_block.shape[2] * (block.end - block.first_key)
        p = saved[offset : offset + size].view(*q_block.shape[:3], -1) if len(saved) else block.probs(q_block, k)
        offset += size
        block.keys(dv).add_(p.transpose(-2, -1) @ g_block)
        ds = torch.ops.aten._softmax_backward_data(g_block @ block.keys(v).transpose(-2, -1), p, -1, p.dtype)
        block.write_queries(dq, ds @ block.keys(k))
        block.keys(dk).add_(ds.transpose(-2, -1) @ q_block)
    return dq.mul_(scale), empty_heads(dk, q.dtype).copy_(dk), empty_heads(dv, q.dtype).copy_(dv)


torch.library.register_fake("lm_runner::attention_backward", empty_gradients)


def _probs_buffer(q: Tensor, save_probs: bool) -> Tensor:
    """Return a flat buffer for the probabilities of all blocks if each attends to every earlier token."""
    B, N, T, _ = q.shape
    return q.new_empty(B * N * T * (T + QUERY_BLOCK) // 2 if save_probs else 0)


def _save_for_backward(ctx, inputs, output) -> None:
    q, k, v, mask, _ = inputs
    ctx.save_for_backward(q, k, v, mask, output[1])


def _backward(ctx, g: Tensor, _) -> tuple[Tensor | None, ...]:
    q, k, v, mask, saved = ctx.saved_tensors
    return *cpu_attention_backward(g.contiguous(), q, k, v, mask, saved), None, None


torch.library.register_autograd("lm_runner::attention", _backward, setup_context=_save_for_backward)
