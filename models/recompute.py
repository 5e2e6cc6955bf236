"""What the backward pass makes again instead of keeping it: time for memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import models.attention_cpu  # noqa: F401  # its operator is one of those below

T = TypeVar("T")

# Kept, because they are dear: matrix products, and attention by whichever kernel. Its weights are not: see `Context.lean`.
DEAR = [
    *(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "_scaled_mm")),
    *(getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")),
    torch.ops.lm_runner.attention.default,
]  # fmt: skip


def whole(layer: Callable[..., T], *inputs: object) -> T:
    """All of it is made again."""
    return checkpoint(layer, *inputs, use_reentrant=False)


def selective(layer: Callable[..., T], *inputs: object) -> T:
    """What is cheap is made again: norms, casts, positions, activation functions."""
    return checkpoint(layer, *inputs, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, DEAR))
