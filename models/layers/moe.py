"""FIXME models.layers.moe."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.layers.mlp import MLP, SequenceIndex


class MoE(nn.Module):
    """A mixture of feed-forward experts, each token through its best few (Qwen3-MoE, https://arxiv.org/abs/2505.09388)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = nn.Linear(cfg.hidden_size, cfg.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(cfg, cfg.moe_intermediate_size) for _ in range(cfg.num_experts))

    def forward(self, x: Tensor, slots: SequenceIndex | None) -> tuple[Tensor, Tensor]:
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

    def _balance(self, shares: Tensor, chosen: Tensor, slots: SequenceIndex | None) -> Tensor:
        """E * sum_e f_e P_e of the Switch Transformer (https://arxiv.org/abs/2101.03961, equation 4), for each sequence by itself
        as in DeepSeek-V2 (https://arxiv.org/abs/2405.04434, section 2.2.3): so it adds up over micro-batches, ranks and packed lines."""
        visits = F.one_hot(chosen, self.cfg.num_experts).sum(-2).to(shares.dtype) / chosen.shape[-1]  # (B, T, E)
        f, p = (values.mean(1) if slots is None else slots.mean(values) for values in (visits, shares))
        return self.cfg.num_experts * (f * p).sum(-1)
