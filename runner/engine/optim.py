"""Optimizers, parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.engine.distributed import placed

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


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
            raise ValueError("unknown optimizer", f"optimizer.name={self.name}", "choose adamw or muon")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError("a learning rate is a positive number", f"optimizer.lr={self.lr}", "choose e.g. 5e-4")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("Adam takes two decay rates in [0, 1)", f"optimizer.betas={self.betas}", "give e.g. optimizer.betas=[0.9,0.95]")
        if not (self.weight_decay >= 0 and self.grad_clip >= 0):
            raise ValueError(
                "weight decay and clipping cannot be negative",
                f"optimizer.weight_decay={self.weight_decay} optimizer.grad_clip={self.grad_clip}",
                "choose 0 or more",
            )
        if not self.eps > 0:
            raise ValueError("eps keeps a division from failing", f"optimizer.eps={self.eps}", "choose e.g. 1e-8")
        if not 0 <= self.momentum < 1:
            raise ValueError("momentum is a decay rate in [0, 1)", f"optimizer.momentum={self.momentum}", "choose e.g. 0.95")
        if not 0 < self.layer_decay <= 1:
            raise ValueError("layer decay is a factor in (0, 1]", f"optimizer.layer_decay={self.layer_decay}", "1 gives every layer the same lr")


@dataclass
class ScheduleConfig:
    name: str
    warmup_steps: int
    min_lr_ratio: float  # the last lr as a share of optimizer.lr
    decay_fraction: float  # wsd: share of the steps spent going down

    def __post_init__(self) -> None:
        if self.name not in SHAPES:
            raise ValueError("unknown schedule", f"schedule.name={self.name}", f"choose one of {', '.join(SHAPES)}")
        if self.warmup_steps < 0:
            raise ValueError("a count cannot be negative", f"schedule.warmup_steps={self.warmup_steps}", "choose 0 or more")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError("the last lr is a share of the first", f"schedule.min_lr_ratio={self.min_lr_ratio}", "choose a value in [0, 1]")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError("the decay takes a share of the steps", f"schedule.decay_fraction={self.decay_fraction}", "choose a value in (0, 1]")


SHAPES = {
    "cosine": lambda progress, decay: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress, decay: 1 - progress,
    "wsd": lambda progress, decay: 1.0 if progress <= 1 - decay else (1 - progress) / decay,
    "constant": lambda progress, decay: 1.0,
}


def lr_at(step: int, total: int, lr: float, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step` (from 0) out of `total`: linear warmup, then the schedule's shape.

    Cosine without warmup and min_lr_ratio=0.1 is MiniMind's lr * (0.1 + 0.45 * (1 + cos(pi * t / T))).
    """
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    progress = (step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps)
    shape = SHAPES[schedule.name](progress, schedule.decay_fraction)
    return lr * (1 - (1 - schedule.min_lr_ratio) * (1 - shape))


class Optimizers:
    """One optimizer or two (Muon for the matrices, AdamW for the rest), used as one; state goes by parameter name."""

    def __init__(self, parts: list[Optimizer], names: dict[nn.Parameter, str]) -> None:
        self.parts, self.names = parts, names

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.names)

    def set_lr(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["lr_scale"]

    def step(self, missed: Tensor) -> None:
        """Update what learns, or nothing where `missed` is 1. That is decided where the weights are: nobody waits for it."""
        for part in self.parts:
            part.found_inf = missed  # type: ignore[attr-defined]  # by this name torch's fused optimizers know it: weights, moments and counts stay
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """{"<parameter>/<key>": tensor}, e.g. "model.norm.weight/exp_avg": what survives, without hyper-parameters."""
        return {f"{name}/{key}": value for part in self.parts for p, name in self.names.items() for key, value in part.state.get(p, {}).items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `state()` gave. torch's own loader goes by position and overrides lr: neither is wanted here."""
        by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for word, value in state.items():
            name, key = word.rsplit("/", 1)
            by_name[name][key] = value
        unknown = set(by_name) - set(self.names.values())
        if unknown:
            raise ValueError(
                "the checkpoint holds optimizer state of parameters that do not learn here",
                ", ".join(sorted(unknown)[:3]),
                "resume with the stage and model the run was started with",
            )
        for part in self.parts:
            for group in part.param_groups:
                for p in group["params"]:
                    if self.names[p] in by_name:
                        part.state[p] = {key: placed(value.to(p.device, copy=True), like=p) for key, value in by_name[self.names[p]].items()}


def build_optimizer(cfg: OptimizerConfig, model: nn.Module, num_layers: int) -> Optimizers:
    """AdamW (https://arxiv.org/abs/1711.05101) over all that learns; or Muon (https://kellerjordan.github.io/posts/muon)
    for the hidden matrices and AdamW for embeddings, head, norms and biases. These last do not decay."""
    from runner.engine.update import AdamW, Muon

    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for p, name in names.items() if p.ndim == 2 and not _is_embedding(name)]
    others = [p for p in names if p not in set(matrices)]
    betas = (cfg.betas[0], cfg.betas[1])

    def groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict]:
        by_scale: dict[float, list[nn.Parameter]] = defaultdict(list)
        for p in parameters:
            by_scale[cfg.layer_decay ** (num_layers + 1 - _depth(names[p], num_layers))].append(p)
        return [{"params": ps, "weight_decay": weight_decay, "lr_scale": scale} for scale, ps in by_scale.items()]

    if cfg.name == "adamw":
        return Optimizers([AdamW(groups(matrices, cfg.weight_decay) + groups(others, 0.0), lr=cfg.lr, betas=betas, eps=cfg.eps, fused=True)], names)
    muon = Muon(groups(matrices, cfg.weight_decay), lr=cfg.lr, momentum=cfg.momentum)
    rest = [AdamW(groups(others, 0.0), lr=cfg.lr, betas=betas, eps=cfg.eps, fused=True)] if others else []
    return Optimizers([muon, *rest], names)


def _is_embedding(name: str) -> bool:
    return "embed_tokens" in name or "lm_head" in name


def _depth(name: str, num_layers: int) -> int:
    """0 for the embedding, 1 + i for layer i, num_layers + 1 for what comes after the last layer."""
    if ".layers." in name:
        return 1 + int(name.split(".layers.")[1].split(".")[0])
    return 0 if "embed_tokens" in name else num_layers + 1
