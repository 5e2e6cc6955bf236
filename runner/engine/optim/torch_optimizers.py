"""AdamW and Muon as torch optimizers, without torch's compiler: torch.optim's own step imports torch._dynamo (over a
second) to exempt itself from it.

Both skip the update on the device where `found_inf` is 1, as torch's fused optimizers do: no host sync.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.engine.autotune.kernel_choice import KernelChoice
from runner.engine.device.mesh import distribute_like, full_tensor, local_shard
from runner.engine.optim.orthogonalize import (
    ORTHOGONALIZATIONS,
    measure_orthogonalization,
    orthogonalize,
    split_batches,
)


class NoDynamoOptimizer(Optimizer):
    """Methods without the wrapper with which torch exempts them from torch.compile."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(NoDynamoOptimizer, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(NoDynamoOptimizer):
    """Moves each matrix along its momentum made orthogonal, bit for bit as torch.optim.Muon, which cannot skip an
    update on the device.

    `orthogonalization`: one of ORTHOGONALIZATIONS, the same on all ranks and after a resume; can be set between steps.
    The others than bf16 round differently.
    """

    _step_supports_amp_scaling = True  # torch's name for: reads found_inf

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, momentum: float, orthogonalization: str = "bf16"
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})
        self.found_inf = torch.zeros(())  # 1: skip the update
        self.orthogonalization = orthogonalization

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # no closure is passed
        skip = self.found_inf.bool()
        for group in self.param_groups:
            for batch in split_batches([p for p in group["params"] if p.grad is not None], self.orthogonalization):
                self._update(batch, group, skip)

    def _update(self, batch: list[Tensor], group: dict[str, Any], skip: Tensor) -> None:
        """Update matrices of one shape as one tensor: on a GPU a step of many matrices takes as long as its launches."""
        for p in batch:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in batch]
        grad = _joined([p.grad for p in batch if p.grad is not None])
        buffer, weight = _joined(buffers), _joined(batch)
        momentum = buffer.lerp(grad, 1 - group["momentum"])
        nesterov = grad.lerp(momentum, group["momentum"])
        if hasattr(weight, "placements"):  # fsdp: one gather for each matrix, not one for each product
            direction = distribute_like(orthogonalize(full_tensor(nesterov), self.orthogonalization), weight)
        else:
            direction = orthogonalize(nesterov, self.orthogonalization)
        # Scaled to the usual size of AdamW's update (https://arxiv.org/abs/2502.16982), so that one lr fits both.
        lr = group["lr"] * 0.2 * math.sqrt(max(batch[0].shape))
        updated = weight.mul(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-lr)
        _write(buffers, torch.where(skip, buffer, momentum))
        _write(batch, torch.where(skip, weight, updated))


def _joined(matrices: Sequence[Tensor]) -> Tensor:
    """Return the matrices as (G, M, N), one alone as it is: (M, N)."""
    return matrices[0] if len(matrices) == 1 else torch.stack(list(matrices))


def _write(targets: Sequence[Tensor], joined: Tensor) -> None:
    """Write a result of `_joined` to its tensors."""
    if len(targets) == 1:
        targets[0].copy_(joined)
    else:  # of shards, which are shards of the result
        torch._foreach_copy_([local_shard(target) for target in targets], local_shard(joined).unbind())


def orthogonalization_choice(optimizers: Sequence[Muon]) -> KernelChoice:
    """Return the choice between ORTHOGONALIZATIONS for the matrices of the optimizers."""
    default, *others = ORTHOGONALIZATIONS
    shapes = [tuple(p.shape) for part in optimizers for group in part.param_groups for p in group["params"]]

    def apply(kernel: str) -> None:
        for part in optimizers:
            part.orthogonalization = kernel

    return KernelChoice(
        fact="orthogonalization",
        default=default,
        others=tuple(others),
        workload=dict(sorted(Counter(f"{rows}x{columns}" for rows, columns in shapes).items())),
        measure=partial(measure_orthogonalization, shapes),
        apply=apply,
        unit="ms a sample",
    )
