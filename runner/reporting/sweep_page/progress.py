"""How far a sweep is: jobs by status, and the time that is left."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from datetime import datetime

from runner.reporting.sweep_results.results import JobResult, SweepResults
from runner.tracking.console.numbers import format_seconds

OPTUNA_TRIALS_KEY = "hydra.sweeper.n_trials"


@dataclass(frozen=True)
class SweepProgress:
    ended: int  # jobs: completed or failed
    total: int
    counts: list[tuple[str, int]]  # what is shown -> jobs
    remaining: str  # e.g. `about 00:10:00`; empty where it is not known


def sweep_progress(sweep: SweepResults, now: datetime) -> SweepProgress:
    by_status = {status: [job for job in sweep.jobs if job.status == status] for status in ("completed", "running", "new", "interrupted", "failed")}
    counts = [("done", "completed"), ("running", "running"), ("waiting", "new"), ("interrupted", "interrupted"), ("failed", "failed")]
    ended = len(by_status["completed"]) + len(by_status["failed"])
    waiting = by_status["new"] + by_status["interrupted"]
    trials = _planned_trials(sweep)
    total = max(len(sweep.jobs), trials or 0)
    seconds = _remaining_seconds(by_status["completed"], by_status["running"], len(waiting) + total - len(sweep.jobs), now)
    is_known = sweep.status == "running" and seconds is not None and (sweep.sweeper != "optuna" or trials is not None)
    shown = [(name, len(by_status[status])) for name, status in counts if by_status[status] or name in ("done", "running", "waiting", "failed")]
    return SweepProgress(ended, total, shown, f"about {format_seconds(seconds)}" if is_known and seconds is not None else "")


def _planned_trials(sweep: SweepResults) -> int | None:
    """Return hydra.sweeper.n_trials of a study where it was typed: its jobs are drawn one by one."""
    typed = [override.partition("=")[2] for override in sweep.shared_overrides if override.startswith(f"{OPTUNA_TRIALS_KEY}=")]
    return int(typed[-1]) if sweep.sweeper == "optuna" and typed and typed[-1].isdecimal() else None


def _remaining_seconds(completed: list[JobResult], running: list[JobResult], waiting: int, now: datetime) -> float | None:
    """Return the seconds that the running and waiting jobs still take, as many at a time as run now; None before a job is completed."""
    durations = [seconds for job in completed if (seconds := _duration(job)) is not None]
    if not durations:
        return None
    mean = statistics.fmean(durations)
    of_running = [max(0.0, mean - (now - job.started).total_seconds()) if job.started else mean for job in running]
    parallel = max(1, len(running))
    return max([(sum(of_running) + waiting * mean) / parallel, *of_running])


def _duration(job: JobResult) -> float | None:
    """Return the seconds of a completed job: of its process, or of training where that is longer (over several attempts)."""
    process = (job.ended - job.started).total_seconds() if job.started and job.ended else None
    training = job.metrics.last.time if job.metrics.last else None
    known = [seconds for seconds in (process, training) if seconds is not None and seconds >= 0]
    return max(known, default=None)
