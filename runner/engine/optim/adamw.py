"""AdamW (https://arxiv.org/abs/1711.05101) for all parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import UserError
from runner.engine.optim.config import OptimizerConfig, ParamGroups, register_optimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer


@register_optimizer("adamw")
@dataclass
class AdamWConfig(OptimizerConfig):
    betas: list[float]  # decay rates of the first and second moment, each in [0, 1)
    eps: float  # added to the root of the second moment, above 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(
                f"optimizer.betas must be two numbers in [0, 1), got {self.betas}",
                f"optimizer.betas={self.betas}",
                "e.g. optimizer.betas=[0.9,0.95]",
            )
        if not self.eps > 0:
            raise UserError(
                f"optimizer.eps must be a positive number, got {self.eps}",
                f"optimizer.eps={self.eps}",
                "e.g. optimizer.eps=1e-8",
            )

    def build(self, groups: ParamGroups) -> list[Optimizer]:
        from runner.engine.optim.torch_optimizers import AdamW

        parameters = [*groups.decay, *groups.no_decay]
        devices = {parameter.device.type for group in parameters for parameter in group["params"]}
        is_fused = "mps" not in devices  # whether its kernel skips an update by found_inf was never tested
        return [AdamW(parameters, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=is_fused)]
