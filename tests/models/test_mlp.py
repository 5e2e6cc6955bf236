"""Gradients of the feed-forward layers against finite differences."""

from __future__ import annotations

import torch

from models.layers.mlp import SwiGLU


def test_swiglu_gradient_equals_finite_differences() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(SwiGLU.apply, (gate, up))
