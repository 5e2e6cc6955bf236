"""AdamW and Muon as torch optimizers, without torch's compiler: torch.optim's own step imports torch._dynamo (over a second) to exempt itself from it.

Both skip the update on the device where `found_inf` is 1, as torch's fused optimizers do: no host sync.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.engine.device.mesh import distribute_like, full_tensor

NEWTON_SCHULZ_STEPS = 5
COEFFICIENT_A, COEFFICIENT_B, COEFFICIENT_C = 3.4445, -4.7750, 2.0315  # of the polynomial a x + b x^3 + c x^5, steep at 0
MIN_NORM = 1e-7


class NoDynamoOptimizer(Optimizer):
    """Methods without the wrapper with which torch exempts them from torch.compile."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(NoDynamoOptimizer, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(NoDynamoOptimizer):
    """Moves each matrix along its momentum made orthogonal, bit for bit as torch.optim.Muon, which cannot skip an update on the device."""

    _step_supports_amp_scaling = True  # torch's name for: reads found_inf

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})
        self.found_inf = torch.zeros(())  # 1: skip the update

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # no closure is passed
        skip = self.found_inf.bool()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group, skip)

    def _update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any], skip: Tensor) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        momentum = buffer.lerp(grad, 1 - group["momentum"])
        nesterov = grad.lerp(momentum, group["momentum"])
        direction = distribute_like(newton_schulz(full_tensor(nesterov)), nesterov)  # fsdp: one gather for each matrix, not one for each product
        # Scaled to the usual size of AdamW's update (https://arxiv.org/abs/2502.16982), so that one lr fits both.
        lr = group["lr"] * 0.2 * math.sqrt(max(p.shape))
        updated = p.mul(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-lr)
        buffer.copy_(torch.where(skip, buffer, momentum))
        p.copy_(torch.where(skip, p, updated))


def newton_schulz(matrix: Tensor) -> Tensor:
    """Return the matrix (M, N) with singular values near 1, in bf16: the polynomial moves values in [0, 1] towards 1 in each step."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=MIN_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=COEFFICIENT_B, alpha=COEFFICIENT_C), x, beta=COEFFICIENT_A)
    return x.T if is_tall else x
