"""FIXME runner.engine.optim.schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    pass


@dataclass
class ScheduleConfig:
    name: str
    warmup_steps: int
    min_lr_ratio: float  # the last lr as a share of optimizer.lr
    decay_fraction: float  # wsd: share of the steps spent going down

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise UserError("unknown schedule", f"schedule.name={self.name}", f"choose one of {', '.join(SCHEDULES)}")
        if self.warmup_steps < 0:
            raise UserError("a count cannot be negative", f"schedule.warmup_steps={self.warmup_steps}", "choose 0 or more")
        if not 0 <= self.min_lr_ratio <= 1:
            raise UserError("the last lr is a share of the first", f"schedule.min_lr_ratio={self.min_lr_ratio}", "choose a value in [0, 1]")
        if not 0 < self.decay_fraction <= 1:
            raise UserError("the decay takes a share of the steps", f"schedule.decay_fraction={self.decay_fraction}", "choose a value in (0, 1]")


SCHEDULES = {
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
    shape = SCHEDULES[schedule.name](progress, schedule.decay_fraction)
    return lr * (1 - (1 - schedule.min_lr_ratio) * (1 - shape))
