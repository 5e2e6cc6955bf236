"""The second half of a SwiGLU network on x86 CPUs: silu(gate) * up by the C++ kernel, and the product with the weight
of the output.

The backward pass computes silu(gate) * up again, in the pass that computes its gradients: none of it is saved.

Shapes: F width of the network, D hidden size.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.cpu_kernels.fused_attention import FUSED_DTYPES, LANES
from models.layers.cpu_kernels.fused_projection import supports_gradients, weight_gradients
from models.layers.cpu_kernels.library import call_kernel
from models.layers.ops import custom_op


def supports_width(dtype: torch.dtype, width: int) -> bool:
    """Return whether the kernel computes networks of `width`."""
    return dtype in FUSED_DTYPES and width % LANES == 0


@custom_op("lm_runner::swiglu_output")
def swiglu_output(gate_up: Tensor, weight: Tensor) -> Tensor:
    """gate_up: (..., 2F), gate and up side by side; weight: (D, F) of any floating-point type -> (..., D) in the type
    of gate_up.
    """
    gate_up = gate_up.contiguous()
    h = gate_up.new_empty((*gate_up.shape[:-1], weight.shape[1]))
    call_swiglu("lm_runner_swiglu_forward", gate_up, h)
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
    call_swiglu("lm_runner_swiglu_backward", gate_up, h, gradient)
    if not needs_weight:
        return [gradient]
    rows, h = g.flatten(0, -2), h.flatten(0, -2)
    return [
        gradient,
        weight_gradients(rows, h, [len(weight)])[0]
        if supports_gradients(rows, h, [weight])
        else (rows.mT @ h).to(weight.dtype),
    ]


@torch.library.register_fake("lm_runner::swiglu_output_backward")
def _(g: Tensor, gate_up: Tensor, weight: Tensor, needs_weight: bool) -> list[Tensor]:
    return [gate_up.new_empty(gate_up.shape), *([weight.new_empty(weight.shape)] if needs_weight else [])]


def call_swiglu(name: str, gate_up: Tensor, *others: Tensor) -> None:
    """Call a kernel of swiglu.cpp with contiguous tensors. gate_up: (..., 2F)."""
    width = gate_up.shape[-1] // 2
    rows, is_bf16 = gate_up.numel() // (2 * width), gate_up.dtype == torch.bfloat16
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (gate_up, *others))
    call_kernel(
        name,
        *addresses,
        ctypes.c_int64(rows),
        ctypes.c_int64(width),
        ctypes.c_int(is_bf16),
        ctypes.c_int(torch.get_num_threads()),
    )


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, g: Tensor) -> tuple[Tensor, Tensor | None]:
    gate_up, weight = ctx.saved_tensors
    gradient, *rest = swiglu_output_backward(g, gate_up, weight, ctx.needs_input_grad[1])
    return gradient, rest[0] if rest else None


torch.library.register_autograd("lm_runner::swiglu_output", _backward, setup_context=_save_for_backward)
