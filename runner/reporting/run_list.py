"""All runs and sweeps under a folder: found, listed on a page and as text, and which began from which.

Read are run.json, and the end of metrics.jsonl of a run without an end. No link is followed; only runs of the list are
connected. What is damaged or no run is listed as that and never raises.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from common.guarded_files import last_records
from common.paths import command_line_here
from runner.diagnostics.symptoms import finite_number
from runner.reporting.columns import loss_text
from runner.reporting.compare import shortened_table
from runner.reporting.metrics import count_number
from runner.reporting.page_kit import RELOAD_SECONDS, render
from runner.reporting.runs import (
    NO_STATUS,
    REPORT_FILE,
    Run,
    as_dict,
    is_file,
    job_folders,
    sweep_status,
    text_of,
)
from runner.run_dir.best_job import comparison_problem
from runner.run_dir.contents import RUN_FILE, SWEEP_FILE, parse_time, read_sweep_file
from runner.tracking.data_report import listed

MAX_DEPTH = 6  # of a run below the folder
MAX_FOLDERS = 20_000  # folders, links and jobs that are looked at
MAX_JSON_BYTES_IN_ALL = 1 << 28  # of run.json and sweep.json of all runs together; those of a run have some kilobytes
MAX_SHOWN_TEXT = 1000  # characters that are kept of a text of run.json, which may be large
BROKEN, FOREIGN = "broken", "no run"  # status of folders that no run is read from
KINDS = {
    "run": ("run", "runs"),
    "sweep": ("sweep", "sweeps"),
    "job": ("job of a sweep", "jobs of sweeps"),
    "other": ("other folder", "other folders"),
}
MAX_NODES = 150  # of the picture
WIDTH, HEIGHT, GAP_X, GAP_Y = 230, 46, 46, 12  # of a box and between boxes, pixels
TERMINAL_ROWS = 20
AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass
class ListedRun:
    """A row of the list: a run, a sweep, a job of one, or a folder that is neither.

    A sweep has the stage, model, data and start of its first job that has one.
    """

    folder: Path
    status: str
    kind: str = "run"  # run, sweep, job or other
    problem: str = ""  # why nothing is read from the folder
    name: str = ""
    note: str = ""
    tags: list[str] = field(default_factory=list)
    error: str = ""
    stage: str = ""
    model: str = ""
    data: str = ""  # names of the data files
    init_from: str = ""  # of a branch the run that it continues
    branch_step: int | None = None  # from this step on
    begun: float | None = None  # seconds since 1970, of the first attempt
    evaluation_loss: float | None = None  # lowest
    training_loss: float | None = None  # newest
    step: float | None = None
    page: Path | None = None  # report.html, if it is there
    sweep: ListedRun | None = None  # that a job belongs to
    jobs: list[ListedRun] = field(default_factory=list)  # of a sweep
    start: ListedRun | None = None  # the run or sweep that it began from; None: nothing of the list
    # in the picture: the start, or its sweep, what began from it, and the position in pixels
    parent: ListedRun | None = None
    children: list[ListedRun] = field(default_factory=list)
    x: int = 0
    y: int = 0

    @property
    def label(self) -> str:
        """run.name, or the end of the path: `2026-11-21/10-00-00`, for a job its folder."""
        end = self.folder.name if self.kind == "job" else "/".join(self.folder.parts[-2:])
        return self.name or (f"sweep {end}" if self.kind == "sweep" else end)


@dataclass
class RunList:
    root: Path
    rows: list[ListedRun] = field(default_factory=list)  # newest first; the jobs of a sweep follow it
    folders: int = 0  # that may still be read
    bytes: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether MAX_FOLDERS or MAX_JSON_BYTES_IN_ALL were read before all was."""
        return self.folders <= 0 or self.bytes <= 0

    def allows(self, path: Path) -> bool:
        """Count one folder with its file; return whether it may be read."""
        with suppress(OSError):
            self.bytes -= path.lstat().st_size
        self.folders -= 1
        return not self.is_cut


# --- find and read ------------------------------------------------------------------------------------------------------


def scan_runs(root: Path) -> RunList:
    """Return all runs and sweeps below `root`."""
    runs = RunList(root, [], MAX_FOLDERS, MAX_JSON_BYTES_IN_ALL)
    found = _read_folder(root, 0, runs)
    found.sort(key=lambda row: (row.kind == "other", -(row.begun or 0.0), str(row.folder)))
    runs.rows = [listed for row in found for listed in (row, *row.jobs)]
    _connect(runs.rows)
    return runs


