"""What the scripts of a sweep's page draw: points of the curves, rows of the leaderboard, settings that differ. One JSON object of bounded size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from runner.inference.best_job import SEED_KEY
from runner.reporting.curve_points import choose_points
from runner.reporting.page_template import RELOAD_SECONDS, short_number
from runner.reporting.sweep_page.effects import sorted_values
from runner.reporting.sweep_page.job_settings import differing_settings
from runner.reporting.sweep_results.columns import point_label
from runner.reporting.sweep_results.metrics_reader import LossPoint
from runner.reporting.sweep_results.results import JobResult, ResultRow, SweepResults

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
    """Return the color class of each row: by its jobs while the colors suffice, so that it stays when the rank changes; else only the best have one."""
    if len(sweep.rows) > CURVE_CLASSES:
        return [f"s{index}" if index < CURVE_CLASSES and row.score else OTHER_ROWS for index, row in enumerate(sweep.rows)]
    position = {id(job): index for index, job in enumerate(sweep.jobs)}
    order = sorted(range(len(sweep.rows)), key=lambda index: position[id(sweep.rows[index].jobs[0])])
    return [f"s{order.index(index)}" for index in range(len(sweep.rows))]


def _row(row: ResultRow, style: str) -> dict[str, Any]:
    return {"label": point_label(row.overrides) or "all seeds", "style": style, "rank": row.rank, "loss": short_number(row.score.mean) if row.score else None}


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
    """Return columns of the points; `tokens` is the tokens per step where that holds for every point. A loss of None is not finite."""
    if not points:
        return None
    chosen = [points[index] for index in choose_points([point.loss for point in points], limit)]
    tokens = [point.tokens or point.loss_tokens for point in chosen]  # version 0.1.0 has loss_tokens only
    per_step = tokens[-1] / chosen[-1].step if chosen[-1].step else 0.0
    is_regular = per_step == int(per_step) and all(token == per_step * point.step for token, point in zip(tokens, chosen, strict=True))
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
