"""report.html of a sweep: leaderboard and curves of all jobs in one file, complete from before the first job."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import chain
from typing import Any

from runner.engine.config import STEP_SIZE_KEYS
from runner.reporting.columns import Column, swept_text, table_columns, with_note
from runner.reporting.page_kit import (
    RELOAD_SECONDS,
    loss_curve,
    render,
    short_number,
)
from runner.reporting.runs import REPORT_FILE, differing_values, whole_number
from runner.reporting.sweep_results import JobResult, ResultRow, SweepResults, last_value
from runner.reporting.verdict import Importance, SweepVerdict, setting_effects, setting_importance, sorted_values
from runner.tracking.lines import format_seconds

# last lines of a failed job; characters of one; of all jobs together
MAX_LINES, MAX_LINE_CHARS, MAX_TAIL_CHARS = 20, 400, 120_000
MAX_KEYS, MAX_VALUE_CHARS = 200, 200  # of the settings that differ; of one value
SWEEP_STALE_SECONDS = 900  # a page of a running sweep that is older says that the sweep may have ended
CURVE_CLASSES = 8  # classes s0 to s7 of page.css
POINTS_PER_PAGE, POINTS_PER_CURVE, MIN_POINTS = 22_000, 500, 24  # of all curves; at most and at least of one
CURVE_DIGITS = 6
OTHER_ROWS = "sx"  # class of the rows below the best CURVE_CLASSES
OPTUNA_TRIALS_KEY = "hydra.sweeper.n_trials"
END_STATUSES = ("completed", "paused", "failed")  # statuses of jobs that do not train any more


def sweep_page(sweep: SweepResults, is_final: bool = True) -> str:
    """Return the page.

    The importance of settings takes seconds to calculate: it is left out unless `is_final`.
    """
    later = Importance(reason="it is calculated when the sweep ends, and by report.py")
    verdict, styles = SweepVerdict(sweep), row_styles(sweep)
    settings = [job.settings for job in sweep.jobs]
    columns = [column for column in table_columns(sweep) if column.title]
    return render(
        "sweep",
        _data(sweep, styles, settings),
        sweep=sweep,
        progress=sweep_progress(sweep, time.time()),
        verdict=verdict,
        columns=columns,
        folded=folded_columns(sweep, columns),
        styles=styles,
        pages={job.name for job in sweep.jobs if job.run_dir and (job.run_dir / REPORT_FILE).is_file()},
        # By step a job with large steps would seem better than one that is ranked above it at the same tokens.
        opens_by_tokens=bool(STEP_SIZE_KEYS & set(sweep.swept_keys))
        and all(each.get("sweep.match_budget") != "steps" for each in settings),
        effects=setting_effects(sweep),
        importance=setting_importance(sweep) if is_final or sweep.status != "running" else later,
        failed=_failed_jobs(sweep),
        swept_text=swept_text,
        with_note=with_note,
    )


def folded_columns(sweep: SweepResults, columns: list[Column]) -> set[str]:
    """Return the keys of the columns that add nothing: the values of all rows are equal or missing, or those of an
    earlier column.
    """
    folded: set[str] = set()
    kept: list[list[str]] = []
    for column in columns if len(sweep.rows) > 1 else []:
        cells = [[column.cell(line) for line in row.lines] for row in sweep.rows]
        values = [*chain(*cells)]
        is_repeated = any(all(value in ("", of) for value, of in zip(values, other, strict=True)) for other in kept)
        is_equal = len({*values} - {""}) < 2 or not any(point for point, *_ in cells)
        if column.key != "status" and (is_repeated or is_equal):
            folded.add(column.key)
        else:
            kept.append(values)
    return folded


def _failed_jobs(sweep: SweepResults) -> list[tuple[JobResult, list[str], str]]:
    """Return (job, last lines of its output, the command that trains it alone) of failed jobs."""
    failed, left = [], MAX_TAIL_CHARS
    for job in sweep.jobs:
        if job.status == "failed":
            lines = [line[:MAX_LINE_CHARS] for line in job.last_lines[-MAX_LINES:]]
            left -= sum(map(len, lines))
            failed.append((job, lines if left > 0 else [], sweep.job_command(job)))
    return failed


@dataclass(frozen=True)
class SweepProgress:
    ended: int  # jobs: completed, paused or failed
    total: int
    remaining: str  # e.g. `about 00:10:00`; empty where it is not known


def sweep_progress(sweep: SweepResults, now: float) -> SweepProgress:
    completed, running = ([job for job in sweep.jobs if job.status == status] for status in ("completed", "running"))
    ended, trials = sum(job.status in END_STATUSES for job in sweep.jobs), _planned_trials(sweep)
    total = max(len(sweep.jobs), trials or 0)
    seconds = _remaining_seconds(completed, running, total - ended - len(running), now)
    is_known = sweep.status == "running" and (sweep.sweeper != "optuna" or trials is not None)
    return SweepProgress(ended, total, f"about {format_seconds(seconds)}" if is_known and seconds is not None else "")


def _planned_trials(sweep: SweepResults) -> int | None:
    """Return hydra.sweeper.n_trials of a study where it was typed: its jobs are drawn one by one."""
    trials = last_value(sweep.shared_overrides, OPTUNA_TRIALS_KEY) if sweep.sweeper == "optuna" else None
    return whole_number(trials or "")


def _remaining_seconds(completed: list[JobResult], running: list[JobResult], waiting: int, now: float) -> float | None:
    """Return the seconds that the running and waiting jobs still take, as many at a time as run now; None before a job
    is completed.
    """
    durations = [seconds for job in completed if (seconds := _duration(job)) is not None]
    if not durations:
        return None
    mean = statistics.fmean(durations)
    of_running = [max(0.0, mean - (now - job.started)) if job.started else mean for job in running]
    parallel = max(1, len(running))
    return max([(sum(of_running) + waiting * mean) / parallel, *of_running])


def _duration(job: JobResult) -> float | None:
    """Return the seconds of a completed job: of its process, or of training where that is longer (over several
    attempts).
    """
    known = [job.ended - job.started] if job.started and job.ended else []
    known += [job.metrics.last.time] if job.metrics.last else []
    return max((seconds for seconds in known if seconds >= 0), default=None)


def _data(sweep: SweepResults, styles: list[str], settings: list[dict[str, str]]) -> dict[str, Any]:
    """Return what the scripts of the page draw, of bounded size."""
    row_of = {id(job): index for index, row in enumerate(sweep.rows) for job in row.jobs}
    curves = sum(bool(len(curve)) for job in sweep.jobs for curve in (job.metrics.train, job.metrics.eval))
    first = min((job.started for job in sweep.jobs if job.started), default=0.0)
    limit = max(MIN_POINTS, min(POINTS_PER_CURVE, POINTS_PER_PAGE // max(1, curves)))
    return {
        "id": sweep.folder.name,
        "loss": sweep.ranked_by,
        "keys": [{"key": key, "values": sorted_values(sweep, key)} for key in sweep.compared_keys],
        "rows": [_row(row, style) for row, style in zip(sweep.rows, styles, strict=True)],
        "jobs": [_job(sweep, job, row_of[id(job)], limit, first) for job in sweep.jobs],
        "settings": _differing_settings(settings),
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
    rung = {"paused": row.progress} if row.status == "paused" else {}
    return rung | {
        "label": row.label,
        "style": style,
        "rank": row.rank,
        "loss": short_number(row.score.mean) if row.score else None,
    }


def _job(sweep: SweepResults, job: JobResult, row: int, limit: int, first: float) -> dict[str, Any]:
    optional = {"label": job.label if job.label != sweep.rows[row].label else None, "span": _span(job, first)}
    return {name: value for name, value in optional.items() if value} | {
        "name": job.name,
        "row": row,
        "status": job.shown_status,
        "values": [job.swept.get(key) for key in sweep.compared_keys],
        "loss": short_number(job.score(sweep.ranked_by)) if job.status == "completed" and not job.diverged else None,
        "lowest": short_number(job.overfitting[0].step) if job.overfitting else None,
        "train": loss_curve(job.metrics.train, limit, CURVE_DIGITS),
        "eval": loss_curve(job.metrics.eval, limit, CURVE_DIGITS),
    }


def _span(job: JobResult, first: float) -> list[float | int | None] | None:
    """Return the seconds from `first` to the start and to the end of the newest attempt; None where they are not known."""
    ended = job.ended or (time.time() if job.status == "running" else None)
    if not job.started or not ended or ended < job.started:
        return None
    return [short_number(round(at - first, 1)) for at in (job.started, ended)]


def _differing_settings(settings: list[dict[str, str]]) -> dict[str, Any]:
    """Return key -> different values and the index of each job's value, for the keys that do not have one value in all
    jobs with a config; -1: the job has no such key.
    """
    differing = [*differing_values([each for each in settings if each])][:MAX_KEYS]
    coded = {}
    for key in differing:
        values = [each[key][:MAX_VALUE_CHARS] if key in each else None for each in settings]
        known = [*dict.fromkeys(value for value in values if value is not None)]
        coded[key] = {"values": known, "of": [-1 if value is None else known.index(value) for value in values]}
    return coded
