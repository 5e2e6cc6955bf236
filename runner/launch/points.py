"""A sweep as rows to compare: one for each point, that is, for all jobs that differ only in their seed; the best first."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.launch import same_data
from runner.launch.logged import Logged, Mark, number, read_json, read_metrics, read_words
from runner.launch.origin import lives
from runner.launch.same_data import SEED

STATUSES = ("completed", "running", "interrupted", "failed", "new")  # as rows are ordered
NOT_ALONE = ("hydra.", "hydra/", "sweep.")  # words that place and launch a sweep and say nothing of a run by itself


@dataclass
class Job:
    name: str
    words: dict[str, str]
    status: str = "new"
    attempt: int = 1
    error: str = ""
    last_lines: list[str] = field(default_factory=list)
    logged: Logged = field(default_factory=Logged)
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
class Spread:
    """A mean over jobs."""

    mean: float
    deviation: float | None  # None for one value
    n: int


@dataclass
class Row:
    """A point, or one of the jobs it is made of."""

    words: dict[str, str]
    jobs: list[Job]
    status: str  # the least of its jobs
    final: Spread | None
    best: Spread | None
    best_step: float | None
    train: Spread | None  # the newest training loss
    tokens: float | None
    seconds: float | None
    tokens_per_second: float | None
    diverged: int  # jobs

    @property
    def ranked(self) -> bool:
        return self.status == "completed" and self.best is not None and not self.diverged

    @property
    def members(self) -> list[Job]:
        """The jobs that are worth a line of their own."""
        return self.jobs if len(self.jobs) > 1 else []


@dataclass
class Sweep:
    folder: Path
    status: str
    created: str
    shared: list[str]
    words: list[str]  # the swept ones, without the seed
    jobs: list[Job]
    judged: str  # the loss rows are ordered by: validation, or training where no job has evaluated
    rows: list[Row]

    @property
    def counts(self) -> dict[str, int]:
        """Jobs by status."""
        found = {status: sum(job.status == status for job in self.jobs) for status in STATUSES}
        return {status: count for status, count in found.items() if count}

    @property
    def best(self) -> Job | None:
        ranked = [job for row in self.rows[:1] if row.ranked for job in row.jobs]
        return min(ranked, key=lambda job: job.best[self.judged][0], default=None)

    def row_of(self, job: Job) -> Row:
        return row(job.words, [job], self.judged)

    def again(self, job: Job) -> str:
        """The command line that trains this job by itself: the words it was started with, fairness and all, where they can be read."""
        told = read_words(self.folder / job.folder / ".hydra" / "overrides.yaml") if job.folder else []
        words = told or [*self.shared, *(f"{word}={value}" for word, value in job.words.items())]
        return shlex.join(["python", "runner/train.py", *(word for word in words if not word.lstrip("+").startswith(NOT_ALONE))])

    @property
    def unfinished(self) -> bool:
        """Whether resume= would run anything. A job that diverged would diverge again."""
        left = [job for job in self.jobs if job.status != "completed" and not (job.status == "failed" and job.diverged)]
        return self.status != "completed" and (bool(left) or not self.jobs)

    @property
    def continued(self) -> str:
        return shlex.join(["python", "runner/train.py", f"resume={self.folder}"])


def read(folder: Path) -> Sweep:
    """What sweep.json and its jobs say. Nothing in them can make it fail; what cannot be read is left out."""
    stated = read_json(folder / "sweep.json")
    jobs = [_job(folder, job) for job in _list(stated.get("jobs")) if isinstance(job, dict)]
    swept = stated.get("swept") if isinstance(stated.get("swept"), dict) else {}
    words = list(dict.fromkeys([*map(str, swept or {}), *(word for job in jobs for word in job.words)]))
    same_data.compare(folder, jobs)
    judged = "validation" if any("validation" in job.final for job in jobs) else "training"
    return Sweep(
        folder=folder,
        status=str(stated.get("status") or "unknown"),
        created=str(stated.get("created") or ""),
        shared=[str(word) for word in _list(stated.get("words"))],
        words=[word for word in words if word != SEED],
        jobs=jobs,
        judged=judged,
        rows=rows_of(jobs, judged),
    )


def rows_of(jobs: Iterable[Job], judged: str) -> list[Row]:
    points: dict[tuple, list[Job]] = {}
    for job in jobs:
        points.setdefault(tuple(sorted((word, value) for word, value in job.words.items() if word != SEED)), []).append(job)
    rows = [row({word: value for word, value in same[0].words.items() if word != SEED}, same, judged) for same in points.values()]
    return sorted(rows, key=_order)


def row(words: dict[str, str], jobs: list[Job], judged: str) -> Row:
    """Means are over the completed jobs; where there is none, over what the others have come to, if that is the same step."""
    counted = [job for job in jobs if job.status == "completed"]
    apart = not counted and len({job.logged.last.step for job in jobs if job.logged.last}) > 1
    counted = counted or jobs
    judged_by = [] if apart else counted
    finite = [job for job in judged_by if not job.diverged and job.final.get(judged, math.inf) < math.inf]
    steps = [job.best[judged][1] for job in finite if judged in job.best]
    lasts = [job.logged.last for job in counted if job.logged.last]
    return Row(
        words=words,
        jobs=jobs,
        status=max((job.status for job in jobs), key=STATUSES.index),
        final=_spread(job.final.get(judged) for job in finite),
        best=_spread(job.best[judged][0] for job in judged_by if judged in job.best),
        best_step=statistics.median_low(steps) if steps else None,
        train=_spread(job.final.get("training") for job in judged_by if job.final.get("training", math.inf) < math.inf),
        tokens=_mean(mark.tokens for mark in lasts),
        seconds=_mean(mark.time for mark in lasts),
        tokens_per_second=_mean(job.logged.tokens_per_second for job in counted),
        diverged=sum(job.diverged for job in jobs),
    )


def _order(row: Row) -> tuple:
    """The best first; then what diverged, what is unfinished, what failed, what has not begun."""
    best = row.best.mean if row.best else math.inf
    return (STATUSES.index(row.status), row.diverged > 0, best, [(number_in(value) or 0.0, value) for value in row.words.values()])


def _job(folder: Path, stated: dict[str, Any]) -> Job:
    name, words = str(stated.get("name") or ""), stated.get("words")
    job = Job(name, {str(word): str(value) for word, value in words.items()} if isinstance(words, dict) else {})
    job.status = stated["status"] if stated.get("status") in STATUSES else "new"
    job.attempt = int(number(stated.get("attempt")) or 1)
    job.error = str(stated.get("error") or "")
    job.last_lines = [str(line) for line in _list(stated.get("last_lines"))]
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        return job
    job.folder = name
    record = read_json(folder / name / "run.json")
    if (status := _status(job.status, stated, record)) != job.status:  # what sweep.json says of its end was of another attempt
        job.status, job.error, job.last_lines, stated = status, "", [], {}
    if job.status == "failed":
        job.error = job.error or str(record.get("error") or "")
    job.by_hand = _by_hand(folder / name, [str(word) for word in _list(stated.get("given"))])
    job.data = same_data.of(record)
    job.logged = read_metrics(folder / name / "metrics.jsonl")
    _judge(job, record, stated.get("loss"))
    return job


def _status(status: str, stated: dict[str, Any], record: dict[str, Any]) -> str:
    """sweep.json is behind where its launcher was killed, or a job was continued by hand: the run knows what has become of it since."""
    if record.get("status") not in STATUSES:
        return status
    if record["status"] == "running":
        return "running" if lives(record) else "interrupted" if status == "running" else status
    since = _when(stated.get("started") if status == "running" else stated.get("ended") or stated.get("started"))
    ended = _when(record.get("ended"))
    return record["status"] if since and ended and ended >= since else status


def _by_hand(run: Path, given: list[str]) -> list[str]:
    """Words the run got after its first launch and not from the sweep. Each launch with new words leaves the former ones in its history."""
    launches = [read_words(path) for path in [*sorted(run.glob(".hydra/history/*/overrides.yaml")), run / ".hydra" / "overrides.yaml"]]
    known = {*launches[0], *given}
    if not launches[0]:
        return []  # it cannot be read
    strange = {word.partition("=")[0]: word for words in launches[1:] for word in words if word not in known}
    return [*strange.values()]


def _judge(job: Job, record: dict[str, Any], loss: Any) -> None:
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
    step = number(record.get("step")) or 0.0
    best = number(told.get("best_val_loss")), number(told.get("best_step"))
    for kind, value in (("validation", number(told.get("val_loss"))), ("training", number(told.get("loss")))):
        if value is not None and kind not in job.final:
            job.final[kind] = value
            job.best[kind] = (best[0], best[1] or step) if kind == "validation" and best[0] is not None else (value, step)
    ended = job.final.get("validation", job.final.get("training"))
    job.diverged = ended == math.inf or (loss in ("inf", "Infinity") and job.status in ("completed", "failed"))


def _loss(mark: Mark) -> float:
    return math.inf if mark.loss is None else mark.loss


def _when(text: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo else found.astimezone()


def _spread(values: Iterable[float | None]) -> Spread | None:
    found = [value for value in values if value is not None]
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found)) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = _spread(values)
    return found.mean if found else None


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def number_in(text: str) -> float | None:
    """The finite number that a word's value spells."""
    try:
        return number(float(text))
    except ValueError:
        return None
