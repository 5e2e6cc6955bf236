"""Operators shared by the layers: custom operators, which torch.compile calls without tracing their bodies, activation
checkpointing, and padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

P = ParamSpec("P")
T = TypeVar("T")
ROUND_TOKENS_TO = 64  # oneDNN compiles a product in 16 bits for each new number of tokens, which takes up to 20 ms

# Outputs that selective checkpointing saves: matrix products and attention (but not its probabilities: see
# `LayerContext.selective`)
SAVED_OPS = [
    *(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm")),
    *(getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")),
]  # fmt: skip

# By mode, what calls a layer with its inputs: time for memory
CHECKPOINTING = {
    # the backward pass computes all of the layer again
    "full": partial(checkpoint, use_reentrant=False),
    # all but SAVED_OPS: norms, casts, rotary embeddings, activation functions
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, SAVED_OPS)
    ),
}


def custom_op(name: str, *, is_saved: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as operator `name` for every device.

    It must not mutate its inputs, nor return tensors that share memory with them. `is_saved`: see SAVED_OPS.

    `torch.library.custom_op` does the same, but its operators import the compiler when they are first called: one
    second at every start.
    """

    def define(function: Callable[P, T]) -> Callable[P, T]:
        torch.library.define(
            name, torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag
        )
        torch.library.impl(name, "default", function)
        namespace, _, op_name = name.partition("::")
        operator = getattr(getattr(torch.ops, namespace), op_name).default
        if is_saved:
            SAVED_OPS.append(operator)
        return cast(Callable[P, T], operator)

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


def empty_heads(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of the shape of x (B, heads, T, H), stored as (B, T, heads, H): the layout of the
    projections before and after attention.
    """
    B, N, T, H = x.shape
    return x.new_empty((B, T, N, H), dtype=dtype or x.dtype).transpose(1, 2)


def empty_gradients(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty gradients of q, k and v, the inputs of an attention operator whose output has the gradient g."""
    return empty_heads(q), empty_heads(k), empty_heads(v)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums of losses are added up: fp64, or fp32 on mps, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64
