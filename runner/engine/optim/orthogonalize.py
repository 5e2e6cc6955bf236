"""Orthogonalisation of Muon's updates by Newton-Schulz steps: variants of one polynomial that differ in speed and
rounding, and their timing.

Shapes: (M, N) of a matrix, M <= N after a tall one is transposed; (G, M, N) of G matrices in a stack.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from runner.engine.choices.measured_choice import KernelChoice

if TYPE_CHECKING:
    from torch import Tensor

NEWTON_SCHULZ_STEPS = 5
# of the polynomial a x + b x^3 + c x^5, steep at 0
COEFFICIENT_A, COEFFICIENT_B, COEFFICIENT_C = 3.4445, -4.7750, 2.0315
MIN_NORM = 1e-7
# numbers of the matrices that are multiplied together, unless one matrix alone has more; bounds the memory of an update
BATCH_NUMBERS = 2**21
# N / M above which steps on x x^T need fewer operations: 17 M^3 + 2 M^2 N multiplications instead of 5 M^3 + 10 M^2 N
GRAM_RATIO = 1.5
MEASURED_FLOP = 2e11  # of measure_orthogonalization: one second at 200 GFLOP/s
# of these FLOP, to find variants that are not measured on: those slower by this factor than the fastest
PILOT_SHARE, PILOT_FACTOR = 0.02, 4
TURNS = 3


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
    """Return the matrices in batches for `orthogonalize`: of one shape but for transposition, and of at most
    BATCH_NUMBERS.
    """
    if not ORTHOGONALIZATIONS[name].is_batched:
        return [[matrix] for matrix in matrices]
    by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        by_shape[tuple(sorted(matrix.shape))].append(matrix)
    batches: list[list[Tensor]] = []
    for (rows, columns), same in by_shape.items():
        size = max(1, BATCH_NUMBERS // (rows * columns))
        batches += [same[first : first + size] for first in range(0, len(same), size)]
    return batches


def orthogonalize(batch: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return each matrix of a batch of `split_batches` with singular values near 1, in the dtype of the products.

    Error, as Frobenius norm of the difference from fp64 by that of the result, for matrices whose singular values are
    of one magnitude: at most 3 % in bf16, 1e-4 in fp32. If they decay to 0, which the steps amplify with their
    rounding: above 100 % in bf16, at most 0.2 % in fp32.
    """
    import torch

    dtype = getattr(torch, ORTHOGONALIZATIONS[name].dtype)
    wide = [matrix.T if _is_tall(matrix) else matrix for matrix in batch]
    if len(wide) == 1:
        results: Sequence[Tensor] = [_newton_schulz(wide[0].to(dtype))]
    else:
        results = _newton_schulz(torch.stack([matrix.to(dtype) for matrix in wide])).unbind()
    return [result.T if _is_tall(matrix) else result for result, matrix in zip(results, batch, strict=True)]


def orthogonalization_choice(shapes: Sequence[tuple[int, ...]], apply: Callable[[str], None]) -> KernelChoice:
    """Return the choice between ORTHOGONALIZATIONS for matrices of these shapes, (M, N) of each."""
    default, *others = ORTHOGONALIZATIONS
    counts = Counter(f"{rows}x{columns}" for rows, columns in shapes)
    return KernelChoice(
        fact="orthogonalization",
        default=default,
        others=tuple(others),
        workload=dict(sorted(counts.items())),
        measure=lambda names: measure_orthogonalization(((rows, columns) for rows, columns in shapes), names),
        apply=apply,
        unit="ms an update",
    )


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


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
    """Return variant -> seconds of one orthogonalisation of CPU matrices of these shapes, one item per matrix.

    The variants take turns, and the minimum counts. A sample of each shape is measured, of smaller matrices where two
    are too many operations: all together MEASURED_FLOP. A short pilot excludes variants that are slower by
    PILOT_FACTOR, as bf16 where the processor has no instructions for it: their seconds are those of the pilot. Leaves
    torch's global random state as it is.
    """
    import torch

    counts = Counter((min(shape), max(shape)) for shape in shapes)
    with torch.no_grad():
        seconds = _measure(counts, names, PILOT_SHARE * MEASURED_FLOP)
        measured = [name for name in names if seconds[name] <= PILOT_FACTOR * min(seconds.values())]
        if len(measured) > 1:
            seconds |= _measure(counts, measured, (1 - PILOT_SHARE) * MEASURED_FLOP)
    return seconds


def _measure(counts: Counter[tuple[int, int]], names: Sequence[str], flop: float) -> dict[str, float]:
    """`counts`: (M, N) -> number of matrices; `flop`: of all turns of all variants."""
    import torch

    generator = torch.Generator().manual_seed(0)  # torch's own random state must not depend on what is measured
    share = flop / len(names) / TURNS / sum(count * _flop(*shape) for shape, count in counts.items())
    seconds = dict.fromkeys(names, 0.0)
    for shape, count in counts.items():
        size = max(min(count, 2), min(count, int(count * share)))
        scale = min(1.0, count * share / size) ** (1 / 3)
        rows, columns = (max(1, int(dimension * scale)) for dimension in shape)
        sample = [torch.randn(rows, columns, generator=generator) for _ in range(size)]
        times: dict[str, list[float]] = defaultdict(list)
        for name in list(names) * TURNS:
            start = time.perf_counter()
            for batch in split_batches(sample, name):
                orthogonalize(batch, name)
            times[name].append(time.perf_counter() - start)
        for name in names:
            seconds[name] += min(times[name]) * count * _flop(*shape) / (size * _flop(rows, columns))
    return seconds


def _flop(rows: int, columns: int) -> float:
    """Return the operations of one (M, N) matrix without _gram_polynomial, which needs fewer."""
    return NEWTON_SCHULZ_STEPS * (4.0 * rows**2 * columns + 2.0 * rows**3)
