"""Whether the difference of two mean losses over seeds is real: the one rule of compare.py and of sweeps.

Intervals are Student's t of a mean, Welch's t of a difference, the latter with the spread of all points of a sweep where
these are many (`share_spread`). Several comparisons share the error (Bonferroni), and so
do several looks at the same points while seeds are added (`level_of_look`). Standard library only.

Sources: Student (1908), The probable error of a mean; Welch (1947), The generalization of Student's problem; Lan and
DeMets (1983), Discrete sequential boundaries; Kim and DeMets (1987), Design and analysis of group sequential tests.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

LEVEL = 0.95  # of all intervals together
POWER = 0.8  # probability with which `needed_seeds` tell a difference of the observed size apart
MAX_SEEDS = 1000
MAX_LOSS = 1e100  # exclusive: the square of a larger one is not finite
MIN_SHARING_POINTS = 8  # with several seeds, from which on the points of a sweep share their spread
INTERVALS = 4000  # of the midpoint rule


@dataclass
class MeanStd:
    """Mean and sample standard deviation over `n` jobs."""

    mean: float
    deviation: float | None  # None if n is 1
    n: int
    shared_degrees: int = 0  # of freedom, which the deviation has from other points

    @property
    def degrees(self) -> int:
        return self.n - 1 + self.shared_degrees


def mean_std(values: Iterable[float | None]) -> MeanStd | None:
    """Return mean and deviation of the values that are known and below MAX_LOSS; None if there are none."""
    present = [value for value in values if value is not None and abs(value) < MAX_LOSS]
    if not present:
        return None
    deviation = statistics.stdev(present) if len(present) > 1 else None
    return MeanStd(statistics.fmean(present), deviation, len(present))


def share_spread(points: Sequence[MeanStd]) -> list[MeanStd]:
    """Return the points of one sweep, each with at least the mean variance of all of them and a degree of freedom more,
    where MIN_SHARING_POINTS have several seeds: two seeds of a point say little about its spread, those of all points more.

    With fewer points, one that varies more than the others would be called different too often.
    """
    variances = [point.deviation**2 for point in points if point.deviation is not None]
    if len(variances) < MIN_SHARING_POINTS:
        return [*points]
    least = math.sqrt(statistics.fmean(variances))
    return [
        point if point.deviation is None else replace(point, deviation=max(point.deviation, least), shared_degrees=1)
        for point in points
    ]


def mean_interval(value: MeanStd) -> tuple[float, float] | None:
    """Return the t interval of a mean; None for one value, whose deviation is not known."""
    if value.deviation is None:
        return None
    half = t_quantile(value.n - 1) * value.deviation / math.sqrt(value.n)
    return value.mean - half, value.mean + half


def difference_interval(first: MeanStd, second: MeanStd, level: float = LEVEL) -> tuple[float, float] | None:
    """Return Welch's interval of `second.mean - first.mean`; None where one is a single value, or none varies."""
    if first.deviation is None or second.deviation is None:
        return None
    variances = [value.deviation**2 / value.n for value in (first, second) if value.deviation is not None]
    difference, variance = second.mean - first.mean, sum(variances)
    if not variance > 0:  # the seed changes nothing that is trained
        return None
    degrees = variance**2 / sum(part**2 / value.degrees for part, value in zip(variances, (first, second), strict=True))
    half = t_quantile(max(1.0, math.floor(10 * degrees) / 10), level) * math.sqrt(variance)
    return difference - half, difference + half


def is_different(first: MeanStd, second: MeanStd, level: float = LEVEL) -> bool | None:
    """Whether 0 is outside of the interval of the difference; None where one is a single value, or none varies."""
    interval = difference_interval(first, second, level)
    return None if interval is None else not interval[0] <= 0 <= interval[1]


def shared_level(comparisons: int, level: float = LEVEL) -> float:
    """Return the level of each of several intervals that are all right with `level` (Bonferroni)."""
    return 1 - (1 - level) / max(1, comparisons)


def level_of_look(looks: int, look: int) -> float:
    """Return the level at which two points are compared at `look` (from 1) of the planned `looks`, as seeds are added.

    The errors of all looks together are below 1 - LEVEL: up to look k of K, (k / K)**2 of it is spent (Kim and DeMets),
    little while there are few seeds.
    """
    if not 1 <= look <= looks:
        raise ValueError(f"look must be from 1 to {looks}, got {look}")
    return 1 - (1 - LEVEL) * (look**2 - (look - 1) ** 2) / looks**2


def needed_seeds(first: MeanStd, second: MeanStd, level: float = LEVEL) -> int | None:
    """Return about how many seeds per side tell a difference of this size apart with the probability POWER.

    None: not known (one value on a side, no difference), or more than MAX_SEEDS. The deviation is pooled.
    """
    difference = abs(second.mean - first.mean)
    if first.deviation is None or second.deviation is None or not difference > 0:
        return None
    squares = sum((value.n - 1) * (value.deviation or 0.0) ** 2 for value in (first, second))
    deviation = math.sqrt(squares / (first.n + second.n - 2))

    def is_enough(seeds: int) -> bool:
        quantiles = t_quantile(2 * seeds - 2, level) + t_quantile(2 * seeds - 2, 2 * POWER - 1)
        return quantiles * deviation * math.sqrt(2 / seeds) <= difference

    found = bisect.bisect_left(range(MAX_SEEDS + 1), True, lo=2, key=is_enough)
    return found if found <= MAX_SEEDS else None


@lru_cache(maxsize=4096)
def t_quantile(degrees: float, level: float = LEVEL) -> float:
    """Return t with P(|T| <= t) = level for Student's T with `degrees` (>= 1, any real number) degrees of freedom; its
    relative error is below 1e-5 at LEVEL, and 1e-3 up to 0.9997.

    With T = sqrt(degrees) * tan(a) the density of a is proportional to cos(a) ** (degrees - 1) on (-pi/2, pi/2).
    """
    step = min(math.pi / 2, 12 / math.sqrt(degrees)) / INTERVALS  # beyond 12 / sqrt(degrees) it is below exp(-71)
    density = (math.cos(step * (index + 0.5)) ** (degrees - 1) for index in range(INTERVALS))
    sums = [*itertools.accumulate(density, initial=0.0)]
    index = bisect.bisect_left(sums, level * sums[-1])
    share = (level * sums[-1] - sums[index - 1]) / (sums[index] - sums[index - 1])
    return math.sqrt(degrees) * math.tan(step * (index - 1 + share))
