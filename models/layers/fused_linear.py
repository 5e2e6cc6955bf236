"""Matrix products: their dtype under autocast, and several linear layers of one input as one product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of `x`: autocast's if it is enabled, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def fused_projection(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Return `linear(x)` of each: one matrix product if all are plain linear layers; layers with adapters run one by one."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return tuple(linear(x) for linear in linears)
    weight = torch.cat([linear.weight.to(x.dtype) for linear in linears])
    return F.linear(x, weight).split([linear.out_features for linear in linears], dim=-1)
