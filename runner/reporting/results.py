"""A sweep as rows to compare: one for each point, that is, for all jobs that differ only in their seed; the best first."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.reporting import same_data
from runner.reporting.metrics_reader import LossPoint, RunMetrics, finite_number, read_json_object, read_override_list, read_run_metrics
from runner.reporting.same_data import SEED_KEY
from runner.run_dir.provenance import is_alive

JOB_STATUSES = ("completed", "running", "interrupted", "failed", "new")  # as rows are ordered
MIN_JOBS = ("hydra.", "hydra/", "sweep.")  # words that place and launch a sweep and say nothing of a run by itself


@dataclass
class JobResult:
    name: str
    words: dict[str, str]
    status: str = "new"
    attempt: int = 1
    error: str = ""
    last_lines: list[str] = field(default_factory=list)
    logged: RunMetrics = field(default_factory=RunMetrics)
    final: dict[str, float] = field(default_factory=dict)  # by kind of loss; infinite where the newest is not finite
    best: dict[str, tuple[float, float]] = field(default_factory=dict)  # by kind of loss: the lowest, and its step
    diverged: bool = False
    folder: str | None = None  # beside sweep.json; None for a name that leads elsewhere
    by_hand: list[str] = field(default_factory=list)  # words it was continued with that the sweep has not given it
    data: tuple[Any, Any] = (None, None)  # of what it trained on: the fingerprint, and of each file the rows
    unlike: str = ""  # the job that by its words should have had the same data, and had other

    @property
    def mark(self) -> str:
        """What sets it apart from the jobs it is compared with."""
        said = [f"continued with {' '.join(self.by_hand)}"] if self.by_hand else []
        return ", ".join([*said, f"trained on other data than {self.unlike}"] if self.unlike else said)

    @property
    def reason(self) -> str:
        """Why there is nothing better to say of it."""
        last = self.logged.last
        if self.status == "interrupted":
            return self.error or ("stopped" + (f" at step {last.step:,.0f}" if last else ""))
        if self.status == "running":
            return f"at step {last.step:,.0f}" if last else "nothing logged yet"
        if self.status == "failed":
            return self.error or "it left no reason"
        return self.error or ("diverged: its last loss is not finite" if self.diverged else "")


@dataclass
class MeanStd:
    """A mean over jobs."""

    mean: float
    deviation: float | None  # None for one value
    n: int


@dataclass
class ResultRow:
    """A point, or one of the jobs it is made of."""

    words: dict[str, str]
    jobs: list[JobResult]
    status: str  # the least of its jobs
    final: MeanStd | None
    best: MeanStd | None
    best_step: float | None
    train: MeanStd | None  # the newest training loss
    tokens: float | None
    seconds: float | None
    tokens_per_second: float | None
    diverged: int  # jobs

    @property
    def ranked(self) -> bool:
        return self.status == "completed" and self.best is not None and not self.diverged

    @property
    def members(self) -> list[JobResult]:
        """The jobs that are worth a line of their own."""
        return self.jobs if len(self.jobs) > 1 else []


@dataclass
class SweepResults:
    folder: Path
    status: str
    created: str
    shared: list[str]
    words: list[str]  # the swept ones, without the seed
    jobs: list[JobResult]
    judged: str  # the loss rows are ordered by: validation, or training where no job has evaluated
    rows: list[ResultRow]

    @property
    def counts(self) -> dict[str, int]:
        """Jobs by status."""
        found = {status: sum(job.status == status for job in self.jobs) for status in JOB_STATUSES}
        return {status: count for status, count in found.items() if count}

    @property
    def best(self) -> JobResult | None:
        ranked = [job for row in self.rows[:1] if row.ranked for job in row.jobs]
        return min(ranked, key=lambda job: job.best[self.judged][0], default=None)

    def row_of(self, job: JobResult) -> ResultRow:
        from runner.reporting.aggregate import aggregate_row

        return aggregate_row(job.words, [job], self.judged)

    def again(self, job: JobResult) -> str:
        """The command line that trains this job by itself: the words it was started with, fairness and all, where they can be read."""
        told = read_override_list(self.folder / job.folder / ".hydra" / "overrides.yaml") if job.folder else []
        words = told or [*self.shared, *(f"{word}={value}" for word, value in job.words.items())]
        return shlex.join(["python", "runner/train.py", *(word for word in words if not word.lstrip("+").startswith(MIN_JOBS))])

    @property
    def unfinished(self) -> bool:
        """Whether resume= would run anything. A job that diverged would diverge again."""
        left = [job for job in self.jobs if job.status != "completed" and not (job.status == "failed" and job.diverged)]
        return self.status != "completed" and (bool(left) or not self.jobs)

    @property
    def continued(self) -> str:
        return shlex.join(["python", "runner/train.py", f"resume={self.folder}"])


def read_sweep_results(folder: Path) -> SweepResults:
    """What sweep.json and its jobs say. Nothing in them can make it fail; what cannot be read is left out."""
    from runner.reporting.aggregate import result_rows

    stated = read_json_object(folder / "sweep.json")
    jobs = [_read_job(folder, job) for job in _as_list(stated.get("jobs")) if isinstance(job, dict)]
    swept = stated.get("swept") if isinstance(stated.get("swept"), dict) else {}
    words = list(dict.fromkeys([*map(str, swept or {}), *(word for job in jobs for word in job.words)]))
    same_data.compare_data(folder, jobs)
    judged = "validation" if any("validation" in job.final for job in jobs) else "training"
    return SweepResults(
        folder=folder,
        status=str(stated.get("status") or "unknown"),
        created=str(stated.get("created") or ""),
        shared=[str(word) for word in _as_list(stated.get("overrides"))],
        words=[word for word in words if word != SEED_KEY],
        jobs=jobs,
        judged=judged,
        rows=result_rows(jobs, judged),
    )


def _read_job(folder: Path, stated: dict[str, Any]) -> JobResult:
    name, words = str(stated.get("name") or ""), stated.get("overrides")
    job = JobResult(name, {str(word): str(value) for word, value in words.items()} if isinstance(words, dict) else {})
    job.status = stated["status"] if stated.get("status") in JOB_STATUSES else "new"
    job.attempt = int(finite_number(stated.get("attempt")) or 1)
    job.error = str(stated.get("error") or "")
    job.last_lines = [str(line) for line in _as_list(stated.get("last_lines"))]
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        return job
    job.folder = name
    record = read_json_object(folder / name / "run.json")
    if (status := _job_status(job.status, stated, record)) != job.status:  # what sweep.json says of its end was of another attempt
        job.status, job.error, job.last_lines, stated = status, "", [], {}
    if job.status == "failed":
        job.error = job.error or str(record.get("error") or "")
    job.by_hand = _manual_overrides(folder / name, [str(word) for word in _as_list(stated.get("applied_overrides"))])
    job.data = same_data.data_identity(record)
    job.logged = read_run_metrics(folder / name / "metrics.jsonl")
    _mark_comparable(job, record, stated.get("loss"))
    return job


def _job_status(status: str, stated: dict[str, Any], record: dict[str, Any]) -> str:
    """sweep.json is behind where its launcher was killed, or a job was continued by hand: the run knows what has become of it since."""
    if record.get("status") not in JOB_STATUSES:
        return status
    if record["status"] == "running":
        return "running" if is_alive(record) else "interrupted" if status == "running" else status
    since = _when(stated.get("started") if status == "running" else stated.get("ended") or stated.get("started"))
    ended = _when(record.get("ended"))
    return record["status"] if since and ended and ended >= since else status


def _manual_overrides(run: Path, given: list[str]) -> list[str]:
    """Words the run got after its first launch and not from the sweep. Each launch with new words leaves the former ones in its history."""
    launches = [read_override_list(path) for path in [*sorted(run.glob(".hydra/history/*/overrides.yaml")), run / ".hydra" / "overrides.yaml"]]
    known = {*launches[0], *given}
    if not launches[0]:
        return []  # it cannot be read
    strange = {word.partition("=")[0]: word for words in launches[1:] for word in words if word not in known}
    return [*strange.values()]


def _mark_comparable(job: JobResult, record: dict[str, Any], loss: Any) -> None:
    """Its losses, from its own log; where that holds none, from what it said at its end."""
    for kind, marks in (("validation", job.logged.eval), ("training", job.logged.train)):
        if marks:
            newest, found = marks[-1].loss, [mark for mark in marks if mark.loss is not None]
            job.final[kind] = math.inf if newest is None else newest
            if found:
                lowest = min(found, key=_loss)
                job.best[kind] = (_loss(lowest), lowest.step)
    metrics = record.get("metrics")
    told: dict[str, Any] = metrics if isinstance(metrics, dict) else {}
    step = finite_number(record.get("step")) or 0.0
    best = finite_number(told.get("best_val_loss")), finite_number(told.get("best_step"))
    for kind, value in (("validation", finite_number(told.get("val_loss"))), ("training", finite_number(told.get("loss")))):
        if value is not None and kind not in job.final:
            job.final[kind] = value
            job.best[kind] = (best[0], best[1] or step) if kind == "validation" and best[0] is not None else (value, step)
    ended = job.final.get("validation", job.final.get("training"))
    job.diverged = ended == math.inf or (loss in ("inf", "Infinity") and job.status in ("completed", "failed"))


def _loss(mark: LossPoint) -> float:
    return math.inf if mark.loss is None else mark.loss


def _when(text: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo else found.astimezone()


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else []


def number_in(text: str) -> float | None:
    """The finite number that a word's value spells."""
    try:
        return finite_number(float(text))
    except ValueError:
        return None
