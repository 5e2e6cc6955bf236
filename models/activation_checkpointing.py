"""What the backward pass makes again instead of keeping it: time for memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from models.layers.attention_cpu import cpu_attention

T = TypeVar("T")

# Kept, because they are dear: matrix products, and attention by whichever kernel. Its weights are not: see `Context.lean`.
SAVED_OPS = [
    *(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "_scaled_mm")),
    *(getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")),
    cpu_attention,
]  # fmt: skip


def full_checkpointing(layer: Callable[..., T], *inputs: object) -> T:
    """All of it is made again."""
    return checkpoint(layer, *inputs, use_reentrant=False)


def selective_checkpointing(layer: Callable[..., T], *inputs: object) -> T:
    """What is cheap is made again: norms, casts, positions, activation functions."""
    return checkpoint(layer, *inputs, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, SAVED_OPS))
