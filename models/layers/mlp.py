"""What a layer does to each position by itself: one feed-forward network, or a mixture of them, the experts.

Shapes: B lines, T positions, S sequences (of packed lines several a line, else one), D hidden size, E experts, k of them chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.layers.fused_linear import fused_projection


class SequenceIndex(NamedTuple):
    """Which sequence each position belongs to."""

    of: Tensor  # (B, T) number of the sequence; S, one too many, for padding
    lengths: Tensor  # (S,)

    def mean(self, values: Tensor) -> Tensor:
        """(B, T, E) -> (S, E): over the positions of each sequence."""
        S, E = len(self.lengths), values.shape[-1]
        sums = values.new_zeros(S + 1, E).index_add(0, self.of.flatten(), values.reshape(-1, E))[:S]
        return sums / self.lengths.clamp(min=1).unsqueeze(-1)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up. The backward pass makes silu(gate) again: left to itself torch keeps it."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(g * up, gate), g * F.silu(gate)


class MLP(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, cfg: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = fused_projection(x, self.gate_proj, self.up_proj)
        return self.down_proj(SwiGLU.apply(gate, up))