def _read_folder(folder: Path, depth: int, runs: RunList) -> list[ListedRun]:
    """Return the rows of `folder` and below. A folder without any run below it is one row."""
    runs.folders -= 1
    if runs.is_cut:
        return []
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        return [ListedRun(folder, BROKEN, "other", f"cannot be listed: {error.strerror}")]
    names = {entry.name for entry in listed}
    if depth and SWEEP_FILE in names:
        return [_read_sweep(folder, runs)] if runs.allows(folder / SWEEP_FILE) else []
    if depth and RUN_FILE in names:
        return [_listed(Run.read(folder), "run")] if runs.allows(folder / RUN_FILE) else []
    if depth and (".hydra" in names or "checkpoints" in names):
        problem = (
            "there is no run.json: its launch was stopped early, or the file was deleted; doctor.py run=DIR looks at it"
        )
        return [ListedRun(folder, BROKEN, "other", problem)]
    rows: list[ListedRun] = []
    for entry in listed:
        if runs.is_cut:
            break
        if entry.is_symlink():
            runs.folders -= 1
            rows.append(ListedRun(folder / entry.name, FOREIGN, "other", "a link: it is not followed"))
        elif entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH:
            rows += _read_folder(folder / entry.name, depth + 1, runs)
    if depth and listed and all(row.status == FOREIGN for row in rows):
        return [ListedRun(folder, FOREIGN, "other", f"{len(listed)} entries, no run or sweep among them")]
    return rows


def _listed(run: Run, kind: str, sweep: ListedRun | None = None) -> ListedRun:
    """Return the row of a run. Of run.json only what is shown is kept."""
    if run.status == NO_STATUS:
        problem = "run.json cannot be read; doctor.py run=DIR looks at it"
        return ListedRun(run.folder, BROKEN, "other" if kind == "run" else kind, problem, sweep=sweep)
    fields, values, files = run.fields, run.fields["metrics"], run.fields["data"]
    losses = (values.get("best_val_loss"), values.get("val_loss"), as_dict(fields["export"]).get("loss"))
    row = ListedRun(
        run.folder,
        run.status,
        kind,
        name=run.name,
        note=run.note,
        tags=run.tags,
        error=fields["error"][:MAX_SHOWN_TEXT],
        stage=text_of(fields["stage"], 40),
        model=text_of(fields["model"], 60),
        data=listed([Path(text_of(file.get("file"))).name for file in files], 3),
        init_from=run.branched_from[0] if run.branched_from else text_of(fields["init_from"], MAX_SHOWN_TEXT),
        branch_step=run.branched_from[1] if run.branched_from else None,
        begun=parse_time(run.started),
        evaluation_loss=next((loss for loss in map(finite_number, losses) if loss is not None), None),
        training_loss=finite_number(values.get("loss")),
        step=count_number(fields["step"]),
        page=_page(run.folder),
        sweep=sweep,
    )
    if not values:
        _read_tail(row)
    return row


def _read_tail(row: ListedRun) -> None:
    """Set losses and step from the newest records of a run that has not ended: its run.json has none."""
    for record in last_records(row.folder / "metrics.jsonl"):
        loss = finite_number(record.get("loss"))
        if loss is not None and record.get("kind") == "train":
            row.training_loss = loss
        if loss is not None and record.get("kind") == "eval":
            row.evaluation_loss = loss
        row.step = max(row.step or 0.0, count_number(record.get("step")) or 0.0)


def _read_sweep(folder: Path, runs: RunList) -> ListedRun:
    fields = read_sweep_file(folder)
    if not fields["status"]:
        return ListedRun(folder, BROKEN, "other", "sweep.json cannot be read")
    status, _ = sweep_status(folder, fields["status"])
    sweep = ListedRun(folder, status, "sweep", begun=parse_time(fields["created"]), page=_page(folder))
    evaluations = []
    for job in job_folders(folder):
        if runs.allows(job / RUN_FILE):
            run = Run.read(job)
            sweep.jobs.append(_listed(run, "job", sweep))
            evaluations.append(run.fields["evaluation"])
    of_jobs = {job.status for job in sweep.jobs}
    if status == "running" and "running" not in of_jobs and of_jobs & {"interrupted", "new"}:
        sweep.status = "interrupted"
    for name in ("stage", "model", "data", "init_from"):
        setattr(sweep, name, next((text for job in sweep.jobs if (text := getattr(job, name))), ""))
    if comparison_problem(evaluations) is None:
        losses = [job.evaluation_loss for job in sweep.jobs if job.evaluation_loss is not None]
        sweep.evaluation_loss = min(losses, default=None)
    keys = ", ".join(text_of(key, 60) for key in fields["swept"])
    sweep.problem = f"{len(fields['jobs'])} jobs over {keys or 'the seed'}"
    return sweep


def _page(folder: Path) -> Path | None:
    return folder / REPORT_FILE if is_file(folder / REPORT_FILE) else None


# --- which run began from which -----------------------------------------------------------------------------------------


