"""Read the results of a sweep directory.

A missing or damaged file leaves its values out and never raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import Outcome
from common.filesystem import read_json_object
from common.ownership import is_alive
from runner.reporting.run_folders import sweep_status
from runner.reporting.sweep_results.aggregate import result_rows
from runner.reporting.sweep_results.evaluations import current_evaluations
from runner.reporting.sweep_results.metrics_reader import (
    LossPoint,
    count_number,
    finite_number,
    read_job_metrics,
    read_override_list,
)
from runner.reporting.sweep_results.results import JOB_STATUSES, LOSS_KINDS, JobResult, SweepResults
from runner.run_dir.best_job import SEED_KEY, model_score, parse_number
from runner.run_dir.contents import OWNER_FILE
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import load_saved_config

LR_KEY = "optimizer.lr"
DATA_KEY_PREFIXES = ("data", "stage", "experiment", "model")  # swept keys that change the training data or its rows


def read_sweep_results(folder: Path) -> SweepResults:
    sweep = read_json_object(folder / "sweep.json")
    jobs = [_read_job(folder, job) for job in _as_list(sweep.get("jobs")) if isinstance(job, dict)]
    swept = sweep.get("swept") if isinstance(sweep.get("swept"), dict) else {}
    keys = dict.fromkeys([*map(str, swept or {}), *(key for job in jobs for key in job.swept)])
    _compare_data(folder, jobs)
    ranked_by = next((kind for kind in LOSS_KINDS if any(kind in job.final for job in jobs)), "training")
    shared = [str(override) for override in _as_list(sweep.get("overrides"))]
    return SweepResults(
        folder=folder,
        status=sweep_status(folder, sweep),
        created=str(sweep.get("created") or ""),
        shared_overrides=shared,
        swept_keys=[key for key in keys if key != SEED_KEY],
        jobs=jobs,
        ranked_by=ranked_by,
        rows=result_rows(jobs, ranked_by),
        sweeper=str(sweep.get("sweeper") or "grid"),
        scaled_keys=_set_trained_values(folder, jobs, shared),
        is_running=sweep.get("status") == "running"
        and bool(owner := read_json_object(folder / OWNER_FILE))
        and is_alive(owner),
    )


def _read_job(folder: Path, recorded: dict[str, Any]) -> JobResult:
    """Combine the entry `recorded` of sweep.json with the job's own run.json and metrics.jsonl."""
    name, overrides, extended = (
        str(recorded.get("name") or ""),
        recorded.get("overrides"),
        [str(each) for each in _as_list(recorded.get("applied_overrides"))],
    )
    job = JobResult(
        name, {str(key): str(value) for key, value in overrides.items()} if isinstance(overrides, dict) else {}
    )
    job.status = recorded["status"] if recorded.get("status") in JOB_STATUSES else "new"
    job.error = str(recorded.get("error") or "")
    job.last_lines = [str(line) for line in _as_list(recorded.get("last_lines"))]
    if not name or "/" in name or "\0" in name or name in (".", "..") or (folder / name).is_symlink():
        return job
    job.folder = name
    metadata = RunMetadata.read(folder / name)
    # error and loss of sweep.json belong to an earlier attempt
    if (status := _job_status(job.status, recorded, metadata)) != job.status:
        job.status, job.error, job.last_lines, recorded = status, "", [], {}
    if job.status == "failed":
        job.error = job.error or str(metadata.get("error") or "")
    job.extended, job.manual_overrides = extended, _manual_overrides(folder / name, extended)
    job.model, job.evaluation, job.evaluations = (
        model_score(metadata),
        metadata.get("evaluation"),
        current_evaluations(metadata),
    )
    job.data_identity = _data_identity(metadata)
    job.started, job.ended = _parse_time(recorded.get("started")), _parse_time(recorded.get("ended"))
    job.metrics = read_job_metrics(folder / name / "metrics.jsonl")
    _set_losses(job, metadata)
    has_diverged = Outcome.DIVERGED in (metadata.get("outcome"), recorded.get("outcome")) or recorded.get("loss") in (
        "inf",
        "Infinity",
    )
    job.diverged = next((job.final[kind] for kind in LOSS_KINDS if kind in job.final), 0.0) == math.inf or (
        has_diverged and job.status in ("completed", "failed")
    )
    return job


def _job_status(status: str, recorded: dict[str, Any], metadata: dict[str, Any]) -> str:
    """Return the status by run.json where it is newer: the sweep process was killed, or the job was continued by hand."""
    if metadata.get("status") not in JOB_STATUSES:
        return status
    if metadata["status"] == "running":
        return "running" if is_alive(metadata) else "interrupted" if status == "running" else status
    since = _parse_time(
        recorded.get("started") if status == "running" else recorded.get("ended") or recorded.get("started")
    )
    ended = _parse_time(metadata.get("ended"))
    return metadata["status"] if since and ended and ended >= since else status


