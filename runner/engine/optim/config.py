"""FIXME runner.engine.optim.config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    pass


@dataclass
class OptimizerConfig:
    name: str
    lr: float
    weight_decay: float
    betas: list[float]
    eps: float
    grad_clip: float  # largest norm of the whole gradient; 0: no clipping
    layer_decay: float  # lr factor from each layer to the one below it; 1: the same lr everywhere
    momentum: float  # Muon's, for the matrices; AdamW has betas

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "muon"):
            raise UserError("unknown optimizer", f"optimizer.name={self.name}", "choose adamw or muon")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError("a learning rate is a positive number", f"optimizer.lr={self.lr}", "choose e.g. 5e-4")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError("Adam takes two decay rates in [0, 1)", f"optimizer.betas={self.betas}", "give e.g. optimizer.betas=[0.9,0.95]")
        if not (self.weight_decay >= 0 and self.grad_clip >= 0):
            raise UserError(
                "weight decay and clipping cannot be negative",
                f"optimizer.weight_decay={self.weight_decay} optimizer.grad_clip={self.grad_clip}",
                "choose 0 or more",
            )
        if not self.eps > 0:
            raise UserError("eps keeps a division from failing", f"optimizer.eps={self.eps}", "choose e.g. 1e-8")
        if not 0 <= self.momentum < 1:
            raise UserError("momentum is a decay rate in [0, 1)", f"optimizer.momentum={self.momentum}", "choose e.g. 0.95")
        if not 0 < self.layer_decay <= 1:
            raise UserError("layer decay is a factor in (0, 1]", f"optimizer.layer_decay={self.layer_decay}", "1 gives every layer the same lr")
