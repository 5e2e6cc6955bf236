"""Exact attention on the CPU by plain matrix products: blocks of queries against the keys that they can attend to.

PyTorch's flash kernel for the CPU computes masked scores too, and its bf16 products reach a sixth of the speed of a
matrix product. These are custom operators: the compiler does not trace them, and the number of keys of a block may
depend on the data.

Shapes: B rows, T tokens, N query heads, K key/value heads, H head width, r = N / K query heads per key head, Q queries
and C keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from models.layers.ops import custom_op

QUERY_BLOCK = 64  # queries of a block where nothing else was chosen
# attention probabilities of a layer saved for the backward pass; a larger number is recomputed
MAX_SAVED_PROBS = 1 << 24


class AttentionBlock:
    """Queries [start, end), which attend to keys [first_key, end)."""

    def __init__(self, start: int, end: int, first_key: int, mask: Tensor | None) -> None:
        self.start, self.end, self.first_key, self.mask = start, end, first_key, mask

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


def attention_blocks(T: int, mask: Tensor | None, size: int) -> Iterator[AttentionBlock]:
    """Cut T queries into blocks of `size`.

    `mask` (B, 1, T, T) is one of `document_mask`: the first key of a token is never before that of an earlier token.
    """
    starts = range(0, T, size)
    first_keys = [0] * len(starts) if mask is None else mask[:, 0, ::size].int().argmax(-1).amin(0).tolist()
    for start, first_key in zip(starts, first_keys, strict=True):
        yield AttentionBlock(start, min(start + size, T), first_key, mask)


@custom_op("lm_runner::attention")
def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, save_probs: bool, query_block: int = QUERY_BLOCK
) -> tuple[Tensor, Tensor]:
    """q: (B, N, T, H); k, v: (B, K, T, H) -> (B, N, T, H), and the probabilities of all blocks, flat; empty without
    `save_probs`.
    """
    out, saved = _empty_like(q), _probs_buffer(q, save_probs, query_block)
    q, k, v, offset = q * q.shape[-1] ** -0.5, k.contiguous(), v.contiguous(), 0
    for block in attention_blocks(q.shape[2], mask, query_block):
        p = block.probs(block.queries(q, k.shape[1]), k)
        block.write_queries(out, p @ block.keys(v))
        if save_probs:
            saved[offset : offset + p.numel()] = p.flatten()
            offset += p.numel()
    return out, saved


@torch.library.register_fake("lm_runner::attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, save_probs: bool, query_block: int = QUERY_BLOCK
) -> tuple[Tensor, Tensor]:
    return _empty_like(q), _probs_buffer(q, save_probs, query_block)


@custom_op("lm_runner::attention_backward")
def cpu_attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, saved: Tensor, query_block: int = QUERY_BLOCK
) -> tuple[Tensor, Tensor, Tensor]:
    """g: (B, N, T, H), gradient of the output; saved: probabilities of the forward pass, or empty -> gradients of q, k
    and v.
    """
    dq, K, scale, offset = _empty_like(q), k.shape[1], q.shape[-1] ** -0.5, 0
    q, k, v = q * scale, k.contiguous(), v.contiguous()
    dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for block in attention_blocks(q.shape[2], mask, query_block):
        q_block, g_block = block.queries(q, K), block.queries(g, K)
        size = q_block.shape[0] * K * q_block.shape[2] * (block.end - block.first_key)
        p = saved[offset : offset + size].view(*q_block.shape[:3], -1) if len(saved) else block.probs(q_block, k)
        offset += size
        block.keys(dv).add_(p.transpose(-2, -1) @ g_block)
        ds = torch.ops.aten._softmax_backward_data(g_block @ block.keys(v).transpose(-2, -1), p, -1, p.dtype)
        block.write_queries(dq, ds @ block.keys(k))
        block.keys(dk).add_(ds.transpose(-2, -1) @ q_block)
    return dq.mul_(scale), _empty_like(dk, q.dtype).copy_(dk), _empty_like(dv, q.dtype).copy_(dv)


@torch.library.register_fake("lm_runner::attention_backward")
def _(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, saved: Tensor, query_block: int = QUERY_BLOCK
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(q), _empty_like(k), _empty_like(v)


def _empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of the shape of x (B, heads, T, H), stored as (B, T, heads, H): the layout of the
    projections before and after.
    """
    B, N, T, H = x.shape
    return x.new_empty((B, T, N, H), dtype=dtype or x.dtype).transpose(1, 2)


def _probs_buffer(q: Tensor, save_probs: bool, query_block: int) -> Tensor:
    """Return a flat buffer for the probabilities of all blocks if each attends to every earlier token."""
    B, N, T, _ = q.shape
    return q.new_empty(B * N * T * (T + query_block) // 2 if save_probs else 0)


def _save_for_backward(ctx, inputs, output) -> None:
    q, k, v, mask, _, ctx.query_block = inputs
    ctx.save_for_backward(q, k, v, mask, output[1])


def _backward(ctx, g: Tensor, _) -> tuple[Tensor | None, ...]:
    q, k, v, mask, saved = ctx.saved_tensors
    return *cpu_attention_backward(g.contiguous(), q, k, v, mask, saved, ctx.query_block), None, None, None


torch.library.register_autograd("lm_runner::attention", _backward, setup_context=_save_for_backward)
