"""Linear layers whose products are computed in fp8 (https://arxiv.org/abs/2209.05433): e4m3 for weights and activations, e5m2 for gradients.

Each tensor has one scale, read off itself as it is rounded, so there is nothing to remember between steps. Weights and what the optimizer
sees stay as they are. Only where a compiler joins the rounding with what stands beside it can this be faster than bf16.

Shapes: M positions, K channels in, N channels out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.chunked_loss import compute_dtype

WEIGHTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2  # the one has more digits, the other reaches further
SIDE = 16  # each side of a product is a multiple of it
LEAST = 1e-30  # a tensor of zeros has a scale too


class Fp8Linear(nn.Linear):
    """In training only: what is trained will be used in another precision, and is judged as it will be used."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x))
        return product(x, self.weight.to(x.dtype)) if self.training else super().forward(x)


def use_fp8(layers: Iterable[nn.Module]) -> None:
    """From now on the plain linear layers in `layers` compute in fp8, if their sides allow it; weights and their names stay."""
    torch.compiler.allow_in_graph(_Product)  # not here at the top: it imports the compiler, which most runs do without
    for layer in layers:
        for linear in layer.modules():
            if type(linear) is nn.Linear and linear.bias is None and linear.in_features % SIDE == 0 and linear.out_features % SIDE == 0:
                linear.__class__ = Fp8Linear


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in the dtype that both have. x: (..., K); weight: (N, K)"""
    flat = x.reshape(-1, x.shape[-1])
    # The gradient of the weight is summed over positions: they are a side of its product. A compiler has two programs for the two cases.
    missing = -len(flat) % SIDE
    y = _Product.apply(F.pad(flat, (0, 0, 0, missing)) if missing else flat, weight)
    return y[: len(flat)].view(*x.shape[:-1], -1)


def rounded(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in `kind`, divided by a scale () fp32 by which its largest value just fits. What is not finite makes all of it NaN: it shows in the loss."""
    most = torch.finfo(kind).max
    scale = x.abs().amax().float().clamp(min=LEAST) / most
    return (x.float() / scale).clamp(-most, most).to(kind), scale


class _Product(torch.autograd.Function):
    """(M, K), (N, K) -> (M, N). A GPU wants the left factor by rows and the right one by columns."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        (x8, x_scale), (w8, w_scale) = rounded(x, WEIGHTS), rounded(weight, WEIGHTS)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        # Sums may be kept in fewer digits on the way forward; gradients need them all.
        return torch._scaled_mm(x8, w8.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = rounded(g, GRADIENTS)
        dx = torch._scaled_mm(g8, _by_columns(w8), scale_a=g_scale, scale_b=w_scale, out_dtype=g.dtype)
        dw = torch._scaled_mm(g8.t().contiguous(), _by_columns(x8), scale_a=g_scale, scale_b=x_scale, out_dtype=g.dtype)
        return dx, dw


def _by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()