def _connect(rows: list[ListedRun]) -> None:
    """Set what each run began from, and the trees of the picture.

    In a tree a job is part of its sweep; a circle, which no training makes, is cut.
    """
    listed = {row.folder: row for row in rows if row.kind != "other"}
    for row in listed.values():
        if not os.path.isabs(row.init_from) or "\0" in row.init_from:
            continue
        path = Path(os.path.normpath(row.init_from))
        start = next((listed[each] for each in (path, *path.parents) if each in listed), None)
        if start is None or start is row or start.sweep is row or row.sweep is start:
            continue
        row.start, parent = start, start.sweep or start
        if row.kind != "job" and not _is_ancestor(row, parent):
            row.parent = parent
            parent.children.append(row)


def _is_ancestor(row: ListedRun, of: ListedRun) -> bool:
    """Whether `row` is `of` or one of its ancestors: to begin from `of` would close a circle."""
    node: ListedRun | None = of
    while node is not None and node is not row:
        node = node.parent
    return node is not None


def lineage_trees(runs: RunList) -> list[ListedRun]:
    """Return the first run of each tree with at least two runs, newest first."""
    return [row for row in runs.rows if row.children and row.parent is None]


def place_rows(trees: list[ListedRun]) -> tuple[list[ListedRun], int]:
    """Set the positions of up to MAX_NODES rows. Return them, and the number of all rows in the trees."""
    placed: list[ListedRun] = []
    lines = total = 0
    stack = trees[::-1]
    while stack:  # depth first, without recursion: a chain may be long
        row = stack.pop()
        total += 1
        if len(placed) < MAX_NODES:
            row.x = row.parent.x + WIDTH + GAP_X if row.parent else 0
            row.y = lines * (HEIGHT + GAP_Y)
            placed.append(row)
            lines += not row.children
        stack += sorted(row.children, key=lambda child: -(child.begun or 0.0))
    return placed, total


# --- page and text ------------------------------------------------------------------------------------------------------

LinkOf = Callable[[ListedRun], str | None]


def list_page(runs: RunList, link_of: LinkOf, is_served: bool) -> str:
    """Return the page.

    `link_of`: address of a run's page, None if it has none; `is_served`: comparisons are links, and the list is live.
    """
    placed, total = place_rows(lineage_trees(runs))
    return render(
        "list",
        {"reload": RELOAD_SECONDS if is_served else None, "command": shlex.join(command_line_here("report"))},
        runs=runs,
        is_served=is_served,
        link_of=link_of,
        quote=shlex.quote,
        age_text=age_text,
        now=time.time(),
        placed=placed,
        total=total,
        box={"width": WIDTH, "height": HEIGHT, "gap": GAP_X},
        counts=_counts(runs),
    )


def _counts(runs: RunList) -> str:
    counts = {kind: sum(row.kind == kind for row in runs.rows) for kind in KINDS}
    return ", ".join(f"{count} {KINDS[kind][count > 1]}" for kind, count in counts.items() if count) or "no runs"


def age_text(started: float | None, now: float) -> str:
    """Return e.g. `3 h`: how long ago a run was first started."""
    if started is None:
        return ""
    age = max(0.0, now - started)
    size, unit = next((pair for pair in AGES if age >= pair[0]), AGES[-1])
    return f"{age / size:.0f} {unit}"


def file_link(row: ListedRun, page: Path) -> str | None:
    """Return the address of a run's report.html for a page whose file is `page`."""
    return None if row.page is None else quote(os.path.relpath(row.page, page.parent), errors="backslashreplace")


def served_link(row: ListedRun, root: Path) -> str | None:
    """Return the address of a run's page below `/run/` of the server."""
    path = quote(str(row.folder.relative_to(root)), errors="backslashreplace")
    return None if row.kind == "other" or row.status == BROKEN else f"run/{path}/"


def list_text(runs: RunList) -> str:
    """Return the newest runs and sweeps as a table; the jobs of a sweep are left out."""
    rows = [row for row in runs.rows if row.kind in ("run", "sweep")]
    now = time.time()
    table = [["run", "status", "stage", "eval loss", "train loss", "age", "began from"]]
    for row in rows[:TERMINAL_ROWS]:
        name, path = text_of(row.name, 20), str(row.folder.relative_to(runs.root))
        shown, began = f"{name}  {path}" if name else path, row.start.label if row.start else ""
        losses = (loss_text(row.evaluation_loss), loss_text(row.training_loss))
        table.append([shown, row.status, row.stage, *losses, age_text(row.begun, now), began])
    lines = shortened_table(table, [False, False, False, True, True, True, False]) if rows else []
    more = [f"and {len(rows) - TERMINAL_ROWS} older ones"] if len(rows) > TERMINAL_ROWS else []
    return "\n".join([f"{runs.root}: {_counts(runs)}", *lines, *more])
