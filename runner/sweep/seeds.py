"""`sweep.seeds`: more seeds for the best points of a sweep, until they differ by more than chance.

Repeated looks at growing data find a difference by chance more often than one look (Armitage et al., 1969, Repeated
significance tests on accumulating data): the looks share their level (`level_of_look`).
"""

from __future__ import annotations

from common.errors import print_note
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.sweep_results import ResultRow, SweepResults
from runner.run_dir.best_job import SEED_KEY
from runner.sweep.grid import Search
from runner.sweep.state import SweepJob, SweepState


def with_fewest_seeds(rows: list[ResultRow]) -> list[ResultRow]:
    fewest = min((len(row.jobs) for row in rows), default=0)
    return [row for row in rows if len(row.jobs) == fewest]


class SeedSearch(Search):
    """Hands out the jobs of `search`; after the last of them, in rounds, one more seed of the best points.

    A round begins when all jobs have ended. Its points are the best one and those of the first `top` of the leaderboard
    that are not told apart from it, as far as they have the fewest seeds. Added jobs train to their end. It has no state
    of its own: a resumed sweep reads its results again.
    """

    def __init__(self, search: Search, state: SweepState, seeds: int, top: int, first_seed: int) -> None:
        self.search, self.state, self.seeds, self.top, self.first_seed = search, state, seeds, top, first_seed
        self.running: set[str] = set()  # names of jobs that were handed out and have not ended
        self.tried: set[str] = set()  # names of added jobs that were handed out by this launch

    def next_job(self) -> SweepJob | None:
        job = self.search.next_job() or self._next_seed()
        if job is not None:
            self.running.add(job.name)
            self.tried.add(job.name)
        return job

    def is_due(self, job: SweepJob) -> bool:
        return self.state.is_added_seed(job) or self.search.is_due(job)

    def arguments(self, job: SweepJob) -> list[str]:
        return [] if self.state.is_added_seed(job) else self.search.arguments(job)

    def job_ended(self, job: SweepJob) -> None:
        self.running.discard(job.name)
        if not self.state.is_added_seed(job):
            self.search.job_ended(job)

    def close(self) -> None:
        self.search.close()

    def _next_seed(self) -> SweepJob | None:
        """Return an added job that has to run; of a new round, unless a seed of this launch has failed."""
        if not (self.running or self._open()) and self.add_round():
            self.state.write()
        return self.search.next_job() or next((job for job in self._open() if job.name not in self.tried), None)

    def _open(self) -> list[SweepJob]:
        """Return the added jobs without a result; a paused one was stopped by sweep.budget."""
        added = [job for job in self.state.jobs if self.state.is_added_seed(job)]
        return [job for job in added if job.needs_run or job.status == "paused"]

    def add_round(self) -> bool:
        """Add the jobs of the next round to the state, which is not written; return whether there are any."""
        sweep = read_sweep_results(self.state.folder)
        if sweep.problem:
            print_note(f"no seeds are added: {sweep.problem}")
            return False
        return self.add_jobs(sweep, [row for row in sweep.rows if row.rank is not None])

    def add_jobs(self, sweep: SweepResults, ranked: list[ResultRow]) -> bool:
        """`ranked`: the rows with a rank, the best one first."""
        if len(ranked) < 2 and self.search.finish_another():
            return True
        contenders = ranked[:1] + [row for row in ranked[1 : self.top] if not row.differs]
        points = [row for row in with_fewest_seeds(contenders) if len(row.jobs) < self.seeds]
        if len(ranked) < 2:
            print_note("sweep.seeds adds no seeds: it compares points, and fewer than two have a result")
        if len(contenders) < 2 or not points:
            return False
        print_note(f"{len(contenders)} points are not told apart: another seed of {len(points)} of them")
        return self.add_seeds(points)

    def add_seeds(self, points: list[ResultRow]) -> bool:
        for row in points:
            self.state.add_job({**row.overrides, SEED_KEY: str(self._new_seed(row))})
        return bool(points)

    def _new_seed(self, row: ResultRow) -> int:
        """Return the first seed from that of the sweep on that no job of the point has."""
        used = {int(job.swept.get(SEED_KEY, self.first_seed)) for job in row.jobs}
        return next(seed for seed in range(self.first_seed, self.first_seed + len(used) + 1) if seed not in used)
