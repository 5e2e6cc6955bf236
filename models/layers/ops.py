"""Operators shared by the layers: custom operators, which torch.compile calls without tracing their bodies, and the
fused projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")
ROUND_TOKENS_TO = 64  # oneDNN compiles a product in 16 bits for each new number of tokens, which takes up to 20 ms


def custom_op(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as operator `name` for every device.

    It must not mutate its inputs, nor return tensors that share memory with them.

    `torch.library.custom_op` does the same, but its operators import the compiler when they are first called: one
    second at every start.
    """

    def define(function: Callable[P, T]) -> Callable[P, T]:
        torch.library.define(
            name, torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag
        )
        torch.library.impl(name, "default", function)
        namespace, _, op_name = name.partition("::")
        return cast(Callable[P, T], getattr(getattr(torch.ops, namespace), op_name).default)

    return define


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of `x`: autocast's if it is enabled, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def pad_tokens(x: Tensor, *, is_inference: bool = False) -> Tensor:
    """x: (n, D) -> (m, D), zeros after its rows; m: n, in 16 bits on the CPU n rounded up to ROUND_TOKENS_TO.

    With `is_inference` fewer tokens than that are rounded up to a power of 2: a step of generation has few, and a
    product of 64 rows takes up to ten times as long as that of one. There are seven such numbers, so few products are
    compiled.
    """
    n = len(x)
    if x.device.type != "cpu" or compute_dtype(x).itemsize != 2:
        return x
    is_small = is_inference and 0 < n < ROUND_TOKENS_TO
    missing = (1 << (n - 1).bit_length()) - n if is_small else -n % ROUND_TOKENS_TO
    return torch.cat([x, x.new_zeros(missing, x.shape[1])]) if missing else x


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums of losses are added up: fp64, or fp32 on mps, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def fused_projection(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Return `linear(x)` of each: one matrix product if all are plain linear layers, with or without bias; layers with
    adapters run one by one.
    """
    if any(type(linear) is not nn.Linear for linear in linears):
        return tuple(linear(x) for linear in linears)
    x = x.to(compute_dtype(x))
    bias = None if linears[0].bias is None else torch.cat([linear.bias.to(x.dtype) for linear in linears])
    y = joined_projection(x, [linear.weight for linear in linears], bias)
    return y.split([linear.out_features for linear in linears], dim=-1)


@custom_op("lm_runner::joined_projection")
def joined_projection(x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
    """x: (..., D); weights: (O_i, D) of any floating-point type; bias: (sum of O_i,) of the type of x -> (..., sum of
    O_i) in the type of x.

    The joined weight in the type of x exists for the time of a product only: the backward pass joins the weights again,
    and saves none.
    """
    return F.linear(x, join_weights(weights, x.dtype), bias)


@custom_op("lm_runner::joined_projection_backward")
def projection_gradients(g: Tensor, x: Tensor, weights: list[Tensor], needs_weights: bool) -> list[Tensor]:
    """g: (..., sum of O_i), gradient of the output -> gradients of x and, with `needs_weights`, of each weight in its
    type.
    """
    gradients = [g @ join_weights(weights, g.dtype)]
    if needs_weights:
        # a product for each: one for all would have to be copied
        parts = g.flatten(0, -2).split([weight.shape[0] for weight in weights], dim=1)
        gradients += [
            (part.mT @ x.flatten(0, -2)).to(weight.dtype) for part, weight in zip(parts, weights, strict=True)
        ]
    return gradients


def join_weights(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
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


def register_projection(name: str, gradients: Callable[[Tensor, Tensor, list[Tensor], bool], list[Tensor]]) -> None:
    """Let the compiler and autograd know the operator `name`, of the arguments of `joined_projection`; `gradients`:
    that of its backward pass, `name`_backward.
    """

    def empty_output(x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
        return x.new_empty((*x.shape[:-1], sum(weight.shape[0] for weight in weights)))

    def empty_gradients(g: Tensor, x: Tensor, weights: list[Tensor], needs_weights: bool) -> list[Tensor]:
        return [x.new_empty(x.shape), *(weight.new_empty(weight.shape) for weight in weights if needs_weights)]

    def save(ctx, inputs, output) -> None:
        x, weights, _ = inputs
        ctx.save_for_backward(x, *weights)

    def backward(ctx, g: Tensor) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
        x, *weights = ctx.saved_tensors
        needs_weights = any(weight.requires_grad for weight in weights)
        dx, *dw = gradients(g, x, weights, needs_weights)
        return (
            dx,
            list(dw) if needs_weights else [None] * len(weights),
            g.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None,
        )

    torch.library.register_fake(name, empty_output)
    torch.library.register_fake(f"{name}_backward", empty_gradients)
    torch.library.register_autograd(name, backward, setup_context=save)


register_projection("lm_runner::joined_projection", projection_gradients)
