"""Activation checkpointing: recompute activations in the backward pass instead of saving them, time for memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from models.layers.attention_cpu import cpu_attention
from models.layers.cpu_kernels.fused_attention import fused_attention
from models.layers.cpu_kernels.fused_mlp import swiglu_output
from models.layers.cpu_kernels.fused_projection import kernel_projection
from models.layers.ops import joined_projection

T = TypeVar("T")

# Outputs that selective checkpointing saves: matrix products and attention (but not its probabilities: see
# `LayerContext.selective`)
SAVED_OPS = [
    *(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm")),
    *(getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")),
    cpu_attention,
    fused_attention,
    joined_projection,
    kernel_projection,
    swiglu_output,
]  # fmt: skip


def recompute_cheap_inputs() -> None:
    """Let compiled layers recompute what a matrix product of the backward pass reads if that is cheap: silu(gate) * up,
    the output of a norm.

    By default the compiler saves it: saved activations are a quarter larger, and a step is 1 % shorter.
    """
    from torch._functorch import config as functorch_config

    functorch_config.ban_recompute_materialized_backward = False


def full_checkpointing(layer: Callable[..., T], *inputs: object) -> T:
    """Call `layer`; the backward pass recomputes all of it."""
    return checkpoint(layer, *inputs, use_reentrant=False)


def selective_checkpointing(layer: Callable[..., T], *inputs: object) -> T:
    """Call `layer`; the backward pass recomputes all but SAVED_OPS: norms, casts, rotary embeddings, activation
    functions.
    """
    return checkpoint(
        layer, *inputs, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, SAVED_OPS)
    )
