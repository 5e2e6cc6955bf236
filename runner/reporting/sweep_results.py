"""Results of a sweep: one `JobResult` per job, one `ResultRow` per grid point (all jobs that differ only in their
seed), ranked in `SweepResults`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from common.hub import parse_hub_name
from common.paths import command_line
from runner.config.overrides import PATH_KEYS, PLUGINS_KEY, SEARCHPATH_KEY, is_storable, key_of
from runner.diagnostics.history import Evaluation
from runner.reporting.metrics import Metrics
from runner.reporting.runs import read_override_list
from runner.run_dir.best_job import SEED_KEY, ModelScore, comparison_problem

# of evaluations on validation data, on training rows, and of a training step
LOSS_KINDS = ("validation", "training-rows", "training")
JOB_STATUSES = ("completed", "running", "interrupted", "failed", "new")  # in the order of the rows
SWEEP_ONLY_KEYS = ("hydra.", "hydra/", "sweep.")  # prefixes of overrides which a job has no use for when it runs alone


@dataclass
class JobResult:
    name: str
    swept: dict[str, str]  # swept key -> value
    status: str = "new"
    error: str = ""
    last_lines: list[str] = field(default_factory=list)  # of the console output of a failed job
    metrics: Metrics = field(default_factory=Metrics)
    # kind of loss, see LOSS_KINDS -> the newest; infinite if it is not finite
    final: dict[str, float] = field(default_factory=dict)
    best: dict[str, tuple[float, float]] = field(default_factory=dict)  # kind of loss -> the lowest and its step
    model: ModelScore | None = None  # the weights in model/, if the job is completed
    evaluation: Any = None  # what identifies the evaluation rows, from run.json
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # of evaluate.py on the weights in model/
    # swept and scaled keys -> values that the job was started with
    trained: dict[str, str] = field(default_factory=dict)
    extended: list[str] = field(default_factory=list)  # overrides that `resume=SWEEP` has trained it further with
    diverged: bool = False
    folder: str | None = None  # name of the run directory in the sweep directory; None if the name leads out of it
    manual_overrides: list[str] = field(default_factory=list)  # of a later launch, not given by the sweep
    data_identity: tuple[Any, Any] = (None, None)  # fingerprint of the training data; rows of each file
    started: datetime | None = None  # of its newest attempt, by sweep.json
    ended: datetime | None = None
    differs_from: str = ""  # name of the job which has the same data overrides but was trained on other data

    @property
    def note(self) -> str:
        """What makes the job not comparable to the others; empty if it is comparable."""
        notes = [f"extended with {' '.join(self.extended)}"] if self.extended else []
        notes += [f"continued with {' '.join(self.manual_overrides)}"] if self.manual_overrides else []
        return ", ".join([*notes, f"trained on other data than {self.differs_from}"] if self.differs_from else notes)

    def score(self, kind: str) -> float | None:
        """Return the loss that the job is ranked by: that of the weights in model/; before it has one, the best so far."""
        if kind == "training":
            return self.final.get(kind)  # of one step: not ranked
        if self.model is not None and self.model.loss is not None:
            return self.model.loss
        return self.best[kind][0] if kind in self.best else None

    @property
    def overfitting(self) -> tuple[Evaluation, Evaluation] | None:
        """The best and the newest evaluation on validation data, where the run overfits; None otherwise."""
        return self.metrics.overfitting if "validation" in self.final else None

    @property
    def reason(self) -> str:
        """Why the job has no final result, or a bad one; empty for a completed job with a finite loss."""
        last = self.metrics.last
        if self.status == "interrupted":
            return self.error or ("stopped" + (f" at step {last.step:,.0f}" if last else ""))
        if self.status == "running":
            return f"at step {last.step:,.0f}" if last else "nothing logged yet"
        if self.status == "failed":
            return self.error or "no reason recorded"
        return self.error or ("diverged: the last loss is not finite" if self.diverged else "")


@dataclass
class MeanStd:
    """Mean and sample standard deviation over `n` jobs."""

    mean: float
    deviation: float | None  # None if n is 1
    n: int


@dataclass
class ResultRow:
    """One row of the leaderboard: a grid point, or one of its jobs (see `members`)."""

    overrides: dict[str, str]  # swept key -> value, without the seed
    jobs: list[JobResult]
    status: str  # of the job that is furthest from completed
    score: MeanStd | None  # losses that rows are ranked by: of the weights in model/
    model: ModelScore | None  # of the only job
    final: MeanStd | None  # newest losses of the kind that rows are ranked by
    best: MeanStd | None
    best_step: float | None
    train: MeanStd | None  # newest training loss
    loss_tokens: float | None  # tokens with a label
    tokens: float | None  # all tokens computed
    seconds: float | None  # of training, over all attempts
    tokens_per_second: float | None
    diverged: int  # number of jobs
    rank: int | None = None  # from 1; None for a row that is not ranked and for members
    members: list[ResultRow] = field(default_factory=list)  # one per job, if there are several

    @property
    def is_ranked(self) -> bool:
        return self.status == "completed" and self.score is not None and not self.diverged

    @property
    def seed(self) -> str:
        """Seed of the only job, or the number of seeds."""
        return self.jobs[0].swept.get(SEED_KEY, "") if len(self.jobs) == 1 else f"{len(self.jobs)} seeds"


@dataclass
class SweepResults:
    folder: Path
    status: str
    created: str
    shared_overrides: list[str]  # given to every job
    swept_keys: list[str]  # without the seed
    jobs: list[JobResult]
    ranked_by: str  # one of LOSS_KINDS
    rows: list[ResultRow]  # best first
    sweeper: str = "grid"  # or optuna
    # keys that are not swept, but scaled per job: optimizer.lr by sweep.lr_scale
    scaled_keys: list[str] = field(default_factory=list)
    is_running: bool = False  # its process is alive: `resume=` would be refused

    @property
    def shown_keys(self) -> list[str]:
        """Keys with a column of values."""
        return [*self.swept_keys, *self.scaled_keys]

    @property
    def has_seeds(self) -> bool:
        return any(SEED_KEY in job.swept for job in self.jobs)

    @property
    def best(self) -> JobResult | None:
        """The job with the lowest loss among those of the first row; None if no row is ranked."""
        jobs = self.rows[0].jobs if self.rows and self.rows[0].rank == 1 else []
        return min(jobs, key=lambda job: job.score(self.ranked_by) or 0.0, default=None)

    @property
    def problem(self) -> str | None:
        """Why the jobs cannot be ranked; None if they can."""
        return ranking_problem(self.jobs, self.ranked_by)

    @property
    def is_unfinished(self) -> bool:
        """Whether `resume=` would run a job. A diverged job would diverge again and is not repeated."""
        remaining = [
            job for job in self.jobs if job.status != "completed" and not (job.status == "failed" and job.diverged)
        ]
        return self.status != "completed" and (bool(remaining) or not self.jobs)

    @property
    def resume_command(self) -> str:
        return shlex.join([*command_line("train"), f"resume={self.folder}"])

    def job_command(self, job: JobResult) -> str:
        """Return the command that trains `job` alone, with the overrides it was started with (`sweep.match_budget`
        applied) where they can be read.

        Overrides that name code or a hub are left out: the files of the sweep may be of unknown origin. `command_note`
        names them.
        """
        own = [
            override
            for override in self._overrides_of(job)
            if not _names_code_or_hub(override) and not override.lstrip("+").startswith(SWEEP_ONLY_KEYS)
        ]
        return shlex.join([*command_line("train"), *own])

    def command_note(self, job: JobResult) -> str:
        """Return which overrides `job_command` leaves out because they name code or a hub; empty for none."""
        keys = [
            *dict.fromkeys(key_of(override) for override in self._overrides_of(job) if _names_code_or_hub(override))
        ]
        return (
            f"left out, for it names code or a hub: {', '.join(keys)}; add it if you trust who made this sweep"
            if keys
            else ""
        )

    def _overrides_of(self, job: JobResult) -> list[str]:
        recorded = read_override_list(self.folder / job.folder / ".hydra" / "overrides.yaml") if job.folder else []
        overrides = recorded or [*self.shared_overrides, *(f"{key}={value}" for key, value in job.swept.items())]
        return [override for override in overrides if is_storable(override)]

    def status_counts(self) -> str:
        """Return e.g. `4 jobs: 3 completed, 1 failed`."""
        counts = {status: sum(job.status == status for job in self.jobs) for status in JOB_STATUSES}
        return f"{len(self.jobs)} job{'s' * (len(self.jobs) != 1)}: " + ", ".join(
            f"{n} {status}" for status, n in counts.items() if n
        )


def _names_code_or_hub(override: str) -> bool:
    """Whether a command with the override would import code that it names, or load from a hub."""
    key, value = key_of(override), override.partition("=")[2]
    return (
        key in (PLUGINS_KEY, SEARCHPATH_KEY)
        or "hub:" in value
        or (key in PATH_KEYS and parse_hub_name(value) is not None)
    )


def ranking_problem(jobs: list[JobResult], ranked_by: str) -> str | None:
    """Return why the losses of completed jobs do not rank them; None if they do."""
    completed = [job for job in jobs if job.status == "completed" and not job.diverged]
    if ranked_by == "training":
        return "no job was evaluated, and the training loss is that of other rows in every job" if completed else None
    problem = comparison_problem(job.evaluation for job in completed)
    return f"the jobs were judged {problem}" if problem else None
