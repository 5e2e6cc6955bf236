"""Rows of the leaderboard: means over the jobs of a grid point, their intervals and order.

Intervals are Student's t over seeds, Welch's for the difference of two means. Standard library only.

Sources: Student (1908), The probable error of a mean; Welch (1947), The generalization of Student's problem.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from functools import lru_cache

from runner.reporting.sweep_results import JOB_STATUSES, JobResult, MeanStd, ResultRow, ranking_problem
from runner.run_dir.best_job import SEED_KEY, point_of, swept_sort_key

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


def result_rows(jobs: Iterable[JobResult], ranked_by: str) -> list[ResultRow]:
    """Return one row per grid point, best first, with one member row per job where a point has several."""
    jobs = list(jobs)
    is_comparable = ranking_problem(jobs, ranked_by) is None
    points: dict[tuple, list[JobResult]] = {}
    for job in jobs:
        points.setdefault(point_of(job.swept), []).append(job)
    rows = [aggregate_row(members, ranked_by) for members in points.values()]
    rows.sort(key=_sort_key)
    for position, row in enumerate(rows, start=1):
        row.rank = position if row.is_ranked and is_comparable else None
        row.members = [aggregate_row([job], ranked_by) for job in row.jobs] if len(row.jobs) > 1 else []
    return rows


def aggregate_row(jobs: list[JobResult], ranked_by: str) -> ResultRow:
    """Return the means over the completed jobs; if none is completed, over all jobs that have reached the same step."""
    counted = [job for job in jobs if job.status == "completed"]
    at_different_steps = not counted and len({job.metrics.last.step for job in jobs if job.metrics.last}) > 1
    counted = counted or jobs
    comparable = [] if at_different_steps else counted
    finite = [job for job in comparable if not job.diverged and job.final.get(ranked_by, math.inf) < math.inf]
    best_steps = [job.best[ranked_by][1] for job in finite if ranked_by in job.best]
    last_points = [job.metrics.last for job in counted if job.metrics.last]
    return ResultRow(
        overrides=_without_seed(jobs[0].swept),
        jobs=jobs,
        status=max((job.status for job in jobs), key=JOB_STATUSES.index),
        score=mean_std(job.score(ranked_by) for job in comparable if not job.diverged),
        model=jobs[0].model if len(jobs) == 1 else None,
        final=mean_std(job.final.get(ranked_by) for job in finite),
        best=mean_std(job.best[ranked_by][0] for job in comparable if ranked_by in job.best),
        best_step=statistics.median_low(best_steps) if best_steps else None,
        train=mean_std(
            job.final.get("training") for job in comparable if job.final.get("training", math.inf) < math.inf
        ),
        loss_tokens=_mean(point.loss_tokens for point in last_points),
        tokens=_mean(point.tokens for point in last_points),
        seconds=_mean(point.time for point in last_points),
        tokens_per_second=_mean(job.metrics.tokens_per_second for job in counted),
        diverged=sum(job.diverged for job in jobs),
    )


def _without_seed(swept: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in swept.items() if key != SEED_KEY}


def _sort_key(row: ResultRow) -> tuple:
    """Ranked rows by the loss of their models; then diverged, running, interrupted, failed and new ones."""
    score = row.score.mean if row.score else math.inf
    return (JOB_STATUSES.index(row.status), row.diverged > 0, score, swept_sort_key(row.overrides))


def mean_std(values: Iterable[float | None]) -> MeanStd | None:
    """Return mean and deviation of the values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return (
        MeanStd(statistics.fmean(present), statistics.stdev(present) if len(present) > 1 else None, len(present))
        if present
        else None
    )


def _mean(values: Iterable[float | None]) -> float | None:
    result = mean_std(values)
    return result.mean if result else None
