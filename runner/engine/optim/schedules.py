"""Section `schedule` of the config: the learning rate as a pure function of the step.

One registered class per schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from common.registry import Registry
from common.settings import CheckedSettings, at_least, settings_class, within

SCHEDULES: Registry[type[ScheduleConfig]] = Registry("schedule", None)
register_schedule = SCHEDULES.register
LR_JUMP = 0.05  # relative change of the learning rate that a resume reports


def lr_at(step: int, total: int, lr: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0) out of `total`: linear warmup to `lr`, then the
    schedule.
    """
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    return lr * schedule.lr_factor((step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps))


def describe_lr_jump(
    step: int, before: Mapping[str, Any], steps_per_epoch: int, total: int, lr: float, schedule: ScheduleConfig
) -> str | None:
    """Return what a new length of the run changes at once, after `step` steps of a run with the settings `before`
    (dotted keys); None if it is little.

    A schedule that depends on the share of the steps done goes back when there are more of them: a completed cosine run
    starts to fall again.
    """
    try:
        length = before["train.max_steps"] or before["train.epochs"] * steps_per_epoch
        settings = {key.partition(".")[2]: value for key, value in before.items() if key.startswith("schedule.")}
        then = lr_at(min(step, length), length, before["optimizer.lr"], SCHEDULES.get(settings["name"])(**settings))
    # a checkpoint of an earlier version, or a plugin that is not imported any more
    except (KeyError, TypeError, UserError):
        return None
    now = lr_at(step, total, lr, schedule)
    if length == total or step >= total or abs(now - then) <= LR_JUMP * max(now, then):
        return None
    return f"the learning rate goes from {then:.1e} {'back ' * (now > then)}to {now:.1e}: the schedule now ends at step {total}; schedule=constant optimizer.lr={then:.2g} keeps it"


def check_warmup(total: int, schedule: ScheduleConfig) -> None:
    """Raise UserError for a warmup that is longer than the `total` steps of the run."""
    if schedule.warmup_steps > total:
        message = f"schedule.warmup_steps must be at most the {total} steps of the run, got {schedule.warmup_steps}"
        raise UserError(
            message,
            f"schedule.warmup_steps={schedule.warmup_steps}",
            f"schedule.warmup_steps={total // 10}, or a longer run",
        )


@settings_class
class ScheduleConfig(CheckedSettings):
    """Settings that every schedule has."""

    SECTION = "schedule"
    ON_RESUME = "changes_training"

    name: str  # cosine, linear, wsd, constant, or a schedule that a plugin registers
    # steps in which lr rises linearly to optimizer.lr; 0: none
    warmup_steps: int = at_least(0, 100)

    def lr_factor(self, progress: float) -> float:
        """Return lr / optimizer.lr after the share `progress` (in [0, 1]) of the steps that follow the warmup."""
        raise NotImplementedError


@register_schedule("constant")
@dataclass
class ConstantConfig(ScheduleConfig):
    """lr stays at optimizer.lr."""

    def lr_factor(self, progress: float) -> float:
        return 1.0


@settings_class
class DecayConfig(ScheduleConfig):
    """Schedules that go from 1 down to min_lr_ratio."""

    min_lr_ratio: float = within("[0, 1]", 0.1)  # last lr / optimizer.lr

    def lr_factor(self, progress: float) -> float:
        return 1 - (1 - self.min_lr_ratio) * (1 - self.decay(progress))

    def decay(self, progress: float) -> float:
        """Return a value that goes from 1 to 0."""
        raise NotImplementedError


@register_schedule("cosine")
@dataclass
class CosineConfig(DecayConfig):
    """Half a cosine (https://arxiv.org/abs/1608.03983).

    With min_lr_ratio=0.1: lr * (0.1 + 0.45 * (1 + cos(pi * t / T))).
    """

    def decay(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


@register_schedule("linear")
@dataclass
class LinearConfig(DecayConfig):
    def decay(self, progress: float) -> float:
        return 1 - progress


@register_schedule("wsd")
@settings_class
class WsdConfig(DecayConfig):
    """Warmup, stable, decay (https://arxiv.org/abs/2404.06395): constant, then linear in the last share of the steps."""

    decay_fraction: float = within("(0, 1]", 0.2)  # share of the steps after the warmup in which lr goes down

    def decay(self, progress: float) -> float:
        return 1.0 if progress <= 1 - self.decay_fraction else (1 - progress) / self.decay_fraction
