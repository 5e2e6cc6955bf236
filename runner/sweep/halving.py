"""`hydra/sweeper=halving`: all points train a first share of their steps, the best ones the next share, and so on
(successive halving; where a worker would wait, asynchronous: https://arxiv.org/abs/1810.05934).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import print_note
from runner.engine.config import Config
from runner.run_dir.best_job import point_of
from runner.sweep.grid import GridPoint
from runner.sweep.rungs import RungOptions, RungSearch, share_text
from runner.sweep.state import SweepJob, SweepState


@dataclass
class HalvingOptions(RungOptions):
    """Options of `hydra/sweeper=halving`: every combination of the swept values, the worse ones stopped early."""

    _target_: str = "hydra_plugins.lm_runner.HalvingSweeper"
    stops_jobs = True

    def check_plan(
        self, points: Sequence[GridPoint], configs: Sequence[Config], derived: Sequence[Mapping[str, str]]
    ) -> None:
        self.check_rungs(configs, derived)
        print_note(describe_cost(len({point_of(point) for point in points}), len(points), self.eta, self.shares))

    def search(self, state: SweepState) -> HalvingSearch:
        return HalvingSearch(state, self)


# --- the rule ---------------------------------------------------------------------------------------------------------


def points_that_go_on(points: int, eta: int, rung: int, rungs: int) -> int:
    """Return how many of all points go on from rung number `rung`: 1/eta of those that reach it. From the last rung one
    more trains to the end, but not all of them: losses there are closer than seeds are (benchmarks/results/search.md).
    """
    reached, kept = max(1, points // eta**rung), max(1, points // eta ** (rung + 1))
    return max(kept, min(reached - 1, kept + 1)) if rung == rungs - 1 else kept


def next_promotion(losses: Sequence[Sequence[float]], running: Collection[int], eta: int, rungs: int) -> int | None:
    """Return the point that goes on from its newest rung to the next one; None if there is none now.

    `losses`: of each point at each rung that it has reached, the last one (number `rungs`) being the full run; infinite
    at the rung that a failed point did not reach. `running`: points that train to their next rung.

    A point goes on that is certain to be among the best of its rung (`points_that_go_on`), whatever the others still give,
    in the highest rung first. If there is none, then the best waiting one among the best `done // eta`, as ASHA does.
    """
    ranked = [
        sorted((point for point in range(len(losses)) if len(losses[point]) > rung), key=lambda i: (losses[i][rung], i))
        for rung in range(rungs)
    ]

    def waiting(points: Sequence[int], rung: int) -> int | None:
        return next((point for point in points if len(losses[point]) == rung + 1 and point not in running), None)

    certain: list[list[int]] = []
    missing = len(losses) - len(ranked[0])  # points that may still arrive at the rung
    for rung, points in enumerate(ranked):
        quota = points_that_go_on(len(losses), eta, rung, rungs)
        certain.append([point for point in points[: max(0, quota - missing)] if losses[point][rung] < math.inf])
        coming = {point for point in running if len(losses[point]) == rung + 1}
        coming |= {point for point in certain[rung] if len(losses[point]) == rung + 1}
        missing = len(coming) + (quota - len(certain[rung]) if missing else 0)
    asynchronous = [
        [point for point in points[: len(points) // eta] if losses[point][rung] < math.inf]
        for rung, points in enumerate(ranked)
    ]
    for candidates in (certain, asynchronous):
        for rung in reversed(range(rungs)):
            if (point := waiting(candidates[rung], rung)) is not None:
                return point
    return None


def planned_cost(points: int, jobs: int, eta: int, shares: Sequence[float]) -> tuple[list[int], float]:
    """Return how many points train to each rung and to their end, and how many full runs that costs."""
    counts = [points, *(points_that_go_on(points, eta, rung, len(shares)) for rung in range(len(shares)))]
    steps = [after - before for before, after in zip([0.0, *shares], [*shares, 1.0], strict=True)]
    return counts, sum(count * step for count, step in zip(counts, steps, strict=True)) * jobs / points


def describe_cost(points: int, jobs: int, eta: int, shares: Sequence[float]) -> str:
    """Return e.g. `16 points: 16 x 1/8, 8 x 1/4, 4 x 1/2, 3 x 1: 5.5 full runs instead of 16 (34 %)`."""
    counts, runs = planned_cost(points, jobs, eta, shares)
    parts = ", ".join(f"{count} x {share_text(share)}" for count, share in zip(counts, [*shares, 1.0], strict=True))
    seeds = f" ({jobs} jobs)" if jobs != points else ""
    return f"{points} points{seeds}: {parts}: {runs:.1f} full runs instead of {jobs} ({100 * runs / jobs:.0f} %)"


# --- the search -------------------------------------------------------------------------------------------------------


class HalvingSearch(RungSearch):
    """Hands out the jobs of a grid, each to its next rung.

    The points of the rule are those of the leaderboard: jobs that differ only in their seed go on together, by the mean
    of their losses.
    """

    def __init__(self, state: SweepState, options: HalvingOptions) -> None:
        super().__init__(state, options.shares)
        self.eta = options.eta
        self.ended: set[str] = set()  # jobs that this launch does not start again: failed, or stopped by themselves
        points: dict[Any, list[SweepJob]] = {}
        for job in state.jobs:
            if state.is_added_seed(job):  # trained to its end
                continue
            points.setdefault(point_of(job.overrides), []).append(job)
        self.points = list(points.values())
        self.begun = [*map(self._count_begun_rungs, self.points)]  # rungs of each point

    def _count_begun_rungs(self, jobs: list[SweepJob]) -> int:
        """Return the rungs that the search has begun for a point: a job that was trained on by hand, by more processes
        than the sweep has started, does not decide for the other seeds.
        """
        own = [job for job in jobs if self.reached[job.name].attempt <= job.attempt]
        reached = [self.reached[job.name] for job in own or jobs]
        return min(max(1, *(len(each.losses) + each.is_between for each in reached)), len(self.shares) + 1)

    def next_job(self) -> SweepJob | None:
        due = [
            (job, begun)
            for jobs, begun in zip(self.points, self.begun, strict=True)
            for job in jobs
            if self._is_free(job) and len(self.reached[job.name].losses) < begun
        ]
        if due:  # those that have started first
            return self.hand_out(*min(due, key=lambda one: one[0].attempt == 0))
        point = next_promotion(self._losses(), self._running(), self.eta, len(self.shares))
        if point is None:
            return None
        self.begun[point] += 1
        return self.next_job()

    def add_point(self, jobs: list[SweepJob]) -> None:
        """Let new jobs of one point take part, from the first rung on."""
        for job in jobs:
            self.reread(job)
        self.points.append(jobs)
        self.begun.append(1)

    def finish_another(self) -> bool:
        """Let the best paused point train to its end; return whether there is one."""
        losses, last = self._losses(), len(self.shares)
        paused = [at for at, reached in enumerate(losses) if 0 < len(reached) <= last and max(reached) < math.inf]
        if paused:
            self.begun[min(paused, key=lambda at: (-len(losses[at]), losses[at][-1]))] = last + 1
        return bool(paused)

    def _is_free(self, job: SweepJob) -> bool:
        return job.name not in self.targets and job.name not in self.ended and not job.is_diverged

    def _losses(self) -> list[list[float]]:
        return [[*self._point_losses(jobs, begun)] for jobs, begun in zip(self.points, self.begun, strict=True)]

    def _point_losses(self, jobs: list[SweepJob], begun: int) -> Iterator[float]:
        """Yield the mean loss of the jobs at each rung that all of them have reached; infinite, as the last one, where
        one has failed.
        """
        for rung in range(begun):
            losses = [self.reached[job.name].losses[rung : rung + 1] for job in jobs]
            if any(not loss and job.status == "failed" for loss, job in zip(losses, jobs, strict=True)):
                yield math.inf
                return
            if not all(losses):
                return
            yield statistics.fmean(loss[0] for loss in losses)

    def _running(self) -> set[int]:
        return {
            number
            for number, (losses, begun) in enumerate(zip(self._losses(), self.begun, strict=True))
            if len(losses) < begun and math.inf not in losses
        }

    def job_ended(self, job: SweepJob) -> None:
        if not self.finish_rung(job):
            self.ended.add(job.name)
        del self.targets[job.name]
