"""Orthogonalisation of Muon's updates by Newton-Schulz steps: variants of one polynomial that differ in speed and
rounding, and their timing.

Shapes: (M, N) of a matrix, M <= N after a tall one is transposed; (G, M, N) of G matrices in a stack.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from runner.engine.autotune.kernel_choice import times_of_growing_operands

if TYPE_CHECKING:
    from torch import Tensor

NEWTON_SCHULZ_STEPS = 5
# of the polynomial a x + b x^3 + c x^5, steep at 0
COEFFICIENT_A, COEFFICIENT_B, COEFFICIENT_C = 3.4445, -4.7750, 2.0315
MIN_NORM = 1e-7
# numbers of the matrices that are updated together, unless one matrix alone has more; bounds the memory of an update
BATCH_NUMBERS = {"cpu": 2**21, "cuda": 2**26}
# N / M above which steps on x x^T need fewer operations: 17 M^3 + 2 M^2 N multiplications instead of 5 M^3 + 10 M^2 N
GRAM_RATIO = 1.5
MATRICES_PER_SHAPE = 4  # matrices of each shape that are timed


class Orthogonalization(NamedTuple):
    """One row of ORTHOGONALIZATIONS."""

    dtype: str  # of the products
    is_batched: bool = False  # multiplies matrices of one shape together: fewer and larger parallel loops


ORTHOGONALIZATIONS = {
    "bf16": Orthogonalization("bfloat16"),  # bit for bit that of torch.optim.Muon
    "bf16-batched": Orthogonalization("bfloat16", is_batched=True),
    "fp32": Orthogonalization("float32"),  # for processors that multiply bf16 slowly: those without AMX
    "fp32-batched": Orthogonalization("float32", is_batched=True),
}


def split_batches(matrices: Iterable[Tensor], name: str) -> list[list[Tensor]]:
    """Return the matrices in batches of one shape and of a bounded number of numbers, which are updated as one tensor."""
    if not ORTHOGONALIZATIONS[name].is_batched:
        return [[matrix] for matrix in matrices]
    by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        by_shape[tuple(matrix.shape)].append(matrix)
    batches: list[list[Tensor]] = []
    for (rows, columns), same in by_shape.items():
        size = max(1, BATCH_NUMBERS["cuda" if same[0].is_cuda else "cpu"] // (rows * columns))
        batches += [same[first : first + size] for first in range(0, len(same), size)]
    return batches


def orthogonalize(matrices: Tensor, name: str) -> Tensor:
    """Return matrices (M, N) or (G, M, N) with singular values near 1, in the dtype of the products.

    Error, as Frobenius norm of the difference from fp64 by that of the result, for matrices whose singular values are
    of one magnitude: at most 3 % in bf16, 1e-4 in fp32. If they decay to 0, which the steps amplify with their
    rounding: above 100 % in bf16, at most 0.2 % in fp32.
    """
    import torch

    x = matrices.to(getattr(torch, ORTHOGONALIZATIONS[name].dtype))
    return _newton_schulz(x.mT).mT if x.shape[-2] > x.shape[-1] else _newton_schulz(x)


def _newton_schulz(x: Tensor) -> Tensor:
    """Return x, (M, N) or (G, M, N), after the steps: the polynomial moves singular values in [0, 1] towards 1 in each."""
    import torch

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
    import torch

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


def measure_orthogonalization(shapes: Iterable[tuple[int, int]], names: Sequence[str]) -> dict[str, float]:
    """Return variant -> the shortest time to orthogonalize a sample of CPU matrices of these shapes, one item per
    matrix, seconds. Leaves torch's global random state as it is.
    """
    import torch

    counts = Counter((min(shape), max(shape)) for shape in shapes)

    def runs(largest: int) -> tuple[float, dict[str, Callable[[], object]]]:
        generator = torch.Generator().manual_seed(0)
        sample = [
            torch.randn(min(rows, largest), min(columns, largest), generator=generator)
            for (rows, columns), count in counts.items()
            for _ in range(min(count, MATRICES_PER_SHAPE))
        ]
        flops = sum(float(len(matrix)) ** 2 * matrix.shape[1] for matrix in sample)
        return flops, {name: partial(_orthogonalize_all, sample, name) for name in names}

    with torch.no_grad():
        return times_of_growing_operands(runs)


def _orthogonalize_all(matrices: Iterable[Tensor], name: str) -> None:
    import torch

    for batch in split_batches(matrices, name):
        orthogonalize(batch[0] if len(batch) == 1 else torch.stack(batch), name)
