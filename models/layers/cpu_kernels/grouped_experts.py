"""The SwiGLU networks of all experts of a layer as one operator on tokens sorted by expert: no copy of joined weights, few operators per expert.

Each expert has a block of rows of one buffer; rows that round its tokens up are zeros. The backward pass gathers the tokens again and computes
silu(gate) * up again: neither is saved.

Shapes: N tokens, k experts per token, E experts, D hidden size, F width of an expert, R rows of the buffer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.cpu_kernels.fused_projection import supports_gradients, weight_gradients
from models.layers.ops import custom_op


@custom_op("lm_runner::grouped_experts")
def grouped_experts(
    x: Tensor, slots: Tensor, sizes: list[int], gate_weights: list[Tensor], up_weights: list[Tensor], down_weights: list[Tensor], exact_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x: (N, D); slots: (N, k) rows of the buffer, each once; sizes: rows of each expert; weights: (F, D), (F, D) and (D, F), of any floating-point type
    -> outputs (N, k, D), gate (R, F) and up (R, F) in the type of x.

    `exact_gradients`: the C++ kernel computes those of fp32 weights in fp32 from operands in bf16; else they are rounded to the type of x.
    """
    rows = _to_buffer(x.unsqueeze(1), slots, sum(sizes))
    gate, up, out = (x.new_empty(len(rows), width) for width in (len(gate_weights[0]), len(gate_weights[0]), x.shape[1]))
    for x_e, gate_e, up_e, w_gate, w_up in zip(*(y.split(sizes) for y in (rows, gate, up)), gate_weights, up_weights, strict=True):
        if len(x_e):
            torch.mm(x_e, w_gate.to(x.dtype).t(), out=gate_e)
            torch.mm(x_e, w_up.to(x.dtype).t(), out=up_e)
    for h_e, out_e, w_down in zip((F.silu(gate).mul_(up)).split(sizes), out.split(sizes), down_weights, strict=True):
        if len(h_e):
            torch.mm(h_e, w_down.to(x.dtype).t(), out=out_e)
    return _from_buffer(out, slots), gate, up


def _to_buffer(x: Tensor, slots: Tensor, size: int) -> Tensor:
    """x: (N, k, D), or (N, 1, D) for all k -> (size, D), zeros in rows without a token."""
    rows = x.new_zeros(size, x.shape[-1]) if size > slots.numel() else x.new_empty(size, x.shape[-1])
    for choice, slots_of_choice in enumerate(slots.unbind(1)):
        rows.index_copy_(0, slots_of_choice, x[:, choice % x.shape[1]])
    return rows


def _from_buffer(rows: Tensor, slots: Tensor) -> Tensor:
    """rows: (R, D) -> (N, k, D)."""
    return rows.index_select(0, slots.flatten()).view(*slots.shape, -1)


def _save_for_backward(ctx, inputs, output) -> None:
    x, slots, ctx.sizes, *weights, ctx.exact_gradients = inputs
    _, gate, up = output
    ctx.save_for_backward(x, slots, gate, up, *(w for part in weights for w in part))
    ctx.mark_non_differentiable(gate, up)


def _backward(ctx, g: Tensor, *_) -> tuple[object, ...]:
    x, slots, gate, up, *weights = ctx.saved_tensors
    E, sizes = len(ctx.sizes), ctx.sizes
    needs_weights = any(weight.requires_grad for weight in weights)
    gate_weights, up_weights, down_weights = weights[:E], weights[E : 2 * E], weights[2 * E :]
    g = _to_buffer(g, slots, len(gate))
    dh = torch.empty_like(gate)
    for g_e, dh_e, w_down in zip(g.split(sizes), dh.split(sizes), down_weights, strict=True):
        if len(g_e):
            torch.mm(g_e, w_down.to(g.dtype), out=dh_e)
    silu = F.silu(gate)
    h, dup, dgate = silu * up, silu.mul_(dh), torch.ops.aten.silu_backward(dh.mul_(up), gate)
    drows = torch.empty_like(g)
    for drows_e, dgate_e, dup_e, w_gate, w_up in zip(*(y.split(sizes) for y in (drows, dgate, dup)), gate_weights, up_weights, strict=True):
        if len(drows_e):
            torch.mm(dgate_e, w_gate.to(g.dtype), out=drows_e).addmm_(dup_e, w_up.to(g.dtype))
    dx = _from_buffer(drows, slots).sum(1)
    if not needs_weights:
        return dx, None, None, [None] * E, [None] * E, [None] * E, None
    del drows
    rows = _to_buffer(x.unsqueeze(1), slots, len(gate))
    gradients = [
        [_weight_gradient(left_e, right_e, weight, ctx.exact_gradients) for left_e, right_e, weight in zip(left.split(sizes), right.split(sizes), part, strict=True)]
        for left, right, part in ((dgate, rows, gate_weights), (dup, rows, up_weights), (g, h, down_weights))
    ]
    return dx, None, None, *gradients, None


def _weight_gradient(g: Tensor, x: Tensor, weight: Tensor, is_exact: bool) -> Tensor:
    """g: (n, O), x: (n, I) -> (O, I) in the type of the weight; zeros without tokens, for other ranks wait for it."""
    if is_exact and supports_gradients(g, x, [weight]):
        return weight_gradients(g, x, [len(weight)])[0]
    return (g.t() @ x).to(weight.dtype)


torch.library.register_autograd("lm_runner::grouped_experts", _backward, setup_context=_save_for_backward)
