"""SwiGLU feed-forward network. Shapes: B rows, T tokens, D hidden size, F width of the network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.families.decoder import DecoderConfig
from models.layers.fused_linear import fused_projection


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up. The backward pass recomputes silu(gate), which autograd would save."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(g * up, gate), g * F.silu(gate)


class MLP(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202): down(silu(gate(x)) * up(x)). (..., D) -> (..., D)."""

    def __init__(self, cfg: DecoderConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = fused_projection(x, self.gate_proj, self.up_proj)  # (..., F)
        return self.down_proj(SwiGLU.apply(gate, up))
