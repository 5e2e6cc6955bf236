"""Optimizers, parameter groups, and the learning rate as a pure function of the step."""
from __future__ import annotations

import math
from dataclasses import dataclass


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
            raise ValueError("weight decay and clipping cannot be negative", f"optimizer.weight_decay={self.weight_decay} optimizer.grad_clip={self.grad_clip}", "choose 0 or more")
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
    "wsd": lambda progress, decay: min(1.0, (1 - progress) / decay),
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
    return lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape)
