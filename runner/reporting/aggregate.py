"""FIXME runner.reporting.aggregate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from runner.reporting.results import JOB_STATUSES, JobResult, MeanStd, ResultRow, number_in
from runner.reporting.same_data import SEED_KEY


def result_rows(jobs: Iterable[JobResult], judged: str) -> list[ResultRow]:
    points: dict[tuple, list[JobResult]] = {}
    for job in jobs:
        points.setdefault(tuple(sorted((word, value) for word, value in job.words.items() if word != SEED_KEY)), []).append(job)
    rows = [aggregate_row({word: value for word, value in same[0].words.items() if word != SEED_KEY}, same, judged) for same in points.values()]
    return sorted(rows, key=_sort_key)


def aggregate_row(words: dict[str, str], jobs: list[JobResult], judged: str) -> ResultRow:
    """Means are over the completed jobs; where there is none, over what the others have come to, if that is the same step."""
    counted = [job for job in jobs if job.status == "completed"]
    apart = not counted and len({job.logged.last.step for job in jobs if job.logged.last}) > 1
    counted = counted or jobs
    judged_by = [] if apart else counted
    finite = [job for job in judged_by if not job.diverged and job.final.get(judged, math.inf) < math.inf]
    steps = [job.best[judged][1] for job in finite if judged in job.best]
    lasts = [job.logged.last for job in counted if job.logged.last]
    return ResultRow(
        words=words,
        jobs=jobs,
        status=max((job.status for job in jobs), key=JOB_STATUSES.index),
        final=_mean_std(job.final.get(judged) for job in finite),
        best=_mean_std(job.best[judged][0] for job in judged_by if judged in job.best),
        best_step=statistics.median_low(steps) if steps else None,
        train=_mean_std(job.final.get("training") for job in judged_by if job.final.get("training", math.inf) < math.inf),
        tokens=_mean(mark.tokens for mark in lasts),
        seconds=_mean(mark.time for mark in lasts),
        tokens_per_second=_mean(job.logged.tokens_per_second for job in counted),
        diverged=sum(job.diverged for job in jobs),
    )


def _sort_key(row: ResultRow) -> tuple:
    """The best first; then what diverged, what is unfinished, what failed, what has not begun."""
    best = row.best.mean if row.best else math.inf
    return (JOB_STATUSES.index(row.status), row.diverged > 0, best, [(number_in(value) or 0.0, value) for value in row.words.values()])


def _mean_std(values: Iterable[float | None]) -> MeanStd | None:
    found = [value for value in values if value is not None]
    return MeanStd(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found)) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = _mean_std(values)
    return found.mean if found else None
