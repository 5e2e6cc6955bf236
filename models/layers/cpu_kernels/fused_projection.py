"""Linear layers on x86 CPUs whose weights get their gradients from the C++ kernel: in fp32, from operands in bf16,
without a rounding to bf16.

Shapes: D inputs, O_i outputs of a layer, n tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.cpu_kernels.fused_attention import LANES
from models.layers.cpu_kernels.library import call_kernel
from models.layers.cpu_kernels.upcast_products import are_products_upcast, multiply, projection_gradients_upcast
from models.layers.ops import custom_op, join_weights, projection_gradients, register_projection

ROWS_MULTIPLE = 32


def fused_linear(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Return `linear(x)` of each of the plain linear layers: one matrix product."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias.to(x.dtype) for linear in linears])
    y = kernel_projection(x, [linear.weight for linear in linears], bias)
    return y.split([linear.out_features for linear in linears], dim=-1)


@custom_op("lm_runner::kernel_projection")
def kernel_projection(x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
    """x: (..., D); weights: (O_i, D) of any floating-point type; bias: (sum of O_i,) of the type of x -> (..., sum of
    O_i) in the type of x.
    """
    return F.linear(x, join_weights(weights, x.dtype), bias)


@custom_op("lm_runner::kernel_projection_backward")
def kernel_projection_backward(g: Tensor, x: Tensor, weights: list[Tensor], needs_weights: bool) -> list[Tensor]:
    """g: (..., sum of O_i), gradient of the output -> gradients of x and, with `needs_weights`, of each weight in its
    type.
    """
    if not needs_weights or not supports_gradients(g, x, weights):
        return projection_gradients(g, x, weights, needs_weights)
    sizes = [len(weight) for weight in weights]
    if are_products_upcast():
        dx, dw = projection_gradients_upcast(g.flatten(0, -2), x.flatten(0, -2), join_weights(weights, g.dtype), sizes)
        return [dx.view_as(x), *dw]
    gradients = weight_gradients(g.flatten(0, -2), x.flatten(0, -2), sizes)
    return [*projection_gradients(g, x, weights, False), *gradients]


register_projection("lm_runner::kernel_projection", kernel_projection_backward)


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
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (g, x, packed))
    outputs = (ctypes.c_void_p * len(sizes))(*(gradient.data_ptr() for gradient in gradients))
    numbers = (ctypes.c_int64(number) for number in (rows, g.shape[1], width, len(sizes)))
    call_kernel(
        "lm_runner_weight_gradients",
        *addresses,
        *numbers,
        (ctypes.c_int64 * len(sizes))(*sizes),
        outputs,
        ctypes.c_int(torch.get_num_threads()),
    )
    return gradients
