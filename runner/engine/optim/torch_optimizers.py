"""AdamW and Muon as torch optimizers, without torch's compiler: torch.optim's own step imports torch._dynamo (over a
second) to exempt itself from it. And the orthogonalisation of Muon's updates by Newton-Schulz steps.

Both skip the update on the device where `found_inf` is 1, as torch's fused optimizers do: no host sync.

Shapes: (M, N) of a matrix, M <= N after a tall one is transposed; (G, M, N) of G matrices in a stack.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.engine.device.mesh import distribute_like, full_tensor

NEWTON_SCHULZ_STEPS = 5
# of the polynomial a x + b x^3 + c x^5, steep at 0
COEFFICIENT_A, COEFFICIENT_B, COEFFICIENT_C = 3.4445, -4.7750, 2.0315
MIN_NORM = 1e-7
# numbers of the matrices that are updated together, unless one matrix alone has more; bounds the memory of an update
BATCH_NUMBERS = 2**26
# N / M above which steps on x x^T need fewer operations: 17 M^3 + 2 M^2 N multiplications instead of 5 M^3 + 10 M^2 N
GRAM_RATIO = 1.5


class NoDynamoOptimizer(Optimizer):
    """Methods without the wrapper with which torch exempts them from torch.compile."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(NoDynamoOptimizer, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(NoDynamoOptimizer):
    """Moves each matrix along its momentum made orthogonal, as torch.optim.Muon, which cannot skip an update on the
    device; bit for bit with `dtype` bf16 and without `is_batched`.

    `dtype`: of the products, the same on all ranks and after a resume; can be set between steps. `is_batched`:
    matrices of one shape are multiplied together, in fewer and larger calls.
    """

    _step_supports_amp_scaling = True  # torch's name for: reads found_inf

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float, *, is_batched: bool = False) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})
        self.found_inf = torch.zeros(())  # 1: skip the update
        self.is_batched, self.dtype = is_batched, torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # no closure is passed
        skip = self.found_inf.bool()
        for group in self.param_groups:
            matrices = [p for p in group["params"] if p.grad is not None]
            for batch in split_batches(matrices) if self.is_batched else ([p] for p in matrices):
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
            direction = distribute_like(orthogonalize(full_tensor(nesterov), self.dtype), weight)
        else:
            direction = orthogonalize(nesterov, self.dtype)
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
    else:
        torch._foreach_copy_(list(targets), joined.unbind())


def split_batches(matrices: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the matrices in batches of one shape and of a bounded number of numbers, which are updated as one tensor."""
    by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        by_shape[tuple(matrix.shape)].append(matrix)
    batches: list[list[Tensor]] = []
    for (rows, columns), same in by_shape.items():
        size = max(1, BATCH_NUMBERS // (rows * columns))
        batches += [same[first : first + size] for first in range(0, len(same), size)]
    return batches


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices (M, N) or (G, M, N) with singular values near 1, in the `dtype` of the products.

    Error, as Frobenius norm of the difference from fp64 by that of the result, for matrices whose singular values are
    of one magnitude: at most 3 % in bf16, 1e-4 in fp32. If they decay to 0, which the steps amplify with their
    rounding: above 100 % in bf16, at most 0.2 % in fp32.
    """
    x = matrices.to(dtype)
    return _newton_schulz(x.mT).mT if x.shape[-2] > x.shape[-1] else _newton_schulz(x)


def _newton_schulz(x: Tensor) -> Tensor:
    """Return x, (M, N) or (G, M, N), after the steps: the polynomial moves singular values in [0, 1] towards 1 in each."""
    addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
    norm = x.norm() if x.ndim == 2 else x.flatten(1).norm(dim=1)[:, None, None]
    x = x / norm.clamp(min=MIN_NORM)
    # bf16 has too few bits for the square of the singular values
    if x.dtype == torch.float32 and x.shape[-1] > GRAM_RATIO * x.shape[-2]:
        return _gram_polynomial(x @ x.mT) @ x
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = addmm(x, addmm(square, square, square, beta=COEFFICIENT_B, alpha=COEFFICIENT_C), x, beta=COEFFICIENT_A)
    return x


def _gram_polynomial(gram: Tensor) -> Tensor:
    """Return q, (M, M), such that q @ x is x after the steps, from gram = x @ x^T: all of them but the last product are
    of (M, M).
    """
    addmm = torch.addmm if gram.ndim == 2 else torch.baddbmm
    product = None
    for step in range(1, NEWTON_SCHULZ_STEPS + 1):
        factor = addmm(gram, gram, gram, beta=COEFFICIENT_B, alpha=COEFFICIENT_C)
        factor.diagonal(dim1=-2, dim2=-1).add_(COEFFICIENT_A)
        product = factor if product is None else factor @ product
        if step < NEWTON_SCHULZ_STEPS:
            gram = factor @ (gram @ factor)
    assert product is not None
    return product
