"""Find the runs and sweeps under a folder and read what a list shows of each: run.json, and the end of metrics.jsonl of
a run without an end.

No link is followed. What is damaged or no run is listed as that and never raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from common.filesystem import open_regular, read_json_object
from common.limits.parsers import parse_json
from runner.reporting.run_folders import first_start, is_file, job_folders, run_status, sweep_status, tags_of, text_of
from runner.reporting.sweep_results.metrics_reader import count_number, finite_number
from runner.run_dir.best_job import comparison_problem
from runner.run_dir.contents import RUN_FILE, SWEEP_FILE
from runner.run_dir.metadata import RunMetadata

MAX_DEPTH = 6  # of a run below the folder
MAX_FOLDERS = 20_000  # folders, links and jobs that are looked at
MAX_JSON_BYTES_IN_ALL = 1 << 28  # of run.json and sweep.json of all runs together; those of a run have some kilobytes
MAX_SHOWN_TEXT = 1000  # characters that are kept of a text of run.json
SHOWN_TEXTS = ("name", "stage", "model", "note", "init_from", "error")
RECORD_TAIL_BYTES = 1 << 14  # read from the end of metrics.jsonl
BROKEN, FOREIGN = "broken", "no run"  # status of folders that no run is read from


@dataclass
class ListedRun:
    """A row of the list: a run, a sweep, a job of one, or a folder that is neither."""

    folder: Path
    kind: str  # run, sweep, job or other
    status: str
    problem: str = ""  # why nothing is read from the folder
    fields: dict[str, Any] = field(default_factory=dict)  # of run.json, those that are shown
    sweep: ListedRun | None = None  # that a job belongs to
    jobs: list[ListedRun] = field(default_factory=list)  # of a sweep
    started: float | None = None  # seconds since 1970, of the first attempt
    evaluation_loss: float | None = None  # lowest
    training_loss: float | None = None  # newest
    step: float | None = None
    page: Path | None = None  # report.html, if it is there

    @property
    def label(self) -> str:
        """run.name, or the end of the path: `2026-11-21/10-00-00`, for a job its folder."""
        end = self.folder.name if self.kind == "job" else "/".join(self.folder.parts[-2:])
        return text_of(self.fields.get("name"), 80) or (f"sweep {end}" if self.kind == "sweep" else end)

    @property
    def stage(self) -> str:
        return text_of(self.fields.get("stage"), 40) or next((job.stage for job in self.jobs if job.stage), "")

    @property
    def model(self) -> str:
        return text_of(self.fields.get("model"), 60) or next((job.model for job in self.jobs if job.model), "")

    @property
    def note(self) -> str:
        return text_of(self.fields.get("note"), 500)

    @property
    def tags(self) -> list[str]:
        return tags_of(self.fields)

    @property
    def init_from(self) -> str:
        start = self.fields.get("init_from")
        return start if isinstance(start, str) else next((job.init_from for job in self.jobs if job.init_from), "")

    @property
    def data(self) -> str:
        """Names of the data files."""
        return self.fields.get("data") or next((job.data for job in self.jobs if job.data), "")


@dataclass
class RunList:
    root: Path
    rows: list[ListedRun]  # newest first; the jobs of a sweep follow it
    is_cut: bool  # whether MAX_FOLDERS or MAX_JSON_BYTES_IN_ALL were read before all was

    def by_folder(self) -> dict[Path, ListedRun]:
        return {row.folder: row for row in self.rows}


@dataclass
class Budget:
    """What a scan may still read."""

    folders: int
    bytes: int

    @property
    def is_spent(self) -> bool:
        return self.folders <= 0 or self.bytes <= 0

    def allows(self, path: Path) -> bool:
        """Take one folder with its file from the budget; return whether it may be read."""
        with suppress(OSError):
            self.bytes -= path.lstat().st_size
        self.folders -= 1
        return not self.is_spent


def scan_runs(root: Path) -> RunList:
    """Return all runs and sweeps below `root`."""
    budget = Budget(MAX_FOLDERS, MAX_JSON_BYTES_IN_ALL)
    found = [*_read_folder(root, 0, budget)]
    found.sort(key=lambda row: (row.kind == "other", -(row.started or 0.0), str(row.folder)))
    return RunList(root, [listed for row in found for listed in (row, *row.jobs)], budget.is_spent)


def _read_folder(folder: Path, depth: int, budget: Budget) -> list[ListedRun]:
    """Return the rows of `folder` and below. A folder without any run below it is one row."""
    budget.folders -= 1
    if budget.is_spent:
        return []
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        return [ListedRun(folder, "other", BROKEN, f"cannot be listed: {error.strerror}")]
    names = {entry.name for entry in listed}
    if depth and SWEEP_FILE in names:
        return _read_sweep(folder, budget)
    if depth and RUN_FILE in names:
        return [_read_run(folder, "run")[0]] if budget.allows(folder / RUN_FILE) else []
    if depth and (".hydra" in names or "checkpoints" in names):
        return [
            ListedRun(
                folder,
                "other",
                BROKEN,
                "there is no run.json: its launch was stopped early, or the file was deleted; doctor.py run=DIR looks at it",
            )
        ]
    rows: list[ListedRun] = []
    for entry in listed:
        if budget.is_spent:
            break
        if entry.is_symlink():
            budget.folders -= 1
            rows.append(ListedRun(folder / entry.name, "other", FOREIGN, "a link: it is not followed"))
        elif entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH:
            rows += _read_folder(folder / entry.name, depth + 1, budget)
    if depth and listed and all(row.kind == "other" and row.status == FOREIGN for row in rows):
        return [ListedRun(folder, "other", FOREIGN, f"{len(listed)} entries, no run or sweep among them")]
    return rows


def _read_run(folder: Path, kind: str, sweep: ListedRun | None = None) -> tuple[ListedRun, Any]:
    """Return the row of a run, and its field `evaluation`.

    Of its other fields only those that are shown are kept: run.json may be large.
    """
    fields = RunMetadata.read(folder)
    if not fields:
        return ListedRun(
            folder,
            "other" if kind == "run" else kind,
            BROKEN,
            "run.json cannot be read; doctor.py run=DIR looks at it",
            sweep=sweep,
        ), None
    row = ListedRun(
        folder,
        kind,
        run_status(fields),
        fields=_fields_of_row(fields),
        sweep=sweep,
        started=_seconds(first_start(fields)),
        page=_page(folder),
    )
    metrics, export = fields.get("metrics"), fields.get("export")
    values = metrics if isinstance(metrics, dict) else {}
    row.training_loss, row.step = finite_number(values.get("loss")), count_number(fields.get("step"))
    exported = finite_number(export.get("loss")) if isinstance(export, dict) else None
    row.evaluation_loss = next(
        (loss for key in ("best_val_loss", "val_loss") if (loss := finite_number(values.get(key))) is not None),
        exported,
    )
    if not values:
        _read_tail(row)
    return row, fields.get("evaluation")


def _fields_of_row(fields: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        name: fields[name][:MAX_SHOWN_TEXT] for name in SHOWN_TEXTS if isinstance(fields.get(name), str)
    }
    files = fields.get("data")
    names = (
        [Path(text_of(file.get("file"))).name for file in files if isinstance(file, dict)]
        if isinstance(files, list)
        else []
    )
    return shown | {
        "tags": tags_of(fields),
        "data": ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
    }


def _read_tail(row: ListedRun) -> None:
    """Set losses and step from the newest records of a run that has not ended: its run.json has none."""
    for record in _newest_records(row.folder / "metrics.jsonl"):
        loss, step = finite_number(record.get("loss")), count_number(record.get("step"))
        if record.get("kind") == "train" and row.training_loss is None:
            row.training_loss = loss
        if record.get("kind") == "eval" and row.evaluation_loss is None:
            row.evaluation_loss = loss
        if step is not None:
            row.step = max(row.step or 0.0, step)


def _newest_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in the last RECORD_TAIL_BYTES, the newest first."""
    try:
        fd, size = open_regular(path)
        with open(fd, "rb") as file:
            file.seek(max(0, size - RECORD_TAIL_BYTES))
            lines = file.read(RECORD_TAIL_BYTES).split(b"\n")
    except OSError:
        return
    for line in reversed(lines[1:] if size > RECORD_TAIL_BYTES else lines):
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _read_sweep(folder: Path, budget: Budget) -> list[ListedRun]:
    if not budget.allows(folder / SWEEP_FILE):
        return []
    recorded = read_json_object(folder / SWEEP_FILE)
    if not isinstance(recorded.get("jobs"), list):
        return [ListedRun(folder, "other", BROKEN, "sweep.json cannot be read")]
    sweep = ListedRun(
        folder, "sweep", sweep_status(folder, recorded), started=_seconds(recorded.get("created")), page=_page(folder)
    )
    read = [_read_run(job, "job", sweep) for job in job_folders(folder) if budget.allows(job / RUN_FILE)]
    sweep.jobs = [job for job, _ in read]
    if sweep.status == "running" and sweep.jobs and not any(job.status == "running" for job in sweep.jobs):
        sweep.status = (
            "interrupted" if any(job.status in ("interrupted", "new") for job in sweep.jobs) else sweep.status
        )
    comparable = comparison_problem(evaluation for _, evaluation in read) is None
    losses = [job.evaluation_loss for job in sweep.jobs if job.evaluation_loss is not None]
    sweep.evaluation_loss = min(losses, default=None) if comparable else None
    swept = recorded.get("swept")
    keys = ", ".join(text_of(key, 60) for key in swept) if isinstance(swept, dict) else ""
    sweep.problem = f"{len(recorded['jobs'])} jobs over {keys or 'the seed'}"
    return [sweep]


def _page(folder: Path) -> Path | None:
    return folder / "report.html" if is_file(folder / "report.html") else None


def _seconds(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
