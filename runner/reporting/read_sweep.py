"""Read the results of a sweep directory.

A missing or damaged file leaves its values out and never raises.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import Outcome
from common.filesystem import read_json_object
from runner.reporting.aggregate import result_rows
from runner.reporting.evaluations import current_evaluations
from runner.reporting.metrics import count_number, finite_number
from runner.reporting.runs import Run, as_dict, as_list, read_override_list, run_status, saved_settings, sweep_status
from runner.reporting.sweep_results import JOB_STATUSES, LOSS_KINDS, JobResult, SweepResults
from runner.run_dir.best_job import SEED_KEY, model_score, parse_number
from runner.run_dir.contents import SWEEP_FILE
from runner.run_dir.saved_config import CONFIG_FILE

LR_KEY = "optimizer.lr"
MAX_FILE_NAME = 255  # bytes
DATA_KEY_PREFIXES = ("data", "stage", "experiment", "model")  # swept keys that change the training data or its rows
ROW_DRAWS = ("data.system_prob", "data.empty_think_prob")  # settings by which the seed draws parts of the rows


def read_sweep_results(folder: Path) -> SweepResults:
    sweep = read_json_object(folder / SWEEP_FILE)
    jobs = [_read_job(folder, job) for job in as_list(sweep.get("jobs")) if isinstance(job, dict)]
    keys = dict.fromkeys([*map(str, as_dict(sweep.get("swept"))), *(key for job in jobs for key in job.swept)])
    _compare_data(folder, jobs)
    ranked_by = next((kind for kind in LOSS_KINDS if any(kind in job.final for job in jobs)), "training")
    shared = [str(override) for override in as_list(sweep.get("overrides"))]
    status, is_running = sweep_status(folder, sweep)
    return SweepResults(
        folder=folder,
        status=status,
        created=str(sweep.get("created") or ""),
        shared_overrides=shared,
        swept_keys=[key for key in keys if key != SEED_KEY],
        jobs=jobs,
        ranked_by=ranked_by,
        rows=result_rows(jobs, ranked_by),
        sweeper=str(sweep.get("sweeper") or "grid"),
        scaled_keys=_set_trained_values(folder, jobs, shared),
        is_running=is_running,
    )


def _is_file_name(name: str) -> bool:
    """Return whether a folder may have this name, which a file of unknown origin gives."""
    try:
        return name not in ("", ".", "..") and not {"/", "\0"} & set(name) and len(os.fsencode(name)) <= MAX_FILE_NAME
    except UnicodeEncodeError:
        return False


def _read_job(folder: Path, recorded: dict[str, Any]) -> JobResult:
    """Combine the entry `recorded` of sweep.json with the job's own run.json and metrics.jsonl."""
    name = str(recorded.get("name") or "")
    job = JobResult(name, {str(key): str(value) for key, value in as_dict(recorded.get("overrides")).items()})
    job.status = recorded["status"] if recorded.get("status") in JOB_STATUSES else "new"
    job.error = str(recorded.get("error") or "")
    job.last_lines = [str(line) for line in as_list(recorded.get("last_lines"))]
    if not _is_file_name(name) or (folder / name).is_symlink():
        return job
    run, job.folder = Run.read(folder / name), name
    job.extended = [str(each) for each in as_list(recorded.get("applied_overrides"))]
    # error and loss of sweep.json belong to an earlier attempt
    if (status := _job_status(job.status, recorded, run.fields)) != job.status:
        job.status, job.error, job.last_lines, recorded = status, "", [], {}
    if job.status == "failed":
        job.error = job.error or str(run.fields.get("error") or "")
    job.manual_overrides = _manual_overrides(run.folder, job.extended)
    job.model, job.evaluation = model_score(run.fields), run.fields.get("evaluation")
    job.evaluations, job.data_identity = current_evaluations(run.fields), _data_identity(run.fields)
    job.started, job.ended = _parse_time(recorded.get("started")), _parse_time(recorded.get("ended"))
    job.metrics = run.metrics
    _set_losses(job, run.fields)
    has_diverged = Outcome.DIVERGED in (run.fields.get("outcome"), recorded.get("outcome"))
    has_diverged |= recorded.get("loss") in ("inf", "Infinity")
    job.diverged = next((job.final[kind] for kind in LOSS_KINDS if kind in job.final), 0.0) == math.inf or (
        has_diverged and job.status in ("completed", "failed")
    )
    return job


