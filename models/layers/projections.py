"""Linear layers with the same input as one matrix product, and the output of a SwiGLU network; on x86 CPUs gradients of
weights and silu(gate) * up by the C++ kernels.

The kernel computes gradients of weights in fp32, from operands in bf16, without a rounding to bf16.

Shapes: D inputs, O_i outputs of a layer, n tokens, F width of a network.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.cpu_kernels.fused_attention import LANES
from models.layers.cpu_kernels.library import call_kernel
from models.layers.cpu_kernels.upcast_products import are_products_upcast, multiply
from models.layers.ops import compute_dtype, custom_op

ROWS_MULTIPLE = 32


def fused_projection(x: Tensor, *linears: nn.Linear, use_kernel: bool = False) -> tuple[Tensor, ...]:
    """Return `linear(x)` of each: one matrix product if all are plain linear layers, with or without bias; layers with
    adapters run one by one. `use_kernel`: for gradients of weights.

    One product needs a copy of the weights side by side. Where it casts none of them, and x, (..., D), has fewer than D
    tokens, a product for each is faster: a token of a chat in fp32 takes half the time. The gradients of x differ by
    rounding.
    """
    # a compiler for a GPU fuses the casts of the weights, and cannot look into an operator
    if any(type(linear) is not nn.Linear for linear in linears) or (x.is_cuda and torch.compiler.is_compiling()):
        return tuple(linear(x) for linear in linears)
    x = x.to(compute_dtype(x))
    if len(linears) > 1 and x.dtype == linears[0].weight.dtype and x.numel() < x.shape[-1] ** 2:
        return tuple(linear(x) for linear in linears)
    bias = None if linears[0].bias is None else torch.cat([linear.bias.to(x.dtype) for linear in linears])
    y = joined_projection(x, [linear.weight for linear in linears], bias, use_kernel)
    return y.split([linear.out_features for linear in linears], dim=-1)


@custom_op("lm_runner::joined_projection", is_saved=True)
def joined_projection(x: Tensor, weights: list[Tensor], bias: Tensor | None, use_kernel: bool) -> Tensor:
    """x: (..., D); weights: (O_i, D) of any floating-point type; bias: (sum of O_i,) of the type of x -> (..., sum of
    O_i) in the type of x.

    The joined weight in the type of x exists for the time of a product only: the backward pass joins the weights again,
    and saves none.
    """
    return F.linear(x, _join_weights(weights, x.dtype), bias)


@torch.library.register_fake("lm_runner::joined_projection")
def _(x: Tensor, weights: list[Tensor], bias: Tensor | None, use_kernel: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(len(weight) for weight in weights)))


@custom_op("lm_runner::joined_projection_backward")
def projection_gradients(
    g: Tensor, x: Tensor, weights: list[Tensor], needs_weights: bool, use_kernel: bool
) -> list[Tensor]:
    """g: (..., sum of O_i), gradient of the output -> gradients of x and, with `needs_weights`, of each weight in its
    type.
    """
    joined = _join_weights(weights, g.dtype)
    if not needs_weights:
        return [g @ joined]
    return [g @ joined, *_gradients_of(weights, g.flatten(0, -2), x.flatten(0, -2), use_kernel)]


@torch.library.register_fake("lm_runner::joined_projection_backward")
def _(g: Tensor, x: Tensor, weights: list[Tensor], needs_weights: bool, use_kernel: bool) -> list[Tensor]:
    return [x.new_empty(x.shape), *(weight.new_empty(weight.shape) for weight in weights if needs_weights)]


def _save_projection(ctx, inputs, output) -> None:
    x, weights, _, ctx.use_kernel = inputs
    ctx.save_for_backward(x, *weights)


def _projection_backward(ctx, g: Tensor) -> tuple[Tensor, list[Tensor | None], Tensor | None, None]:
    x, *weights = ctx.saved_tensors
    needs_weights = any(weight.requires_grad for weight in weights)
    dx, *dw = projection_gradients(g, x, weights, needs_weights, ctx.use_kernel)
    bias_gradient = g.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
    return dx, list(dw) if needs_weights else [None] * len(weights), bias_gradient, None


torch.library.register_autograd("lm_runner::joined_projection", _projection_backward, setup_context=_save_projection)


def _join_weights(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weights (O_i, D) as one (sum of O_i, D) in `dtype`, cast while they are copied.

    One weight that has this type is not copied.
    """
    if len(weights) == 1:
        return weights[0].to(dtype)
    joined = weights[0].new_empty((sum(weight.shape[0] for weight in weights), weights[0].shape[1]), dtype=dtype)
    start = 0
    for weight in weights:
        joined[start : start + weight.shape[0]] = weight
        start += weight.shape[0]
    return joined


