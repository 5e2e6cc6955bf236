"""Section `optimizer` of the config: settings of all optimizers, the registry, and the two built-in ones: AdamW
(https://arxiv.org/abs/1711.05101) for all parameters, and Muon (https://kellerjordan.github.io/posts/muon) for the
hidden matrices with AdamW for embeddings, output layer, norms and biases.

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

from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from common.errors import UserError
from common.registry import Registry
from common.settings import INCOMPATIBLE, CheckedSettings, at_least, settings_class, within

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from models.config import ModelConfig

OPTIMIZERS: Registry[type[OptimizerConfig]] = Registry(
    "optimizer", "runner.engine.optim", helpers=("config", "groups", "mup", "schedules", "torch_optimizers")
)
register_optimizer = OPTIMIZERS.register


class ParamGroups(NamedTuple):
    """Trainable parameters in groups as torch.optim takes them, with `weight_decay` and `lr_scale` (see
    optimizer.layer_decay).
    """

    decay: list[dict[str, Any]]  # hidden matrices
    # All others, each group with its own `weight_decay`: 0 for embeddings, output layer, norms and biases, that of the
    # matrices for stacks of hidden matrices. Plugins know this name.
    no_decay: list[dict[str, Any]]


@settings_class
class OptimizerConfig(CheckedSettings):
    """Settings that every optimizer has."""

    SECTION = "optimizer"
    ON_RESUME = "changes_training"

    # a registered optimizer, e.g. adamw; plugins register others
    name: str = field(metadata=INCOMPATIBLE)
    # largest learning rate (per step), reached after the warmup
    lr: float = within("(0, inf)", "5e-4", "a positive number")
    # decoupled weight decay of the hidden matrices; embeddings, output layer, norms and biases have none
    weight_decay: float = at_least(0, 0.1)
    # largest norm of the gradient over all parameters; 0: no clipping
    grad_clip: float = at_least(0, 1.0)
    # lr of each layer divided by that of the layer above; 1: the same lr everywhere
    layer_decay: float = within("(0, 1]", 0.9)
    # muP: lr and weight_decay are those of this model.hidden_size; 0: of the model's
    mup_base_width: int = at_least(0, 64, resume=INCOMPATIBLE, default=0, kw_only=True)

    # The best lr of a hidden matrix falls with this power of the width (see mup.py); None: it is not known.
    MUP_POWER: ClassVar[float | None] = None

    def build(self, groups: ParamGroups) -> list[Optimizer]:
        """Return the torch optimizers that together update all groups.

        Their state must be tensors: it is saved by parameter name.
        """
        raise NotImplementedError


@register_optimizer("adamw")
@settings_class
class AdamWConfig(OptimizerConfig):
    MUP_POWER = 1.0

    betas: list[float]  # decay rates of the first and second moment, each in [0, 1)
    # added to the root of the second moment
    eps: float = within("(0, inf)", "1e-8", "a positive number")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(
                f"optimizer.betas must be two numbers in [0, 1), got {self.betas}",
                f"optimizer.betas={self.betas}",
                "e.g. optimizer.betas=[0.9,0.95]",
            )

    def build(self, groups: ParamGroups) -> list[Optimizer]:
        from runner.engine.optim.torch_optimizers import AdamW

        parameters = [*groups.decay, *groups.no_decay]
        devices = {parameter.device.type for group in parameters for parameter in group["params"]}
        is_fused = "mps" not in devices  # whether its kernel skips an update by found_inf was never tested
        return [AdamW(parameters, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=is_fused)]


@register_optimizer("muon")
@settings_class
class MuonConfig(AdamWConfig):
    """`betas` and `eps` are those of AdamW."""

    MUP_POWER = 0.5

    momentum: float = within("[0, 1)", 0.95)  # decay rate of Muon's momentum

    def build(self, groups: ParamGroups) -> list[Optimizer]:
        from runner.engine.optim.torch_optimizers import Muon

        # a GPU waits for launches; where ranks share the matrices, each is gathered alone
        matrices = [p for group in groups.decay for p in group["params"]]
        is_batched = all(p.is_cuda and not hasattr(p, "placements") for p in matrices)
        muon = Muon(groups.decay, self.lr, self.momentum, is_batched=is_batched) if groups.decay else None
        others = super().build(ParamGroups([], groups.no_decay)) if groups.no_decay else []
        return [muon, *others] if muon else others


def check_mup(cfg: OptimizerConfig, model: ModelConfig, has_adapter: bool) -> None:
    """Raise UserError where the factors of `optimizer.mup_base_width` are not known."""
    if model.family != "decoder":
        problem = f"of model.family=decoder, got {model.family}"
    elif has_adapter:
        problem = "of training without adapters: an adapter has a width of its own"
    elif cfg.MUP_POWER is None:
        problem = f"of adamw and muon, got {cfg.name}"
    else:
        return
    raise UserError(
        f"optimizer.mup_base_width has the learning rates {problem}",
        f"optimizer.mup_base_width={cfg.mup_base_width}",
        "optimizer.mup_base_width=0",
    )
