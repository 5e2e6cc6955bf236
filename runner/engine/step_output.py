"""What a step found stays on the device until several steps are read together: a GPU is never waited for in between."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from runner.engine.device.distributed import DistributedContext
from runner.engine.device.precision import GradStats
from runner.engine.objectives.objective import LossSums


class StepOutput(NamedTuple):
    """Of one step, before anybody has looked."""

    step: int
    names: list[str]  # of this rank's rows
    items: int  # over all ranks: what the sums are divided by
    loss_tokens: int  # tokens with a label, over all ranks
    tokens: int  # all tokens computed, without padding, over all ranks
    examples: int  # over all ranks
    sums: LossSums  # the objective's, of this rank, over the whole step
    update: GradStats


class StepResult(NamedTuple):
    """Of one step, as numbers."""

    found: StepOutput
    means: dict[str, float]  # the objective's sums over all ranks, each divided by its count
    norm: float  # of the gradient, before clipping

    @property
    def taken(self) -> bool:
        """Otherwise something was not finite, and no weight has moved."""
        return math.isfinite(self.norm)

    @property
    def culprit(self) -> str | None:
        """The first parameter whose gradient was not finite, as far as this rank sees."""
        update = self.found.update
        return next((name for name, norm in zip(update.names, update.norms.tolist(), strict=True) if not math.isfinite(norm)), None)


def fetch_results(dist: DistributedContext, steps: list[StepOutput]) -> list[StepResult]:
    """Wait for these steps, all at once. Every rank must ask, for the same ones.

    The norm is every rank's already. Summed with the rest it is not finite for all where it is not for one: they never part over it.
    """
    if not steps:
        return []
    sums = torch.stack([value for found in steps for value in found.sums.values()]).tolist()
    norms = torch.stack([found.update.norm for found in steps]).tolist()
    numbers = iter(dist.all_reduce_sum([*sums, *norms]))
    means = [{name: next(numbers) / found.items for name in found.sums} for found in steps]
    return [StepResult(found, its, next(numbers) / dist.size) for found, its in zip(steps, means, strict=True)]
