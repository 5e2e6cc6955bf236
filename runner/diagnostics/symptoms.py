"""A symptom: what was measured, the override to type, and the section of docs/guide/troubleshooting.md about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PAGE = "docs/guide/troubleshooting.md"
LoggedRecord = Mapping[str, object]  # of metrics.jsonl


def troubleshooting(section: str) -> str:
    """Return how a message names a section of the page."""
    return f"see {PAGE}#{section}"


def lr_after_divergence(lr: float) -> str:
    """Return the learning rate that is proposed to a run that diverges: a tenth."""
    return f"{lr / 10:g}"


@dataclass(frozen=True)
class Symptom:
    name: str  # anchor of its section
    step: int  # at which it was seen; 0: before the first
    measured: str
    fix: str  # what to type

    @property
    def message(self) -> str:
        return f"{self.measured}; {self.fix}; {troubleshooting(self.name)}"


@dataclass(frozen=True)
class RunFacts:
    """Settings of a run that its numbers are judged by."""

    total_steps: int
    lr: float  # largest of the schedule
    warmup_steps: int
    grad_clip: float  # 0: no clipping
    num_workers: int  # data.num_workers
    cores: int
    starts_from_weights: bool
    # loss of a model that gives every token the same probability; None: the objective has no such number
    uniform_loss: float | None
