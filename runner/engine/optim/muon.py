"""Muon (https://kellerjordan.github.io/posts/muon) for the hidden matrices, AdamW for embeddings, output layer, norms
and biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import UserError
from runner.engine.optim.adamw import AdamWConfig
from runner.engine.optim.config import ParamGroups, register_optimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer


@register_optimizer("muon")
@dataclass
class MuonConfig(AdamWConfig):
    """`betas` and `eps` are those of AdamW."""

    momentum: float  # decay rate of Muon's momentum, in [0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise UserError(
                f"optimizer.momentum must be in [0, 1), got {self.momentum}",
                f"optimizer.momentum={self.momentum}",
                "e.g. optimizer.momentum=0.95",
            )

    def build(self, groups: ParamGroups) -> list[Optimizer]:
        from runner.engine.optim.torch_optimizers import Muon

        # a GPU waits for launches; where ranks share the matrices, each is gathered alone
        matrices = [p for group in groups.decay for p in group["params"]]
        is_batched = all(p.is_cuda and not hasattr(p, "placements") for p in matrices)
        muon = Muon(groups.decay, self.lr, self.momentum, "bf16-batched" if is_batched else "bf16")
        return [muon, *super().build(ParamGroups([], groups.no_decay))] if groups.no_decay else [muon]