def _gradients_of(weights: list[Tensor], g: Tensor, x: Tensor, use_kernel: bool) -> list[Tensor]:
    """weights: (O_i, D); g: (n, sum of O_i), x: (n, D) -> the gradient of each weight in its type."""
    sizes = [len(weight) for weight in weights]
    if use_kernel and supports_gradients(g, x, weights):
        return weight_gradients(g, x, sizes)
    # a product for each: one for all would have to be copied
    return [(part.mT @ x).to(weight.dtype) for part, weight in zip(g.split(sizes, dim=1), weights, strict=True)]


def supports_gradients(g: Tensor, x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether the kernel computes the gradients of `weights` (O_i, D) from g (..., sum of O_i) and x (..., D)."""
    is_bf16 = g.dtype == x.dtype == torch.bfloat16 and g.device.type == "cpu" and g.numel() > 0
    return is_bf16 and all(
        weight.dtype == torch.float32 and weight.numel() > 0 and not any(size % LANES for size in weight.shape)
        for weight in weights
    )


def weight_gradients(g: Tensor, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """g: (n, sum of sizes), x: (n, D), bf16 -> g[:, part].T @ x of each part, (size, D) in fp32: the sums are not
    rounded to bf16.
    """
    gradients = [x.new_empty(size, x.shape[1], dtype=torch.float32) for size in sizes]
    if are_products_upcast():
        return [
            multiply(part.t(), x, gradient) for part, gradient in zip(g.split([*sizes], dim=1), gradients, strict=True)
        ]
    g, x = g.contiguous(), x.contiguous()
    rows, width = x.shape
    packed = x.new_empty(-(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE * width)
    call_kernel("lm_runner_weight_gradients", g, x, packed, rows, g.shape[1], width, len(sizes), [*sizes], gradients)
    return gradients


@custom_op("lm_runner::swiglu_output", is_saved=True)
def swiglu_output(gate_up: Tensor, weight: Tensor) -> Tensor:
    """gate_up: (..., 2F), gate and up side by side; weight: (D, F) of any floating-point type -> (..., D) in the type
    of gate_up: silu(gate) * up by the kernel, times the weight.

    The backward pass computes silu(gate) * up again, in the pass that computes its gradients: none of it is saved.
    """
    gate_up = gate_up.contiguous()
    h = gate_up.new_empty((*gate_up.shape[:-1], weight.shape[1]))
    _call_swiglu("lm_runner_swiglu_forward", gate_up, h)
    return F.linear(h, weight.to(h.dtype))


@torch.library.register_fake("lm_runner::swiglu_output")
def _(gate_up: Tensor, weight: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], weight.shape[0]))


@custom_op("lm_runner::swiglu_output_backward")
def swiglu_output_backward(g: Tensor, gate_up: Tensor, weight: Tensor, needs_weight: bool) -> list[Tensor]:
    """g: (..., D), gradient of the output -> gradients of gate_up and, with `needs_weight`, of weight."""
    gate_up = gate_up.contiguous()
    h = (g @ weight.to(g.dtype)).contiguous()  # its gradient, which the kernel overwrites
    gradient = torch.empty_like(gate_up)
    _call_swiglu("lm_runner_swiglu_backward", gate_up, h, gradient)
    if not needs_weight:
        return [gradient]
    return [gradient, *_gradients_of([weight], g.flatten(0, -2), h.flatten(0, -2), use_kernel=True)]


@torch.library.register_fake("lm_runner::swiglu_output_backward")
def _(g: Tensor, gate_up: Tensor, weight: Tensor, needs_weight: bool) -> list[Tensor]:
    return [gate_up.new_empty(gate_up.shape), *([weight.new_empty(weight.shape)] if needs_weight else [])]


def _call_swiglu(name: str, gate_up: Tensor, *others: Tensor) -> None:
    """Call a kernel of swiglu.cpp with contiguous tensors. gate_up: (..., 2F)."""
    width = gate_up.shape[-1] // 2
    call_kernel(name, gate_up, *others, gate_up.numel() // (2 * width), width, gate_up.dtype == torch.bfloat16)


def _save_swiglu(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx, g: Tensor) -> tuple[Tensor, Tensor | None]:
    gate_up, weight = ctx.saved_tensors
    gradient, *rest = swiglu_output_backward(g, gate_up, weight, ctx.needs_input_grad[1])
    return gradient, rest[0] if rest else None


torch.library.register_autograd("lm_runner::swiglu_output", _swiglu_backward, setup_context=_save_swiglu)