def _manual_overrides(run_dir: Path, from_sweep: list[str]) -> list[str]:
    """Return the newest override per key that a later launch added and the sweep did not give.

    Earlier launches are in .hydra/history.
    """
    launches = [
        read_override_list(path)
        for path in [*sorted(run_dir.glob(".hydra/history/*/overrides.yaml")), run_dir / ".hydra" / "overrides.yaml"]
    ]
    if not launches[0]:
        return []  # the overrides of the first launch cannot be read
    known = {*launches[0], *from_sweep}
    return [
        *{
            override.partition("=")[0]: override
            for launch in launches[1:]
            for override in launch
            if override not in known
        }.values()
    ]


def _set_losses(job: JobResult, metadata: dict[str, Any]) -> None:
    """Set final and best losses from metrics.jsonl, or from run.json where nothing is logged."""
    on_training_rows = isinstance(job.evaluation, dict) and job.evaluation.get("on") == "training"
    for kind, points in (
        ("training-rows" if on_training_rows else "validation", job.metrics.eval),
        ("training", job.metrics.train),
    ):
        if points:
            job.final[kind] = _loss_or_inf(points[-1])
            lowest = min(points, key=_loss_or_inf)
            if lowest.loss is not None:
                job.best[kind] = (lowest.loss, lowest.step)
    summary = metadata.get("metrics")
    values = {key: finite_number(value) for key, value in summary.items()} if isinstance(summary, dict) else {}
    step = count_number(metadata.get("step")) or 0.0
    for kind, final, best in (
        ("validation", values.get("val_loss"), values.get("best_val_loss")),
        ("training-rows", values.get("training_rows_loss"), None),
        ("training", values.get("loss"), None),
    ):
        if final is not None and kind not in job.final:
            job.final[kind] = final
            job.best[kind] = (final, step) if best is None else (best, count_number(values.get("best_step")) or step)


def _set_trained_values(folder: Path, jobs: list[JobResult], shared: list[str]) -> list[str]:
    """Set `trained` of jobs whose learning rate sweep.lr_scale has changed; return [the key] if it is not swept, so
    that it is shown all the same.
    """
    for job in jobs:
        started_with = [
            value
            for key, _, value in (override.partition("=") for override in _first_overrides(folder, job))
            if key == LR_KEY
        ]
        given = (
            [job.swept[LR_KEY]]
            if LR_KEY in job.swept
            else [override.partition("=")[2] for override in shared if override.startswith(f"{LR_KEY}=")]
        )
        if started_with and [parse_number(value) for value in started_with[-1:]] != [
            parse_number(value) for value in given[-1:]
        ]:
            job.trained[LR_KEY] = started_with[-1]
    if not any(job.trained for job in jobs) or any(LR_KEY in job.swept for job in jobs):
        return []
    for job in jobs:  # the job that the others are scaled to has no override
        if job.folder and not job.trained:
            with suppress(ValueError, KeyError, TypeError):
                job.trained[LR_KEY] = str(load_saved_config(folder / job.folder)["optimizer"]["lr"])
    return [LR_KEY]


def _first_overrides(folder: Path, job: JobResult) -> list[str]:
    """Return the overrides that the job was started with."""
    hydra_dir = folder / (job.folder or ".none") / ".hydra"
    return read_override_list(
        next(iter(sorted(hydra_dir.glob("history/*/overrides.yaml"))), hydra_dir / "overrides.yaml")
    )


def _loss_or_inf(point: LossPoint) -> float:
    return math.inf if point.loss is None else point.loss


def _data_identity(metadata: dict[str, Any]) -> tuple[Any, Any]:
    """Return the fingerprint of the training data, and the number of rows of each file."""
    fingerprints, files = metadata.get("fingerprints"), metadata.get("data")
    rows = [file.get("read") for file in files if isinstance(file, dict)] if isinstance(files, list) else None
    return fingerprints.get("data") if isinstance(fingerprints, dict) else None, rows


def _compare_data(folder: Path, jobs: Iterable[JobResult]) -> None:
    """Set `differs_from` of jobs whose data differ from those of the first job with the same data overrides: a file has
    changed in between.

    Where the seed draws parts of the rows, fingerprints are compared among equal seeds only, and row counts among all.
    """
    first: dict[tuple, JobResult] = {}
    seed_matters: dict[tuple, bool] = {}
    for job in jobs:
        if job.data_identity[0] is None or job.folder is None:
            continue
        point = tuple(sorted((key, value) for key, value in job.swept.items() if key.startswith(DATA_KEY_PREFIXES)))
        if point not in seed_matters:
            seed_matters[point] = _rows_depend_on_seed(folder / job.folder)
        for group, index in (((point, None), 1), ((point, job.swept.get(SEED_KEY) if seed_matters[point] else ""), 0)):
            other = first.setdefault(group, job)
            if (
                None not in (other.data_identity[index], job.data_identity[index])
                and other.data_identity[index] != job.data_identity[index]
            ):
                job.differs_from = job.differs_from or other.name


def _rows_depend_on_seed(run_dir: Path) -> bool:
    """Whether the seed draws parts of the rows, e.g. system prompts.

    True if the config cannot be read: no job is marked for its seed then.
    """
    try:
        data = load_saved_config(run_dir)["data"]
        return bool(data["system_prob"] or data["empty_think_prob"])
    except (ValueError, KeyError, TypeError):
        return True


def _parse_time(text: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo else time.astimezone()


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else []
