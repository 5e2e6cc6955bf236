"""What the scripts of a sweep's page draw, as one JSON object of bounded size.

The settings in which the jobs of a sweep differ, read from the config that each job was started with.

How far a sweep is: jobs by status, and the time that is left.

What the scripts of a sweep's page draw: points of the curves, rows of the leaderboard, settings that differ. One JSON
object of bounded size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.errors import UserError
from runner.engine.config import STEP_SIZE_KEYS
from runner.reporting.curve_points import choose_points
from runner.reporting.page_template import RELOAD_SECONDS, flatten_settings, short_number
from runner.reporting.sweep_page.importance import sorted_values
from runner.reporting.sweep_results.columns import point_label
from runner.reporting.sweep_results.metrics_reader import LossPoint
from runner.reporting.sweep_results.results import JobResult, ResultRow, SweepResults
from runner.run_dir.best_job import SEED_KEY
from runner.run_dir.saved_config import CONFIG_FILE, load_saved_config
from runner.tracking.console.numbers import format_seconds

MAX_KEYS, MAX_VALUE_CHARS = 200, 200  # of the settings that differ; of one value


def differing_settings(sweep: SweepResults) -> dict[str, list[str | None]]:
    """Return key -> value of each job, for the keys that do not have one value in all jobs with a config; None: the job
    has no such key.
    """
    configs = [_read_settings(sweep.folder / job.folder) if job.folder else {} for job in sweep.jobs]
    known = [index for index, config in enumerate(configs) if config]
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({configs[index].get(key) for index in known}) > 1][:MAX_KEYS]
    return {
        key: [value if (value := config.get(key)) is None else value[:MAX_VALUE_CHARS] for config in configs]
        for key in differing
    }


def opens_by_tokens(sweep: SweepResults) -> bool:
    """Whether curves are first drawn by tokens: the size of a step is swept and the jobs do not have their steps in
    common, so that by step a job with large steps seems better than one that is ranked above it at the same number of
    tokens.
    """
    rules = {_read_settings(sweep.folder / job.folder).get("sweep.match_budget") for job in sweep.jobs if job.folder}
    return "steps" not in rules and bool(STEP_SIZE_KEYS & set(sweep.swept_keys))


def _read_settings(run_dir: Path) -> dict[str, str]:
    try:
        stat = (run_dir / CONFIG_FILE).stat()
    except OSError:
        return {}
    return _parse_settings(run_dir, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=1024)
def _parse_settings(run_dir: Path, signature: tuple[int, int, int]) -> dict[str, str]:
    """Return the settings of a config.yaml; {} if it cannot be read.

    The page of a sweep is written often, a config once.
    """
    try:
        return {
            key: value for key, value in flatten_settings(load_saved_config(run_dir)) if not key.startswith("hydra.")
        }
    except (UserError, OSError, ValueError):
        return {}


OPTUNA_TRIALS_KEY = "hydra.sweeper.n_trials"


@dataclass(frozen=True)
class SweepProgress:
    ended: int  # jobs: completed or failed
    total: int
    counts: list[tuple[str, int]]  # what is shown -> jobs
    remaining: str  # e.g. `about 00:10:00`; empty where it is not known


def sweep_progress(sweep: SweepResults, now: datetime) -> SweepProgress:
    by_status = {
        status: [job for job in sweep.jobs if job.status == status]
        for status in ("completed", "running", "new", "interrupted", "failed")
    }
    counts = [
        ("done", "completed"),
        ("running", "running"),
        ("waiting", "new"),
        ("interrupted", "interrupted"),
        ("failed", "failed"),
    ]
    ended = len(by_status["completed"]) + len(by_status["failed"])
    waiting = by_status["new"] + by_status["interrupted"]
    trials = _planned_trials(sweep)
    total = max(len(sweep.jobs), trials or 0)
    seconds = _remaining_seconds(
        by_status["completed"], by_status["running"], len(waiting) + total - len(sweep.jobs), now
    )
    is_known = sweep.status == "running" and seconds is not None and (sweep.sweeper != "optuna" or trials is not None)
    shown = [
        (name, len(by_status[status]))
        for name, status in counts
        if by_status[status] or name in ("done", "running", "waiting", "failed")
    ]
    return SweepProgress(
        ended, total, shown, f"about {format_seconds(seconds)}" if is_known and seconds is not None else ""
    )


def _planned_trials(sweep: SweepResults) -> int | None:
    """Return hydra.sweeper.n_trials of a study where it was typed: its jobs are drawn one by one."""
    typed = [
        override.partition("=")[2]
        for override in sweep.shared_overrides
        if override.startswith(f"{OPTUNA_TRIALS_KEY}=")
    ]
    return int(typed[-1]) if sweep.sweeper == "optuna" and typed and typed[-1].isdecimal() else None


def _remaining_seconds(
    completed: list[JobResult], running: list[JobResult], waiting: int, now: datetime
) -> float | None:
    """Return the seconds that the running and waiting jobs still take, as many at a time as run now; None before a job
    is completed.
    """
    durations = [seconds for job in completed if (seconds := _duration(job)) is not None]
    if not durations:
        return None
    mean = statistics.fmean(durations)
    of_running = [max(0.0, mean - (now - job.started).total_seconds()) if job.started else mean for job in running]
    parallel = max(1, len(running))
    return max([(sum(of_running) + waiting * mean) / parallel, *of_running])


def _duration(job: JobResult) -> float | None:
    """Return the seconds of a completed job: of its process, or of training where that is longer (over several
    attempts).
    """
    process = (job.ended - job.started).total_seconds() if job.started and job.ended else None
    training = job.metrics.last.time if job.metrics.last else None
    known = [seconds for seconds in (process, training) if seconds is not None and seconds >= 0]
    return max(known, default=None)


SWEEP_STALE_SECONDS = 900  # a page of a running sweep that is older says that the sweep may have ended
CURVE_CLASSES = 8  # classes s0 to s7 of page.css
POINTS_PER_PAGE, POINTS_PER_CURVE, MIN_POINTS = 22_000, 500, 24  # of all curves; at most and at least of one
OTHER_ROWS = "sx"  # class of the rows below the best CURVE_CLASSES


def page_data(sweep: SweepResults) -> dict[str, Any]:
    styles, limit = row_styles(sweep), _points_per_curve(sweep)
    keys = [*sweep.swept_keys, *([SEED_KEY] if sweep.has_seeds else [])]
    row_of = {id(job): index for index, row in enumerate(sweep.rows) for job in row.jobs}
    return {
        "id": sweep.folder.name,
        "loss": sweep.ranked_by,
        "keys": [{"key": key, "values": sorted_values(sweep, key)} for key in keys],
        "rows": [_row(row, style) for row, style in zip(sweep.rows, styles, strict=True)],
        "jobs": [_job(sweep, job, row_of[id(job)], keys, limit) for job in sweep.jobs],
        "settings": {key: _coded(values) for key, values in differing_settings(sweep).items()},
        "written": int(time.time()),
        "stale": SWEEP_STALE_SECONDS,
        "reload": RELOAD_SECONDS if sweep.status == "running" else None,
    }


def row_styles(sweep: SweepResults) -> list[str]:
    """Return the color class of each row: by its jobs while the colors suffice, so that it stays when the rank changes;
    else only the best have one.
    """
    if len(sweep.rows) > CURVE_CLASSES:
        return [
            f"s{index}" if index < CURVE_CLASSES and row.score else OTHER_ROWS for index, row in enumerate(sweep.rows)
        ]
    position = {id(job): index for index, job in enumerate(sweep.jobs)}
    order = sorted(range(len(sweep.rows)), key=lambda index: position[id(sweep.rows[index].jobs[0])])
    return [f"s{order.index(index)}" for index in range(len(sweep.rows))]


def _row(row: ResultRow, style: str) -> dict[str, Any]:
    return {
        "label": point_label(row.overrides) or "all seeds",
        "style": style,
        "rank": row.rank,
        "loss": short_number(row.score.mean) if row.score else None,
    }


def _job(sweep: SweepResults, job: JobResult, row: int, keys: list[str], limit: int) -> dict[str, Any]:
    overfitting = job.overfitting
    return {
        "name": job.name,
        "label": point_label(job.swept) or job.name,
        "row": row,
        "status": "diverged" if job.diverged else job.status,
        "values": [job.swept.get(key) for key in keys],
        "loss": short_number(job.score(sweep.ranked_by)) if job.status == "completed" and not job.diverged else None,
        "lowest": short_number(overfitting[0].step) if overfitting else None,
        "train": _curve(job.metrics.train, limit),
        "eval": _curve(job.metrics.eval, limit),
    }


def _points_per_curve(sweep: SweepResults) -> int:
    curves = sum(bool(points) for job in sweep.jobs for points in (job.metrics.train, job.metrics.eval))
    return max(MIN_POINTS, min(POINTS_PER_CURVE, POINTS_PER_PAGE // max(1, curves)))


def _curve(points: Sequence[LossPoint], limit: int) -> dict[str, Any] | None:
    """Return columns of the points; `tokens` is the tokens per step where that holds for every point.

    A loss of None is not finite.
    """
    if not points:
        return None
    chosen = [points[index] for index in choose_points([point.loss for point in points], limit)]
    tokens = [point.tokens or point.loss_tokens for point in chosen]  # version 0.1.0 has loss_tokens only
    per_step = tokens[-1] / chosen[-1].step if chosen[-1].step else 0.0
    is_regular = per_step == int(per_step) and all(
        token == per_step * point.step for token, point in zip(tokens, chosen, strict=True)
    )
    return {
        "step": [short_number(point.step) for point in chosen],
        "tokens": int(per_step) if is_regular else [short_number(token) for token in tokens],
        "seconds": [float(f"{point.time:.5g}") for point in chosen],
        "loss": [None if point.loss is None else float(f"{point.loss:.6g}") for point in chosen],
    }


def _coded(values: list[str | None]) -> dict[str, Any]:
    """Return {"values": different values, "of": index of each job's value, -1 for none}."""
    different = [*dict.fromkeys(value for value in values if value is not None)]
    index = {value: position for position, value in enumerate(different)}
    return {"values": different, "of": [-1 if value is None else index[value] for value in values]}
