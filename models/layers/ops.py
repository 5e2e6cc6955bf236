"""Operators shared by the layers: custom operators, which torch.compile calls without tracing their bodies, and the fused projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")


def custom_op(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as operator `name` for every device. It must not mutate its inputs, nor return tensors that share memory with them.

    `torch.library.custom_op` does the same, but its operators import the compiler when they are first called: one second at every start.
    """

    def define(function: Callable[P, T]) -> Callable[P, T]:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", function)
        namespace, _, op_name = name.partition("::")
        return cast(Callable[P, T], getattr(getattr(torch.ops, namespace), op_name).default)

    return define


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of `x`: autocast's if it is enabled, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums of losses are added up: fp64, or fp32 on mps, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def fused_projection(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Return `linear(x)` of each: one matrix product if all are plain linear layers, with or without bias; layers with adapters run one by one."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return tuple(linear(x) for linear in linears)
    weight = torch.cat([linear.weight.to(x.dtype) for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.to(x.dtype) for linear in linears])
    return F.linear(x, weight, bias).split([linear.out_features for linear in linears], dim=-1)
