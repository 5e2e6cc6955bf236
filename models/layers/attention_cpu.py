"""Attention on a processor, exact, by plain matrix products: blocks of queries against the keys that they can see.

The flash kernel for processors looks at every key even where a mask hides it, and its bf16 products run at a sixth of what a matrix product
does. Operators of their own: a compiler need not look inside, and what a block sees may depend on the data.

Shapes: B lines, T positions, N query heads, K key/value heads, H head width, r = N / K query heads that share one key head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from models.layers.custom_op import custom_op

QUERY_BLOCK = 64
SCRATCH_BUFFERS = 1 << 24  # attention weights of a layer that are kept for the backward pass; where there are more, it makes them again


class AttentionBlock:
    """Queries from `start` to `end`, which see keys from `first` on; `kept` is their place among the weights that are kept."""

    def __init__(self, start: int, end: int, first: int, mask: Tensor | None) -> None:
        self.start, self.end, self.first, self.mask = start, end, first, mask

    def queries(self, x: Tensor, K: int) -> Tensor:
        """Of (B, N, T, H): (B, K, r * block, H)."""
        B, N, _, H = x.shape
        return x[:, :, self.start : self.end].reshape(B, K, -1, H)

    def put(self, x: Tensor, values: Tensor) -> None:
        """The way back: `values` (B, K, r * block, H) into their place in `x` (B, N, T, H)."""
        B, N, _, H = x.shape
        x[:, :, self.start : self.end] = values.view(B, N, -1, H)

    def keys(self, x: Tensor) -> Tensor:
        return x[:, :, self.first : self.end]

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, K, r * block, keys)"""
        scores = q @ self.keys(k).transpose(-2, -1)
        B, K, _, seen = scores.shape
        own = self.end - self.start
        apart = scores.view(B, K, -1, own, seen)
        if self.mask is None:
            apart[..., seen - own :].masked_fill_(torch.ones(own, own, dtype=torch.bool).triu(1), -torch.inf)
        else:
            hidden = (~self.mask[:, :, self.start : self.end, self.first : self.end]).unsqueeze(2)
            if scores.dtype == torch.float16:  # an overflow in one sequence must not make NaN of another
                apart.masked_fill_(hidden, -torch.inf)
            else:  # cheaper: what is filled is filled for each head
                apart.add_(torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, -torch.inf))
        return scores.softmax(-1)


def attention_blocks(T: int, mask: Tensor | None) -> Iterator[AttentionBlock]:
    """`mask` (B, 1, T, T) is that of packed lines: what a position sees begins where its sequence does, never before that of an earlier position."""
    starts = range(0, T, QUERY_BLOCK)
    firsts = [0] * len(starts) if mask is None else mask[:, 0, ::QUERY_BLOCK].int().argmax(-1).amin(0).tolist()
    for start, first in zip(starts, firsts, strict=True):
        yield AttentionBlock(start, min(start + QUERY_BLOCK, T), first, mask)


@custom_op("lm_runner::attention")
def cpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """q: (B, N, T, H); k, v: (B, K, T, H) -> (B, N, T, H), and the attention weights where they are to be kept."""
    out, kept = _like(q), _room(q, keep)
    q, k, v, at = q * q.shape[-1] ** -0.5, k.contiguous(), v.contiguous(), 0
    for block in attention_blocks(q.shape[2], mask):
        p = block.weights(block.queries(q, k.shape[1]), k)
        block.put(out, p @ block.keys(v))
        if keep:
            kept[at : at + p.numel()] = p.flatten()
            at += p.numel()
    return out, kept


@torch.library.register_fake("lm_runner::attention")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    return _like(q), _room(q, keep)


@custom_op("lm_runner::attention_backward")
def cpu_attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, K, scale, at = _like(q), k.shape[1], q.shape[-1] ** -0.5, 0
    q, k, v = q * scale, k.contiguous(), v.contiguous()
    dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for block in attention_blocks(q.shape[2], mask):
        some, g_some = block.queries(q, K), block.queries(g, K)
        size = some.shape[0] * K * some.shape[2] * (block.end - block.first)
        p = kept[at : at + size].view(*some.shape[:3], -1) if len(kept) else block.weights(some, k)
        at += size
        block.keys(dv).add_(p.transpose(-2, -1) @ g_some)
        ds = torch.ops.aten._softmax_backward_data(g_some @ block.keys(v).transpose(-2, -1), p, -1, p.dtype)
        block.put(dq, ds @ block.keys(k))
        block.keys(dk).add_(ds.transpose(-2, -1) @ some)
    return dq.mul_(scale), _like(dk, q.dtype).copy_(dk), _like(dv, q.dtype).copy_(dv)


@torch.library.register_fake("lm_runner::attention_backward")
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As large as `x` (B, heads, T, H), in memory (B, T, heads, H): as what comes before and after wants it."""
    B, N, T, H = x.shape
    return x.new_empty((B, T, N, H), dtype=dtype or x.dtype).transpose(1, 2)


def _room(q: Tensor, keep: bool) -> Tensor:
    """For the weights of all blocks, were they to see all that is before them."""
    B, N, T, _ = q.shape
    return q.new_empty(B * N * T * (T + QUERY_BLOCK) // 2 if keep else 0)


def _keep(ctx, inputs, output) -> None:
    q, k, v, mask, _ = inputs
    ctx.save_for_backward(q, k, v, mask, output[1])


def _differentiate(ctx, g: Tensor, _) -> tuple[Tensor | None, ...]:
    return *cpu_attention_backward(g.contiguous(), *ctx.saved_tensors), None, None


torch.library.register_autograd("lm_runner::attention", _differentiate, setup_context=_keep)
