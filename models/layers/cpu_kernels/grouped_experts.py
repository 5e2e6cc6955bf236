"""The SwiGLU networks of all experts of a layer as one operator on tokens sorted by expert: few operators per expert,
and in fp32 no copies of weights.

Each expert has a block of rows of one buffer; the rows that round its tokens up are zeros. The backward pass gathers
the tokens again and computes silu(gate) * up again: neither is saved.

Shapes: N tokens, k experts per token, D hidden size, F width of an expert, R rows of the buffer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.cpu_kernels.fused_mlp import call_swiglu, supports_width
from models.layers.cpu_kernels.fused_projection import supports_gradients, weight_gradients
from models.layers.ops import custom_op, join_weights


@custom_op("lm_runner::grouped_experts")
def grouped_experts(
    x: Tensor,
    slots: Tensor,
    sizes: list[int],
    gate_weights: list[Tensor],
    up_weights: list[Tensor],
    down_weights: list[Tensor],
    use_kernels: bool,
) -> tuple[Tensor, Tensor]:
    """x: (N, D); slots: (N, k) rows of the buffer, each once; sizes: rows of each expert; weights: (F, D), (F, D) and
    (D, F), of any floating-point type -> outputs (N, k, D), and gate and up side by side (R, 2F), in the type of x.

    `use_kernels`: compute silu(gate) * up, and gradients of fp32 weights from operands in bf16, by the C++ kernels,
    which round to bf16 less often.
    """
    rows = _to_buffer(x.unsqueeze(1), slots, sum(sizes))
    gate_up = x.new_empty(len(rows), 2 * len(gate_weights[0]))
    for x_e, gate_up_e, *weights in zip(rows.split(sizes), gate_up.split(sizes), gate_weights, up_weights, strict=True):
        if len(x_e) and _is_cast(weights, x):
            torch.mm(x_e, join_weights(weights, x.dtype).t(), out=gate_up_e)
        elif len(x_e):
            for weight, part in zip(weights, gate_up_e.chunk(2, dim=1), strict=True):
                torch.mm(x_e, weight.t(), out=part)
    if use_kernels and _has_kernel(gate_up):
        h = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        call_swiglu("lm_runner_swiglu_forward", gate_up, h)
    else:
        gate, up = gate_up.chunk(2, dim=1)
        h = F.silu(gate).mul_(up)
    out = torch.empty_like(rows)
    for h_e, out_e, weight in zip(h.split(sizes), out.split(sizes), down_weights, strict=True):
        if len(h_e):
            torch.mm(h_e, weight.to(x.dtype).t(), out=out_e)
    return _from_buffer(out, slots), gate_up


def _is_cast(weights: list[Tensor], x: Tensor) -> bool:
    return any(weight.dtype != x.dtype for weight in weights)


def _has_kernel(gate_up: Tensor) -> bool:
    return supports_width(gate_up.dtype, gate_up.shape[1] // 2)


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
    x, slots, ctx.sizes, *weights, ctx.use_kernels = inputs
    ctx.save_for_backward(x, slots, output[1], *(weight for part in weights for weight in part))
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, g: Tensor, _) -> tuple[object, ...]:
    x, slots, gate_up, *weights = ctx.saved_tensors
    E, sizes = len(ctx.sizes), ctx.sizes
    needs_weights = any(weight.requires_grad for weight in weights)
    gate_weights, up_weights, down_weights = weights[:E], weights[E : 2 * E], weights[2 * E :]
    g = _to_buffer(g, slots, len(gate_up))
    dh = g.new_empty(len(g), gate_up.shape[1] // 2)
    for g_e, dh_e, weight in zip(g.split(sizes), dh.split(sizes), down_weights, strict=True):
        if len(g_e):
            torch.mm(g_e, weight.to(g.dtype), out=dh_e)
    h, dgate_up = _activation_gradient(gate_up, dh, ctx.use_kernels)
    del dh
    drows = torch.empty_like(g)
    for drows_e, dgate_up_e, *pair in zip(
        drows.split(sizes), dgate_up.split(sizes), gate_weights, up_weights, strict=True
    ):
        if len(drows_e) and _is_cast(pair, g):
            torch.mm(dgate_up_e, join_weights(pair, g.dtype), out=drows_e)
        elif len(drows_e):
            dgate_e, dup_e = dgate_up_e.chunk(2, dim=1)
            torch.mm(dgate_e, pair[0], out=drows_e).addmm_(dup_e, pair[1])
    dx = _from_buffer(drows, slots).sum(1)
    del drows
    if not needs_weights:
        return dx, None, None, [None] * E, [None] * E, [None] * E, None
    rows = _to_buffer(x.unsqueeze(1), slots, len(gate_up))
    gate_gradients, up_gradients, down_gradients = [], [], []
    for g_e, h_e, dgate_up_e, x_e, *triple in zip(
        *(y.split(sizes) for y in (g, h, dgate_up, rows)), gate_weights, up_weights, down_weights, strict=True
    ):
        gate_gradient, up_gradient = _weight_gradients(dgate_up_e, x_e, triple[:2], ctx.use_kernels)
        gate_gradients.append(gate_gradient)
        up_gradients.append(up_gradient)
        down_gradients += _weight_gradients(g_e, h_e, triple[2:], ctx.use_kernels)
    return dx, None, None, gate_gradients, up_gradients, down_gradients, None


def _activation_gradient(gate_up: Tensor, dh: Tensor, use_kernels: bool) -> tuple[Tensor, Tensor]:
    """gate_up: (R, 2F), dh: (R, F) -> silu(gate) * up (R, F) and the gradient of gate_up (R, 2F).

    The kernel overwrites dh.
    """
    gradient = torch.empty_like(gate_up)
    if use_kernels and _has_kernel(gate_up):
        call_swiglu("lm_runner_swiglu_backward", gate_up, dh, gradient)
        return dh, gradient
    (gate, up), (dgate, dup) = gate_up.chunk(2, dim=1), gradient.chunk(2, dim=1)
    silu = F.silu(gate)
    torch.mul(silu, dh, out=dup)
    torch.ops.aten.silu_backward.grad_input(dh * up, gate, grad_input=dgate)
    return silu.mul_(up), gradient


def _weight_gradients(g: Tensor, x: Tensor, weights: list[Tensor], use_kernels: bool) -> list[Tensor]:
    """g: (n, sum of O_i), x: (n, I) -> (O_i, I) of each weight in its type; zeros without tokens, for other ranks wait
    for them.
    """
    sizes = [len(weight) for weight in weights]
    if use_kernels and supports_gradients(g, x, weights):
        return weight_gradients(g, x, sizes)
    return [(part.t() @ x).to(weight.dtype) for part, weight in zip(g.split(sizes, dim=1), weights, strict=True)]


torch.library.register_autograd("lm_runner::grouped_experts", _backward, setup_context=_save_for_backward)
