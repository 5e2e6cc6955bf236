"""Results of a sweep: one `JobResult` per job, one `ResultRow` per grid point (all jobs that differ only in their
seed), ranked in `SweepResults`.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from common.hub import parse_hub_name
from common.paths import command_line
from runner.config.overrides import PATH_KEYS, PLUGINS_KEY, SEARCHPATH_KEY, is_storable, key_of
from runner.config.schema import config_groups
from runner.diagnostics.symptoms import Evaluation
from runner.engine.optim.mup import WIDTH_KEYS
from runner.reporting.metrics import Metrics
from runner.reporting.runs import saved_settings
from runner.reporting.statistics import MeanStd, is_different, level_of_look, mean_std, share_spread, shared_level
from runner.run_dir.best_job import SEED_KEY, ModelScore, comparison_problem, point_of, swept_sort_key

# of evaluations on validation data, on training rows, and of a training step
LOSS_KINDS = ("validation", "training-rows", "training")
JOB_STATUSES = ("completed", "paused", "running", "interrupted", "failed", "new")  # in the order of the rows
KEEP = "keep=optimizer"  # of a branch, whose seed is that of its trunk
SWEEP_ONLY_KEYS = ("hydra.", "hydra/", "sweep.")  # prefixes of overrides which a job has no use for when it runs alone


def point_label(swept: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in swept.items())


def last_value(overrides: list[str], key: str) -> str | None:
    """Return the newest value of a key."""
    return {name: value for name, _, value in (override.partition("=") for override in overrides)}.get(key)


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
    run_dir: Path | None = None  # in the sweep directory; None if the name leads out of it
    is_added_seed: bool = False  # by sweep.seeds or sweep.budget
    launches: list[list[str]] = field(default_factory=lambda: [[]])  # overrides of each launch, the first one first
    stop_at: float = 0.0  # share of its steps at which the job is paused
    data_identity: tuple[Any, Any] = (None, None)  # fingerprint of the training data; rows of each file
    started: float | None = None  # of its newest attempt, by sweep.json, in seconds since 1970
    ended: float | None = None
    began: str = ""  # what it began from: `branched from RUN at step 4`, weights
    differs_from: str = ""  # name of the job which has the same data overrides but was trained on other data

    @property
    def label(self) -> str:
        return point_label(self.swept) or self.name

    @property
    def settings(self) -> dict[str, str]:
        """The saved settings by key; {} if they cannot be read."""
        return saved_settings(self.run_dir) if self.run_dir else {}

    @property
    def shown_status(self) -> str:
        """The status, or `diverged` for a job that has ended so, whether completed or failed."""
        return "diverged" if self.diverged and self.status in ("completed", "failed") else self.status

    @property
    def is_open(self) -> bool:
        """Whether the job may still get a result."""
        return self.status not in ("completed", "failed")

    @property
    def manual_overrides(self) -> list[str]:
        """The newest override per key that a later launch added and the sweep did not give."""
        first, *later = self.launches
        known = {*first, *self.extended}
        added = [override for launch in later for override in launch if override not in known]
        # [] if the overrides of the first launch cannot be read
        return [*{override.partition("=")[0]: override for override in added if first}.values()]

    @property
    def note(self) -> str:
        """What makes the job not comparable to the others; empty if it is comparable."""
        notes = {
            "extended with": " ".join(self.extended),
            "continued with": " ".join(self.manual_overrides),
            "trained on other data than": self.differs_from,
        }
        return ", ".join(f"{text} {value}" for text, value in notes.items() if value)

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


class ResultRow:
    """One row of the leaderboard: a grid point, or one of its jobs (see `members`).

    Its numbers are means over the completed jobs; if none is completed, over all jobs that have reached the same step.
    """

    def __init__(self, jobs: list[JobResult], ranked_by: str) -> None:
        completed = [job for job in jobs if job.status == "completed"]
        at_different_steps = not completed and len({job.metrics.last.step for job in jobs if job.metrics.last}) > 1
        counted = completed or jobs
        # a seed that was added, and has no result yet, does not change the status of the point
        deciding = [job for job in jobs if not (job.is_added_seed and job.is_open)] or jobs
        comparable = [] if at_different_steps else counted
        sound = [job for job in comparable if not job.diverged]
        best_steps = [job.best[ranked_by][1] for job in sound if ranked_by in job.best]
        last = [job.metrics.last for job in counted if job.metrics.last]

        self.overrides = {key: value for key, value in jobs[0].swept.items() if key != SEED_KEY}
        self.jobs = jobs
        self.status = max((job.status for job in deciding), key=JOB_STATUSES.index)  # furthest from completed
        # losses that rows are ranked by: of the weights in model/
        self.score = mean_std(job.score(ranked_by) for job in sound)
        self.model = jobs[0].model if len(jobs) == 1 else None
        self.final = mean_std(job.final.get(ranked_by) for job in sound)  # newest losses
        self.best = mean_std(job.best[ranked_by][0] for job in comparable if ranked_by in job.best)
        self.best_step = statistics.median_low(best_steps) if best_steps else None
        self.train = mean_std(job.final.get("training") for job in comparable)
        self.loss_tokens = _mean(at.loss_tokens for at in last)  # tokens with a label
        self.tokens = _mean(at.tokens for at in last)  # all tokens computed
        self.seconds = _mean(at.time for at in last)  # of training, over all attempts
        self.tokens_per_second = _mean(job.metrics.tokens_per_second for job in counted)
        self.diverged = sum(job.diverged for job in jobs)  # number of jobs
        # from 1, which all rows share that are not told apart from the first; None for a row that is not ranked and for
        # members
        self.rank: int | None = None
        # of a ranked row: whether it differs from the first by more than chance; None: not known
        self.differs: bool | None = None
        self.members = [ResultRow([job], ranked_by) for job in jobs] if len(jobs) > 1 else []  # one per job

    @property
    def lines(self) -> list[ResultRow]:
        """The row and its members, as tables show them."""
        return [self, *self.members]

    @property
    def label(self) -> str:
        return point_label(self.overrides) or "all seeds"

    @property
    def progress(self) -> str:
        """The status, with the share of the steps of a paused row: `paused at 1/4`."""
        share = Fraction(self.stop_at).limit_denominator(1000)
        text = share if share.denominator < 100 else f"{100 * self.stop_at:.0f} %"
        return f"paused at {text}" if self.status == "paused" and share else self.status

    @property
    def stop_at(self) -> float:
        return min(job.stop_at for job in self.jobs)

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
    def compared_keys(self) -> list[str]:
        """Keys whose values are compared: with the seed, if it is swept."""
        return [*self.swept_keys, *[SEED_KEY] * self.has_seeds]

    @property
    def has_seeds(self) -> bool:
        return any(SEED_KEY in job.swept for job in self.jobs)

    @property
    def ranked(self) -> list[ResultRow]:
        """The rows with a rank, best first."""
        return [row for row in self.rows if row.rank is not None]

    @property
    def best(self) -> JobResult | None:
        """The job with the lowest loss among those of the first row; None if no row is ranked."""
        jobs = self.ranked[0].jobs if self.ranked else []
        completed = [job for job in jobs if job.status == "completed"]  # not a seed of sweep.budget that is paused
        return min(completed, key=lambda job: job.score(self.ranked_by) or 0.0, default=None)

    @property
    def problem(self) -> str | None:
        """Why the jobs cannot be ranked; None if they can."""
        return ranking_problem(self.jobs, self.ranked_by)

    @property
    def is_unfinished(self) -> bool:
        """Whether `resume=` would run a job. A diverged job would diverge again and is not repeated; paused ones go on
        unless the search has ended.
        """
        jobs = [job for job in self.jobs if job.status != "paused" or self.status != "failed"]
        return self.status != "completed" and (not self.jobs or any(map(_would_run, jobs)))

    @property
    def resume_command(self) -> str:
        return shlex.join([*command_line("train"), f"resume={self.folder}"])

    def job_command(self, job: JobResult) -> str:
        """Return the command that trains `job` alone, with the overrides it was started with (`sweep.match_budget`
        applied) where they can be read.

        Overrides that name code or a hub are left out: the files of the sweep may be of unknown origin. `command_note`
        names them.
        """
        return own_train_command(self._overrides_of(job))

    def transfer_command(self, job: JobResult) -> str:
        """Return the command that trains the model that sweep.transfer has made narrow, with the settings of `job`;
        empty without sweep.transfer.
        """
        if last_value(self.shared_overrides, "sweep.transfer") != "mup":
            return ""
        wide = [override for override in self.shared_overrides if key_of(override) in WIDTH_KEYS]
        own = [override for override in self._overrides_of(job) if key_of(override) not in WIDTH_KEYS]
        return own_train_command(own, *wide)

    def command_note(self, job: JobResult) -> str:
        """Return which overrides `job_command` leaves out because they name code or a hub, and which options are in no
        folder that a sweep stores; empty for none.
        """
        overrides, groups = self._overrides_of(job), config_groups()
        keys = dict.fromkeys(key_of(override) for override in overrides if _names_code_or_hub(override))
        note = f"left out, for it names code or a hub: {', '.join(keys)}; add it if you trust who made this sweep"
        chosen = [each.removesuffix(".yaml") for each in overrides if key_of(each) in groups]
        own = [each for each in chosen if each.partition("=")[2] not in (*groups[key_of(each)], "null")]
        of_own = f"add the --config-dir or plugin that has {', '.join(own)}"
        return "; ".join([*([note] if keys else []), *([of_own] if own else [])])

    def _overrides_of(self, job: JobResult) -> list[str]:
        overrides = job.launches[-1] or [
            *self.shared_overrides,
            *(f"{key}={value}" for key, value in job.swept.items()),
        ]
        return [override for override in overrides if is_storable(override)]

    def status_counts(self) -> str:
        """Return e.g. `4 jobs: 2 completed, 1 failed, 1 diverged`."""
        counts = {
            status: sum(job.shown_status == status for job in self.jobs) for status in (*JOB_STATUSES, "diverged")
        }
        return f"{len(self.jobs)} job{'s' * (len(self.jobs) != 1)}: " + ", ".join(
            f"{n} {status}" for status, n in counts.items() if n
        )


def own_train_command(overrides: list[str], *more: str) -> str:
    """Return the command that trains a run with `overrides`, without those of sweeps, and those that name code or a
    hub.
    """
    own = [
        override
        for override in overrides
        if not _names_code_or_hub(override) and not override.lstrip("+").startswith(SWEEP_ONLY_KEYS)
    ]
    return shlex.join([*command_line("train"), *own, *more])


def _would_run(job: JobResult) -> bool:
    return job.status != "completed" and not (job.status == "failed" and job.diverged)


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


# --- rows -------------------------------------------------------------------------------------------------------------


def result_rows(jobs: Iterable[JobResult], ranked_by: str, planned_seeds: int = 0) -> list[ResultRow]:
    """Return one row per grid point, best first, with one member row per job where a point has several."""
    jobs = list(jobs)
    is_comparable = ranking_problem(jobs, ranked_by) is None
    points: dict[tuple, list[JobResult]] = {}
    for job in jobs:
        points.setdefault(point_of(job.swept), []).append(job)
    rows = [ResultRow(members, ranked_by) for members in points.values()]
    rows.sort(key=_sort_key)
    ranked = [row for row in rows if row.is_ranked and is_comparable]
    scores = share_spread([row.score for row in ranked if row.score])  # a ranked row has a score
    for position, (row, score) in enumerate(zip(ranked, scores, strict=True), start=1):
        row.differs = differs_from_best(score, scores, planned_seeds)
        is_tied = row.differs is False and all(each.rank == 1 for each in ranked[: position - 1])
        row.rank = 1 if is_tied else position
    return rows


def differs_from_best(score: MeanStd, scores: Sequence[MeanStd], planned_seeds: int) -> bool | None:
    """Whether the loss of a ranked row differs from that of the first by more than chance; None where a row has one
    seed, and the losses are not equal.

    The level is shared by the rows with several seeds, and by the looks of `sweep.seeds`.
    """
    best = scores[0]
    if score.mean == best.mean:
        return False
    if (seeds := min(score.n, best.n)) < 2:
        return None
    looks = max(1, planned_seeds - 1)
    level = level_of_look(looks, min(seeds - 1, looks))
    return is_different(best, score, shared_level(sum(each.n > 1 for each in scores) - 1, level))


def _sort_key(row: ResultRow) -> tuple:
    """Ranked rows by the loss of their models; then diverged, paused (by rung and loss there), running, interrupted, failed and new ones."""
    score = row.score.mean if row.score else math.inf
    rung = -row.stop_at if row.status == "paused" else 0
    return (JOB_STATUSES.index(row.status), row.diverged > 0, rung, score, swept_sort_key(row.overrides))


def _mean(values: Iterable[float | None]) -> float | None:
    result = mean_std(values)
    return result.mean if result else None
