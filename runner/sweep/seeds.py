"""More jobs for the best points of a sweep, until they differ by more than chance (`sweep.seeds`), or until a time or a
number of tokens is spent (`sweep.budget`).

`sweep.seeds`: repeated looks at growing data find a difference by chance more often than one look (Armitage et al.,
1969, Repeated significance tests on accumulating data): the looks share their level (`level_of_look`).

`sweep.budget`: first the search with rungs, whose length runner/planning/planned_settings.py has chosen. Then, as long
as something is left, values beyond the range where the best point is at its edge; a second point to its end; then, in
rounds, one more seed of each of the best points. When the budget is spent, the running jobs save and pause. The points
are compared once, at the end: how many seeds there are does not depend on their losses.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Self

from common.errors import print_note, resume_command
from common.guarded_files import last_records
from runner.engine.config import BUDGET
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.sweep_results import ResultRow, SweepResults
from runner.reporting.verdict import SweepVerdict
from runner.run_dir.best_job import SEED_KEY
from runner.sweep.grid import Search
from runner.sweep.halving import HalvingSearch
from runner.sweep.state import SweepJob, SweepState

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}
WIDENED_BEFORE = 0.75  # share of the budget: a point beyond the range may cost a full run
ENDS_AT = 0.985  # share of the budget at which jobs are stopped: they save, and the results are written
READ_EVERY = 0.2  # seconds between two readings of the tokens of running jobs
WRITTEN_EVERY = 10.0  # seconds between two records of the time: a kill -9 forgets no more


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
        return self.add_jobs(sweep)

    def add_jobs(self, sweep: SweepResults) -> bool:
        """Add the jobs that the results of the sweep ask for."""
        ranked = sweep.ranked
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


class Budget(NamedTuple):
    amount: float
    unit: str  # s, tokens or flops

    @classmethod
    def parse(cls, text: str) -> Self:
        """`text`: a value that sweep.budget allows."""
        found = BUDGET.fullmatch(text)
        assert found is not None
        number, unit = found[1], found[2]
        return cls(float(number) * UNIT_SECONDS.get(unit, 1), "s" if unit in UNIT_SECONDS else unit)

    def describe(self, amount: float) -> str:
        if self.unit != "s":
            return f"{amount:.3g} {self.unit}"
        return f"{amount:.0f} s" if amount < 120 else f"{amount / 60:.1f} min"


class BudgetSearch(SeedSearch):
    """Hands out the jobs of `search`, then those of wider ranges and more seeds, until the budget is spent."""

    def __init__(self, search: Search, state: SweepState, budget: Budget, top: int, first_seed: int) -> None:
        super().__init__(search, state, seeds=0, top=top, first_seed=first_seed)
        assert isinstance(search, HalvingSearch)  # as validation.check_budget says
        self.halving, self.budget = search, budget
        self.has_ended, self.written_at, self.read_at = False, time.monotonic(), 0.0
        self.tokens = {job.name: newest_tokens(state, job) for job in state.jobs}

    def next_job(self) -> SweepJob | None:
        return None if self.is_over() else super().next_job()

    def is_over(self) -> bool:
        self.has_ended = self.has_ended or self.spent() >= self.budget.amount * ENDS_AT
        return self.has_ended

    def spent(self) -> float:
        """Return the seconds of all launches, or the input tokens of all jobs."""
        now = time.monotonic()
        if now - self.written_at >= WRITTEN_EVERY:
            self.written_at = now
            self.state.write()
        if self.budget.unit == "s":
            return self.state.count_seconds()
        if now - self.read_at >= READ_EVERY:
            self.read_at = now
            running = [job for job in self.state.jobs if job.name in self.running]
            self.tokens |= {job.name: newest_tokens(self.state, job) for job in running}
        return sum(self.tokens.values())

    def job_ended(self, job: SweepJob) -> None:
        super().job_ended(job)
        self.tokens[job.name] = newest_tokens(self.state, job)
        if self.has_ended and job.status == "interrupted":
            self.halving.pause(job)

    def close(self) -> None:
        super().close()
        state, added = self.state, [job for job in self.state.jobs if self.state.is_added_seed(job)]
        if self.has_ended:  # seeds of the last round that have not begun are not part of the sweep
            added = [job for job in added if job.status != "new"]
            state.jobs[:] = [job for job in state.jobs if job in added or not state.is_added_seed(job)]
        spent, completed = self.spent(), [job for job in state.jobs if job.status == "completed"]
        state.write()
        text = f"sweep.budget: {self.budget.describe(spent)} of {self.budget.describe(self.budget.amount)} spent"
        print_note(
            f"{text}, {len(completed)} jobs trained to their end, {sum(map(state.is_added_seed, completed))} of them more seeds of the best points"
        )
        resume = resume_command(state.folder)
        if self.has_ended:
            print_note(f"{resume} with a larger sweep.budget goes on")
        elif failed := next((job.name for job in added if job.status == "failed" and job.needs_run), None):
            print_note(f"no more seeds, as {failed} has failed: {resume} tries it again")

    def add_jobs(self, sweep: SweepResults) -> bool:
        if self._widen(sweep) or (len(sweep.ranked) < 2 and self.search.finish_another()):
            return True
        return self.add_seeds(with_fewest_seeds(sweep.ranked[: self.top]))

    def _widen(self, sweep: SweepResults) -> bool:
        """Add the next value beyond each edge of the range at which the best point is; return whether there is one."""
        verdict = SweepVerdict(sweep)
        edges = [edge for edge in verdict.edges if edge.command]
        if verdict.winner is None or not edges or self.spent() > WIDENED_BEFORE * self.budget.amount:
            return False
        for edge in edges:
            print_note(f"{edge}: {edge.key}={edge.following} is added")
            self.state.swept[edge.key].append(edge.following)
            swept = [job.swept for job in verdict.winner.jobs if not job.is_added_seed]
            self.halving.add_point([self.state.add_job({**each, edge.key: edge.following}) for each in swept])
        return True


def newest_tokens(state: SweepState, job: SweepJob) -> float:
    """Return the input tokens that a job has trained on, by its newest record."""
    records = reversed(last_records(state.folder / job.name / "metrics.jsonl"))
    found = (record.get("tokens") for record in records)
    return next((float(tokens) for tokens in found if isinstance(tokens, int | float)), 0.0)