def _job_status(status: str, recorded: dict[str, Any], fields: dict[str, Any]) -> str:
    """Return the status by run.json where it is newer: the sweep process was killed, or the job was continued by hand."""
    if fields.get("status") == "running":
        alive = run_status(fields) == "running"
        return "running" if alive else "interrupted" if status == "running" else status
    since = _parse_time(
        recorded.get("started") if status == "running" else recorded.get("ended") or recorded.get("started")
    )
    ended = _parse_time(fields.get("ended"))
    return fields["status"] if since and ended and ended >= since else status


def _launches(run_dir: Path) -> list[list[str]]:
    """Return the overrides of each launch, the first one first. Earlier launches are in .hydra/history."""
    hydra_dir = run_dir / ".hydra"
    earlier = sorted(hydra_dir.glob("history/*/overrides.yaml"))
    return [read_override_list(path) for path in (*earlier, hydra_dir / "overrides.yaml")]


def _manual_overrides(run_dir: Path, from_sweep: list[str]) -> list[str]:
    """Return the newest override per key that a later launch added and the sweep did not give."""
    first, *later = _launches(run_dir)
    added = [override for launch in later for override in launch if override not in {*first, *from_sweep}]
    # [] if the overrides of the first launch cannot be read
    return [*{override.partition("=")[0]: override for override in added if first}.values()]


def _set_losses(job: JobResult, fields: dict[str, Any]) -> None:
    """Set final and best losses from metrics.jsonl, or from run.json where nothing is logged."""
    on_training_rows = as_dict(job.evaluation).get("on") == "training"
    for kind, curve in (
        ("training-rows" if on_training_rows else "validation", job.metrics.eval),
        ("training", job.metrics.train),
    ):
        if (final := curve.newest_loss()) is not None:
            job.final[kind] = final
        if (lowest := curve.lowest()) is not None:
            job.best[kind] = lowest
    values = {key: finite_number(value) for key, value in as_dict(fields.get("metrics")).items()}
    step = count_number(fields.get("step")) or 0.0
    for kind, name in (("validation", "val_loss"), ("training-rows", "training_rows_loss"), ("training", "loss")):
        if (final := values.get(name)) is not None and kind not in job.final:
            best = values.get("best_val_loss") if kind == "validation" else None
            best_step = step if best is None else count_number(values.get("best_step")) or step
            job.final[kind], job.best[kind] = final, (final if best is None else best, best_step)


def _set_trained_values(folder: Path, jobs: list[JobResult], shared: list[str]) -> list[str]:
    """Set `trained` of jobs whose learning rate sweep.lr_scale has changed; return [the key] if it is not swept, so
    that it is shown all the same.
    """
    for job in jobs:
        first = _launches(folder / (job.folder or ".none"))[0]
        started_with, given = _last_value(first), job.swept.get(LR_KEY, _last_value(shared))
        if started_with and (given is None or parse_number(started_with) != parse_number(given)):
            job.trained[LR_KEY] = started_with
    if not any(job.trained for job in jobs) or any(LR_KEY in job.swept for job in jobs):
        return []
    for job in jobs:  # the job that the others are scaled to has no override
        if job.folder and not job.trained and LR_KEY in (settings := saved_settings(folder / job.folder / CONFIG_FILE)):
            job.trained[LR_KEY] = settings[LR_KEY]
    return [LR_KEY]


def _last_value(overrides: list[str]) -> str | None:
    """Return the newest value of the learning rate."""
    values = [value for key, _, value in (override.partition("=") for override in overrides) if key == LR_KEY]
    return values[-1] if values else None


def _data_identity(fields: dict[str, Any]) -> tuple[Any, Any]:
    """Return the fingerprint of the training data, and the number of rows of each file."""
    files = fields.get("data")
    rows = [file.get("read") for file in files if isinstance(file, dict)] if isinstance(files, list) else None
    return as_dict(fields.get("fingerprints")).get("data"), rows


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
            one, two = other.data_identity[index], job.data_identity[index]
            if None not in (one, two) and one != two:
                job.differs_from = job.differs_from or other.name


def _rows_depend_on_seed(run_dir: Path) -> bool:
    """Whether the seed draws parts of the rows, e.g. system prompts.

    True if the config cannot be read: no job is marked for its seed then.
    """
    settings = saved_settings(run_dir / CONFIG_FILE)
    return any(parse_number(settings.get(key, "1")) != 0 for key in ROW_DRAWS)


def _parse_time(text: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo else time.astimezone()
