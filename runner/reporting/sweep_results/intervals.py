"""Student's t intervals of means over seeds, and of the difference of two means (Welch). Standard library only.

Sources: Student (1908), The probable error of a mean; Welch (1947), The generalization of Student's problem.
"""

from __future__ import annotations

import math
from functools import lru_cache

from runner.reporting.sweep_results.results import MeanStd

LEVEL = 0.95  # of all intervals
INTERVALS = 200  # of Simpson's rule; even


def mean_interval(value: MeanStd) -> tuple[float, float] | None:
    """Return the t interval of a mean; None for one value, whose deviation is not known."""
    if value.deviation is None:
        return None
    half = t_quantile(value.n - 1) * value.deviation / math.sqrt(value.n)
    return value.mean - half, value.mean + half


def difference_interval(first: MeanStd, second: MeanStd) -> tuple[float, float] | None:
    """Return Welch's interval of `second.mean - first.mean`; None where one of them is a single value."""
    if first.deviation is None or second.deviation is None:
        return None
    variances = [value.deviation**2 / value.n for value in (first, second) if value.deviation is not None]
    difference, variance = second.mean - first.mean, sum(variances)
    if not variance > 0:  # e.g. the seed changes nothing that is trained
        return difference, difference
    degrees = variance**2 / sum(part**2 / (value.n - 1) for part, value in zip(variances, (first, second), strict=True))
    half = t_quantile(max(1.0, math.floor(10 * degrees) / 10)) * math.sqrt(variance)
    return difference - half, difference + half


@lru_cache(maxsize=1024)
def t_quantile(degrees: float, level: float = LEVEL) -> float:
    """Return t with P(|T| <= t) = `level` for Student's T with `degrees` (>= 1, any real number) degrees of freedom;
    its relative error is below 1e-3.

    With T = sqrt(degrees) * tan(a) the density of a is proportional to cos(a) ** (degrees - 1) on (-pi/2, pi/2).
    """
    whole, low, high = _cosine_integral(math.pi / 2, degrees - 1), 0.0, math.pi / 2
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if _cosine_integral(middle, degrees - 1) < level * whole else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _cosine_integral(end: float, power: float) -> float:
    """Return the integral of cos(a) ** power from 0 to `end`, by Simpson's rule on a range that holds all of the mass."""
    end = min(end, 12 / math.sqrt(power + 1))  # beyond it cos(a) ** power < exp(-72)
    step = end / INTERVALS
    values = [max(0.0, math.cos(step * index)) ** power for index in range(INTERVALS + 1)]
    return step / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))
