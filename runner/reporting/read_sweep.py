"""Read the results of a sweep directory.

A missing or damaged file leaves its values out and never raises.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common.errors import Outcome
from runner.config.overrides import key_of
from runner.diagnostics.symptoms import finite_number
from runner.engine.config import STOP_KEY
from runner.inference.evaluate import current_evaluations
from runner.reporting.metrics import count_number
from runner.reporting.runs import (
    Run,
    as_dict,
    read_override_list,
    subfolders,
    sweep_status,
)
from runner.reporting.sweep_results import (
    JOB_STATUSES,
    KEEP,
    LOSS_KINDS,
    JobResult,
    SweepResults,
    last_value,
    result_rows,
)
from runner.run_dir.best_job import SEED_KEY, is_added_seed, model_score, parse_number
from runner.run_dir.contents import JOB_FIELDS, parse_time, read_sweep_file
from runner.run_dir.saved_config import OVERRIDES_FILE

LR_KEY, SEEDS_KEY = "optimizer.lr", "sweep.seeds"
DATA_KEY_PREFIXES = ("data", "stage", "experiment", "model")  # swept keys that change the training data or its rows
ROW_DRAWS = ("data.system_prob", "data.empty_think_prob")  # settings by which the seed draws parts of the rows


def read_sweep_results(folder: Path) -> SweepResults:
    sweep, folders = read_sweep_file(folder), subfolders(folder)
    jobs = [_read_job(folder, job, folders) for job in sweep["jobs"]]
    for job in jobs:
        job.is_added_seed = is_added_seed(job.swept, sweep["swept"])
        if sweep["sweeper"] == "grid" and job.status == "paused":
            job.status = "interrupted"  # train.stop_at has ended it, and no search decides about it
    keys = dict.fromkeys([*map(str, sweep["swept"]), *(key for job in jobs for key in job.swept)])
    _compare_data(jobs)
    ranked_by = next((kind for kind in LOSS_KINDS if any(kind in job.final for job in jobs)), "training")
    shared = [*map(str, sweep["overrides"])]
    status, is_running = sweep_status(folder, sweep["status"])
    return SweepResults(
        folder=folder,
        status=status,
        created=sweep["created"],
        shared_overrides=shared,
        swept_keys=[key for key in keys if key != SEED_KEY],
        jobs=jobs,
        ranked_by=ranked_by,
        rows=result_rows(jobs, ranked_by, int(parse_number(last_value(shared, SEEDS_KEY) or "") or 0)),
        sweeper=sweep["sweeper"],
        scaled_keys=_set_trained_values(jobs, shared),
        is_running=is_running,
    )


def _read_job(sweep: Path, recorded: dict[str, Any], folders: set[str]) -> JobResult:
    """Combine the entry `recorded` of sweep.json with the job's own run.json and metrics.jsonl.

    `folders`: names in the sweep directory. A job of another name, which may lead out of it, has no results.
    """
    job = JobResult(
        recorded["name"],
        recorded["overrides"],
        recorded["status"] if recorded["status"] in JOB_STATUSES else "new",
        recorded["error"],
        [*map(str, recorded["last_lines"])],
    )
    if job.name not in folders:
        return job
    run = Run.read(sweep / job.name)
    fields, job.run_dir, job.began = run.fields, run.folder, run.began
    job.extended = [*map(str, recorded["applied_overrides"])]
    if (status := _job_status(job.status, recorded, run)) != job.status:
        # error and loss of sweep.json belong to an earlier attempt
        job.status, job.error, job.last_lines, recorded = status, "", [], JOB_FIELDS
    if job.status == "failed":
        job.error = job.error or fields["error"]
    if job.status == "paused":
        done = fields["step"] / run.total_steps if run.total_steps else 0.0
        # sweep.budget may have stopped it before its rung
        job.stop_at = min(parse_number(job.settings.get(STOP_KEY, "")) or 1.0, done)
    earlier = sorted((run.folder / ".hydra").glob("history/*/overrides.yaml"))
    launches = [read_override_list(path) for path in (*earlier, run.folder / OVERRIDES_FILE)]
    # the rungs of a search are no settings of the job
    job.launches = [[each for each in launch if key_of(each) != STOP_KEY] for launch in launches]
    if run.branched_from:  # the settings of the trunk come with it
        trunk, step = run.branched_from
        given = {*read_override_list(Path(trunk) / OVERRIDES_FILE)}
        start = [f"init_from={trunk}@step-{step}", KEEP]
        own = job.launches[1:] or job.launches  # the first one is that of the trunk
        job.launches = [[*(each for each in launch if each not in given), *start] for launch in own]
    job.model, job.evaluation, job.evaluations = model_score(fields), fields["evaluation"], current_evaluations(fields)
    job.data_identity = fields["fingerprints"].get("data"), [file.get("read") for file in fields["data"]] or None
    job.started, job.ended = parse_time(recorded["started"]), parse_time(recorded["ended"])
    job.metrics = run.metrics
    _set_losses(job, fields)
    has_diverged = Outcome.DIVERGED in (fields["outcome"], recorded["outcome"]) or recorded["loss"] == "inf"
    newest = next((job.final[kind] for kind in LOSS_KINDS if kind in job.final), 0.0)
    job.diverged = newest == math.inf or (has_diverged and job.status in ("completed", "failed"))
    return job


def _job_status(status: str, recorded: dict[str, Any], run: Run) -> str:
    """Return the status by run.json where it is newer: the sweep process was killed, or the job was continued by hand."""
    if run.status == "paused" and status != "failed":
        return run.status
    if run.fields["status"] == "running":
        return "running" if run.is_running else "interrupted" if status == "running" else status
    since = parse_time(recorded["started"] if status == "running" else recorded["ended"] or recorded["started"])
    ended = parse_time(run.fields["ended"])
    return run.fields["status"] if since and ended and ended >= since else status


def _set_losses(job: JobResult, fields: dict[str, Any]) -> None:
    """Set final and best losses from metrics.jsonl, or from run.json where nothing is logged."""
    evaluated = "training-rows" if as_dict(job.evaluation).get("on") == "training" else "validation"
    for kind, curve in ((evaluated, job.metrics.eval), ("training", job.metrics.train)):
        if (final := curve.newest_loss()) is not None:
            job.final[kind] = final
        if (lowest := curve.lowest()) is not None:
            job.best[kind] = lowest
    values = {name: finite_number(value) for name, value in fields["metrics"].items()}
    step = count_number(fields["step"]) or 0.0
    for kind, name in (("validation", "val_loss"), ("training-rows", "training_rows_loss"), ("training", "loss")):
        if (final := values.get(name)) is not None and kind not in job.final:
            job.final[kind], job.best[kind] = final, (final, step)
            if kind == "validation" and (best := values.get("best_val_loss")) is not None:
                job.best[kind] = best, count_number(values.get("best_step")) or step


def _set_trained_values(jobs: list[JobResult], shared: list[str]) -> list[str]:
    """Set `trained` of jobs whose learning rate sweep.lr_scale has changed; return [the key] if it is not swept, so
    that it is shown all the same.
    """
    for job in jobs:
        started_with, given = last_value(job.launches[0], LR_KEY), job.swept.get(LR_KEY, last_value(shared, LR_KEY))
        if started_with and (given is None or parse_number(started_with) != parse_number(given)):
            job.trained[LR_KEY] = started_with
    if not any(job.trained for job in jobs) or any(LR_KEY in job.swept for job in jobs):
        return []
    for job in jobs:  # the job that the others are scaled to has no override
        if not job.trained and LR_KEY in (settings := job.settings):
            job.trained[LR_KEY] = settings[LR_KEY]
    return [LR_KEY]


def _compare_data(jobs: list[JobResult]) -> None:
    """Set `differs_from` of jobs whose data differ from those of the first job with the same data overrides: a file has
    changed in between.

    Where the seed draws parts of the rows, fingerprints are compared among equal seeds only, and row counts among all.
    """
    first: dict[tuple, tuple[str, Any]] = {}  # what is equal in a group of jobs -> name and value of its first job
    for job in jobs:
        fingerprint, rows = job.data_identity
        if fingerprint is None:
            continue
        point = tuple(sorted((key, value) for key, value in job.swept.items() if key.startswith(DATA_KEY_PREFIXES)))
        seed = job.swept.get(SEED_KEY) if _seed_draws_rows(job.settings) else ""
        for group, value in ((("rows", point), rows), (("fingerprint", point, seed), fingerprint)):
            name, other = first.setdefault(group, (job.name, value))
            if None not in (value, other) and value != other:
                job.differs_from = job.differs_from or name


def _seed_draws_rows(settings: dict[str, str]) -> bool:
    """Return whether the rows of a run depend on its seed; of a config that cannot be read, too."""
    return any(parse_number(settings.get(key, "1")) != 0 for key in ROW_DRAWS)
