"""Several linear layers of one input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.fp8 import Fp8Linear, product


def fused_projection(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """What each makes of `x`: one product where they are plain, or all in fp8; an adapter has its own way."""
    kind = type(linears[0])
    if kind not in (nn.Linear, Fp8Linear) or any(type(linear) is not kind for linear in linears):
        return tuple(linear(x) for linear in linears)
    weight = torch.cat([linear.weight.to(x.dtype) for linear in linears])
    y = product(x, weight) if kind is Fp8Linear and linears[0].training else F.linear(x, weight)
    return y.split([linear.out_features for linear in linears], dim=-1)
