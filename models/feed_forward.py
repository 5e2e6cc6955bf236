"""What a layer does to each position by itself: one feed-forward network, or a mixture of them, the experts.

Shapes: B lines, T positions, S sequences (of packed lines several a line, else one), D hidden size, E experts, k of them chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.linear import project


class Slots(NamedTuple):
    """Which sequence each position belongs to."""

    of: Tensor  # (B, T) number of the sequence; S, one too many, for padding
    lengths: Tensor  # (S,)

    def mean(self, values: Tensor) -> Tensor:
        """(B, T, E) -> (S, E): over the positions of each sequence."""
        S, E = len(self.lengths), values.shape[-1]
        sums = values.new_zeros(S + 1, E).index_add(0, self.of.flatten(), values.reshape(-1, E))[:S]
        return sums / self.lengths.clamp(min=1).unsqueeze(-1)


class Gated(torch.autograd.Function):
    """silu(gate) * up. The backward pass makes silu(gate) again: left to itself torch keeps it."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(g * up, gate), g * F.silu(gate)


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, cfg: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        return self.down_proj(Gated.apply(gate, up))


class Experts(nn.Module):
    """A mixture of feed-forward experts, each token through its best few (Qwen3-MoE, https://arxiv.org/abs/2505.09388)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = nn.Linear(cfg.hidden_size, cfg.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(cfg, cfg.moe_intermediate_size) for _ in range(cfg.num_experts))

    def forward(self, x: Tensor, slots: Slots | None) -> tuple[Tensor, Tensor]:
        """x: (B, T, D) -> the mixture (B, T, D), and each sequence's balance loss (S,)."""
        B, T, D = x.shape
        flat = x.reshape(-1, D)
        shares = self.gate(flat).softmax(-1, dtype=torch.float32)  # (B*T, E)
        weights, chosen = shares.topk(self.cfg.num_experts_per_tok, dim=-1)  # (B*T, k)
        if self.cfg.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        y = (self._visits(flat, chosen) * weights.unsqueeze(-1)).sum(1).to(flat.dtype)
        return y.view(B, T, D), self._balance(shares.view(B, T, -1), chosen.view(B, T, -1), slots)

    def _visits(self, flat: Tensor, chosen: Tensor) -> Tensor:
        """What each token (B*T, D) hears from each expert it chose (B*T, k): (B*T, k, D). Sorted by expert the visits of each lie together.

        index_select gives the same bits each time on the CPU, backwards too; the gradient of flat[tokens] does not. An expert that
        nobody chose works on nothing, so that its weights have a gradient all the same: ranks wait for it.
        """
        visits = chosen.flatten()
        order = visits.argsort(stable=True)
        groups = flat.index_select(0, order // chosen.shape[1]).split(visits.bincount(minlength=len(self.experts)).tolist())
        heard = torch.cat([expert(group) for expert, group in zip(self.experts, groups, strict=True)])
        return heard.index_select(0, order.argsort()).view(*chosen.shape, -1)

    def _balance(self, shares: Tensor, chosen: Tensor, slots: Slots | None) -> Tensor:
        """E * sum_e f_e P_e of the Switch Transformer (https://arxiv.org/abs/2101.03961, equation 4), for each sequence by itself
        as in DeepSeek-V2 (https://arxiv.org/abs/2405.04434, section 2.2.3): so it adds up over micro-batches, ranks and packed lines."""
        visits = F.one_hot(chosen, self.cfg.num_experts).sum(-2).to(shares.dtype) / chosen.shape[-1]  # (B, T, E)
        f, p = (values.mean(1) if slots is None else slots.mean(values) for values in (visits, shares))
        return self.cfg.num_experts * (f * p).sum(-1)
