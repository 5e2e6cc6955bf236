"""Parameter groups of a model, and the optimizers that update them, used as one."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.errors import UserError
from models.language_model import LanguageModel, trained_parameters
from runner.engine.device.mesh import distribute_like, local_shard
from runner.engine.optim.config import OptimizerConfig, ParamGroups
from runner.engine.optim.mup import width_factors

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")  # in names of parameters of transformers


AVERAGE = "average"  # key of the average of a parameter in the state


@dataclass(eq=False)
class OptimizerGroup:
    """One torch optimizer or several (Muon and AdamW), used as one. State is keyed by parameter name.

    ema_decay > 0: keep the exponential moving average of the parameters, from those after the first step on. Of the
    first steps it forgets more, as TensorFlow's ExponentialMovingAverage with `num_updates`: the decay after n steps is
    min(ema_decay, (1 + n) / (10 + n)).
    """

    parts: list[Optimizer]
    names: dict[nn.Parameter, str]
    ema_decay: float = 0.0
    averages: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    steps_done: int = 0  # before the next one

    def set_lr(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["lr_scale"]

    def step(self, found_inf: Tensor) -> None:
        """Update the parameters, or nothing where `found_inf` (a scalar on the device) is 1.

        Optimizers that read `found_inf`, as torch's fused ones do, decide that on the device; for others the host waits
        for it.
        """
        for part in self.parts:
            if getattr(part, "_step_supports_amp_scaling", False):
                part.found_inf = found_inf  # type: ignore[attr-defined]
                part.step()
            elif not found_inf.item():
                part.step()
        if self.ema_decay:
            self._average(found_inf)

    def _average(self, found_inf: Tensor) -> None:
        n = self.steps_done
        weight = local_shard((1 - min(self.ema_decay, (1 + n) / (10 + n))) * (1 - found_inf))  # 0: the step was skipped
        with torch.no_grad():
            for p in self.names:
                if p in self.averages:
                    local_shard(self.averages[p]).lerp_(local_shard(p), weight.to(p.device))
                else:
                    self.averages[p] = p.detach().clone()

    def use_averages(self) -> None:
        """Replace the parameters by their averages."""
        for p, average in self.averages.items():
            p.detach().copy_(average)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return {"<parameter>/<key>": tensor}, e.g. "model.norm.weight/exp_avg", without hyper-parameters."""
        return {
            f"{name}/{key}": value
            for part in self.parts
            for p, name in self.names.items()
            for key, value in part.state.get(p, {}).items()
        } | {f"{self.names[p]}/{AVERAGE}": average for p, average in self.averages.items()}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Restore what `state_dict()` returned. torch's own load_state_dict goes by position and overrides lr: both are
        wrong here.
        """
        by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for path, value in saved.items():
            name, key = path.rsplit("/", 1)
            by_name[name][key] = value
        if unknown := sorted(set(by_name) - set(self.names.values())):
            raise UserError(
                f"the checkpoint has optimizer state of parameters that are not trained here: {', '.join(unknown[:3])}",
                "optimizer.safetensors",
                "resume with the stage and model the run was started with",
            )
        self.averages = {
            p: distribute_like(average.to(p.device, copy=True), like=p)
            for p, name in self.names.items()
            if (average := by_name[name].pop(AVERAGE, None)) is not None and self.ema_decay
        }
        for part in self.parts:
            for group in part.param_groups:
                for p in group["params"]:
                    if self.names[p] in by_name:
                        part.state[p] = {
                            key: distribute_like(value.to(p.device, copy=True), like=p)
                            for key, value in by_name[self.names[p]].items()
                        }


def build_optimizer(
    cfg: OptimizerConfig, model: LanguageModel, num_layers: int, ema_decay: float = 0.0
) -> OptimizerGroup:
    """Sort the trainable parameters into groups and build the optimizers that `cfg` describes."""
    names = {p: name for name, p in trained_parameters(model).items()}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    # of a model of transformers, where it has any name
    output = id(getattr(model.output_layer, "weight", None))
    hidden = [
        p
        for p, name in names.items()
        if p.ndim >= 2 and id(p) not in embeddings and id(p) != output and "lm_head" not in name
    ]
    matrices = [p for p in hidden if p.ndim == 2]
    stacks = [p for p in hidden if p.ndim > 2]  # matrices of all experts, kernels of convolutions
    others = [p for p in names if p not in set(hidden)]
    widths = width_factors(cfg, model) if cfg.mup_base_width else {}

    def by_lr_scale(parameters: list[nn.Parameter], weight_decay: float) -> list[dict]:
        groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)  # by factor of the lr, weight decay
        for p in parameters:
            layer = LAYER.search(names[p])  # after the last layer: num_layers + 1
            depth = 0 if id(p) in embeddings else 1 + int(layer[1]) if layer else num_layers + 1
            _, factor = widths.get(names[p], (1.0, 1.0))
            groups[cfg.layer_decay ** (num_layers + 1 - depth) * factor, weight_decay / factor].append(p)
        return [
            {"params": params, "weight_decay": decay, "lr_scale": scale} for (scale, decay), params in groups.items()
        ]

    rest = by_lr_scale(stacks, cfg.weight_decay) + by_lr_scale(others, 0.0)
    return OptimizerGroup(cfg.build(ParamGroups(by_lr_scale(matrices, cfg.weight_decay), rest)), names, ema_decay)
