"""AdamW and Muon without torch's compiler: torch's own import it, over a second of every start, to ask it to leave them alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from runner.engine.optim.adamw import NoDynamoOptimizer

NEWTON_SCHULZ_STEPS = 5  # of Newton-Schulz ...
COEFFICIENT_A, COEFFICIENT_B, COEFFICIENT_C = 3.4445, -4.7750, 2.0315  # ... by this polynomial of odd powers, steep at 0
MIN_NORM = 1e-7  # norm


class Muon(NoDynamoOptimizer):
    """https://kellerjordan.github.io/posts/muon: each matrix moves along its momentum, made orthogonal.

    The numbers are those of torch.optim.Muon, bit for bit. Ours can leave a step out without anybody waiting to hear whether it does.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})
        self.found_inf = torch.zeros(())  # 1: the step is not taken; torch's fused optimizers have the same by this name

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # nobody here gives one
        missed = self.found_inf.bool()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, group, missed)

    def _move(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any], missed: Tensor) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        before = state["momentum_buffer"]
        momentum = before.lerp(grad, 1 - group["momentum"])
        direction = newton_schulz(grad.lerp(momentum, group["momentum"]))  # one step ahead, as Nesterov has it
        # Scaled to AdamW's usual update size (https://arxiv.org/abs/2502.16982), so that one lr serves both.
        lr = group["lr"] * 0.2 * math.sqrt(max(p.shape))
        moved = p.mul(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-lr)
        before.copy_(torch.where(missed, before, momentum))
        p.copy_(torch.where(missed, p, moved))


def newton_schulz(matrix: Tensor) -> Tensor:
    """With singular values near 1 instead of its own, in bf16: the polynomial draws them there round by round, once none is above 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=MIN_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=COEFFICIENT_B, alpha=COEFFICIENT_C), x, beta=COEFFICIENT_A)
    return x.T if tall else x
