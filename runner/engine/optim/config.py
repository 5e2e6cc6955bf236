"""Section `optimizer` of the config: settings of all optimizers, and the registry.

An optimizer is one file: `lion.py` in this folder, or a module that the user names in `plugins=[...]`:

    @register_optimizer("lion")
    @dataclass
    class LionConfig(OptimizerConfig):
        betas: list[float]  # decay rates of the interpolated gradient and of the momentum

        def build(self, groups: ParamGroups) -> list[Optimizer]:
            from my_package import Lion

            return [Lion(groups.decay + groups.no_decay, lr=self.lr, betas=self.betas)]

Its values are in conf/optimizer/lion.yaml; without such a file, every field has a default in the class. `import torch`
belongs into build().
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import UserError
from common.registry import Registry
from common.settings import INCOMPATIBLE, check_at_least

if TYPE_CHECKING:
    from torch.optim import Optimizer

OPTIMIZERS: Registry[type[OptimizerConfig]] = Registry(
    "optimizer", "runner.engine.optim", helpers=("config", "groups", "schedules", "torch_optimizers")
)
register_optimizer = OPTIMIZERS.register


class ParamGroups(NamedTuple):
    """Trainable parameters in groups as torch.optim takes them, with `weight_decay` and `lr_scale` (see
    optimizer.layer_decay).
    """

    decay: list[dict[str, Any]]  # hidden matrices
    # embeddings, output layer, norms and biases; stacks of hidden matrices in groups of their own, with weight_decay
    no_decay: list[dict[str, Any]]


@dataclass
class OptimizerConfig:
    """Settings that every optimizer has."""

    ON_RESUME = "changes_training"

    # a module of runner/engine/optim/, or an optimizer that a plugin registers
    name: str = field(metadata=INCOMPATIBLE)
    lr: float  # largest learning rate (per step), reached after the warmup
    # decoupled weight decay of the hidden matrices; embeddings, output layer, norms and biases have none
    weight_decay: float
    grad_clip: float  # largest norm of the gradient over all parameters; 0: no clipping
    layer_decay: float  # lr of each layer divided by that of the layer above, in (0, 1]; 1: the same lr everywhere

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError(
                f"optimizer.lr must be a positive number, got {self.lr}",
                f"optimizer.lr={self.lr}",
                "e.g. optimizer.lr=5e-4",
            )
        check_at_least("optimizer.weight_decay", self.weight_decay, 0, 0.1)
        check_at_least("optimizer.grad_clip", self.grad_clip, 0, 1.0)
        if not 0 < self.layer_decay <= 1:
            raise UserError(
                f"optimizer.layer_decay must be in (0, 1], got {self.layer_decay}",
                f"optimizer.layer_decay={self.layer_decay}",
                "e.g. optimizer.layer_decay=0.9",
            )

    def build(self, groups: ParamGroups) -> list[Optimizer]:
        """Return the torch optimizers that together update all groups.

        Their state must be tensors: it is saved by parameter name.
        """
        raise NotImplementedError
