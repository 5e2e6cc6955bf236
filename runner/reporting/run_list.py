"""All runs and sweeps under a folder: found, listed on a page and as text, and which began from which.

Read are run.json, and the end of metrics.jsonl of a run without an end. No link is followed; only runs of the list are
connected. What is damaged or no run is listed as that and never raises.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.errors import strip_control
from common.filesystem import open_regular, read_json_object
from common.limits.parsers import parse_json
from common.paths import command_line_here
from runner.reporting.compare import loss_or_problem, shortened_table
from runner.reporting.metrics import count_number, finite_number
from runner.reporting.page_kit import RELOAD_SECONDS, render
from runner.reporting.runs import REPORT_FILE, Run, as_dict, as_list, is_file, job_folders, sweep_status, text_of
from runner.run_dir.best_job import comparison_problem
from runner.run_dir.contents import RUN_FILE, SWEEP_FILE

MAX_DEPTH = 6  # of a run below the folder
MAX_FOLDERS = 20_000  # folders, links and jobs that are looked at
MAX_JSON_BYTES_IN_ALL = 1 << 28  # of run.json and sweep.json of all runs together; those of a run have some kilobytes
MAX_SHOWN_TEXT = 1000  # characters that are kept of a text of run.json
SHOWN_TEXTS = ("name", "stage", "model", "note", "init_from", "error")
RECORD_TAIL_BYTES = 1 << 14  # read from the end of metrics.jsonl
BROKEN, FOREIGN = "broken", "no run"  # status of folders that no run is read from
KINDS = {
    "run": ("run", "runs"),
    "sweep": ("sweep", "sweeps"),
    "job": ("job of a sweep", "jobs of sweeps"),
    "other": ("other folder", "other folders"),
}
MAX_NODES = 150  # of the picture
WIDTH, HEIGHT, GAP_X, GAP_Y = 230, 46, 46, 12  # of a box and between boxes, pixels
LABEL_CHARACTERS, DETAIL_CHARACTERS = 27, 36  # that fit into a box
TERMINAL_ROWS = 20
AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass
class ListedRun(Run):
    """A row of the list: a run, a sweep, a job of one, or a folder that is neither."""

    kind: str = "run"  # run, sweep, job or other
    problem: str = ""  # why nothing is read from the folder
    sweep: ListedRun | None = None  # that a job belongs to
    jobs: list[ListedRun] = field(default_factory=list)  # of a sweep
    begun: float | None = None  # seconds since 1970, of the first attempt
    evaluation_loss: float | None = None  # lowest
    training_loss: float | None = None  # newest
    step: float | None = None
    page: Path | None = None  # report.html, if it is there

    @property
    def label(self) -> str:
        """run.name, or the end of the path: `2026-11-21/10-00-00`, for a job its folder."""
        end = self.folder.name if self.kind == "job" else "/".join(self.folder.parts[-2:])
        return self.name or (f"sweep {end}" if self.kind == "sweep" else end)

    def of_jobs(self, field: str, limit: int = MAX_SHOWN_TEXT) -> str:
        """Return a text of the run, or of the first job that has it."""
        return next((text for run in (self, *self.jobs) if (text := run.text(field, limit))), "")

    @property
    def stage(self) -> str:
        return self.of_jobs("stage", 40)

    @property
    def model(self) -> str:
        return self.of_jobs("model", 60)

    @property
    def data(self) -> str:
        """Names of the data files."""
        return self.of_jobs("data")

    @property
    def init_from(self) -> str:
        return self.of_jobs("init_from")


@dataclass
class RunList:
    root: Path
    rows: list[ListedRun]  # newest first; the jobs of a sweep follow it
    is_cut: bool  # whether MAX_FOLDERS or MAX_JSON_BYTES_IN_ALL were read before all was


# --- find and read ------------------------------------------------------------------------------------------------------


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
    found.sort(key=lambda row: (row.kind == "other", -(row.begun or 0.0), str(row.folder)))
    return RunList(root, [listed for row in found for listed in (row, *row.jobs)], budget.is_spent)


def _no_run(folder: Path, status: str, problem: str) -> ListedRun:
    return ListedRun(folder, {}, status, "other", problem)


def _read_folder(folder: Path, depth: int, budget: Budget) -> list[ListedRun]:
    """Return the rows of `folder` and below. A folder without any run below it is one row."""
    budget.folders -= 1
    if budget.is_spent:
        return []
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        return [_no_run(folder, BROKEN, f"cannot be listed: {error.strerror}")]
    names = {entry.name for entry in listed}
    if depth and SWEEP_FILE in names:
        return [_read_sweep(folder, budget)] if budget.allows(folder / SWEEP_FILE) else []
    if depth and RUN_FILE in names:
        return [_read_run(folder, "run")[0]] if budget.allows(folder / RUN_FILE) else []
    if depth and (".hydra" in names or "checkpoints" in names):
        problem = (
            "there is no run.json: its launch was stopped early, or the file was deleted; doctor.py run=DIR looks at it"
        )
        return [_no_run(folder, BROKEN, problem)]
    rows: list[ListedRun] = []
    for entry in listed:
        if budget.is_spent:
            break
        if entry.is_symlink():
            budget.folders -= 1
            rows.append(_no_run(folder / entry.name, FOREIGN, "a link: it is not followed"))
        elif entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH:
            rows += _read_folder(folder / entry.name, depth + 1, budget)
    if depth and listed and all(row.kind == "other" and row.status == FOREIGN for row in rows):
        return [_no_run(folder, FOREIGN, f"{len(listed)} entries, no run or sweep among them")]
    return rows


def _read_run(folder: Path, kind: str, sweep: ListedRun | None = None) -> tuple[ListedRun, Any]:
    """Return the row of a run, and its field `evaluation`.

    Of its other fields only those that are shown are kept: run.json may be large.
    """
    run = Run.read(folder)
    fields = run.fields
    if not fields:
        problem = "run.json cannot be read; doctor.py run=DIR looks at it"
        return ListedRun(folder, {}, BROKEN, "other" if kind == "run" else kind, problem, sweep), None
    row = ListedRun(
        folder, _shown_fields(run), run.status, kind, sweep=sweep, begun=_seconds(run.started), page=_page(folder)
    )
    values = as_dict(fields.get("metrics"))
    row.training_loss, row.step = finite_number(values.get("loss")), count_number(fields.get("step"))
    losses = (values.get("best_val_loss"), values.get("val_loss"), as_dict(fields.get("export")).get("loss"))
    row.evaluation_loss = next((loss for loss in map(finite_number, losses) if loss is not None), None)
    if not values:
        _read_tail(row)
    return row, fields.get("evaluation")


def _shown_fields(run: Run) -> dict[str, Any]:
    texts = {name: text[:MAX_SHOWN_TEXT] for name in SHOWN_TEXTS if isinstance(text := run.fields.get(name), str)}
    files = [file for file in as_list(run.fields.get("data")) if isinstance(file, dict)]
    names = ", ".join(Path(text_of(file.get("file"))).name for file in files[:3])
    return {**texts, "tags": run.tags, "data": names + (f" and {len(files) - 3} more" if len(files) > 3 else "")}


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
        with suppress(ValueError):
            if isinstance(record := parse_json(line), dict):
                yield record


def _read_sweep(folder: Path, budget: Budget) -> ListedRun:
    recorded = read_json_object(folder / SWEEP_FILE)
    if not isinstance(recorded.get("jobs"), list):
        return _no_run(folder, BROKEN, "sweep.json cannot be read")
    status, _ = sweep_status(folder, recorded)
    sweep = ListedRun(folder, {}, status, "sweep", begun=_seconds(recorded.get("created")), page=_page(folder))
    read = [_read_run(job, "job", sweep) for job in job_folders(folder) if budget.allows(job / RUN_FILE)]
    sweep.jobs = [job for job, _ in read]
    of_jobs = {job.status for job in sweep.jobs}
    if status == "running" and "running" not in of_jobs and of_jobs & {"interrupted", "new"}:
        sweep.status = "interrupted"
    losses = [job.evaluation_loss for job in sweep.jobs if job.evaluation_loss is not None]
    comparable = comparison_problem(evaluation for _, evaluation in read) is None
    sweep.evaluation_loss = min(losses, default=None) if comparable else None
    keys = ", ".join(text_of(key, 60) for key in as_dict(recorded.get("swept")))
    sweep.problem = f"{len(recorded['jobs'])} jobs over {keys or 'the seed'}"
    return sweep


def _page(folder: Path) -> Path | None:
    return folder / REPORT_FILE if is_file(folder / REPORT_FILE) else None


def _seconds(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


# --- which run began from which -----------------------------------------------------------------------------------------


@dataclass
class Node:
    row: ListedRun
    children: list[Node] = field(default_factory=list)
    x: int = 0  # pixels
    y: int = 0

    @property
    def detail(self) -> str:
        row, loss = self.row, self.row.evaluation_loss
        parts = [row.stage, f"sweep of {len(row.jobs)}" if row.kind == "sweep" else ""]
        parts += [row.status if row.status != "completed" else ""]
        parts += ["" if loss is None else f"{'best ' if row.kind == 'sweep' else ''}{loss:.4f}"]
        return _cut(" · ".join(filter(None, parts)), DETAIL_CHARACTERS)

    @property
    def name(self) -> str:
        return _cut(self.row.label, LABEL_CHARACTERS)


def _cut(text: str, limit: int) -> str:
    text = strip_control(text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def parents_of(runs: RunList) -> dict[Path, ListedRun]:
    """Return the run or sweep that each run began from, by the folder of the run; those that began from nothing in the
    list are missing.
    """
    listed = {row.folder: row for row in runs.rows if row.kind != "other"}
    parents: dict[Path, ListedRun] = {}
    for folder, row in listed.items():
        if os.path.isabs(row.init_from) and "\0" not in row.init_from:
            start = Path(os.path.normpath(row.init_from))
            found = next((listed[path] for path in (start, *start.parents) if path in listed), None)
            if found is not None and found is not row and found.sweep is not row and row.sweep is not found:
                parents[folder] = found
    return parents


def lineage_trees(runs: RunList, parents: dict[Path, ListedRun]) -> list[Node]:
    """Return the trees with at least two runs, newest first.

    A job of a sweep is part of its sweep; a circle, which no training makes, is cut.
    """
    nodes = {row.folder: Node(row) for row in runs.rows if row.kind in ("run", "sweep")}
    parent_of: dict[Path, Path] = {}
    for folder, node in nodes.items():
        parent = parents.get(folder)
        start = None if parent is None else (parent.sweep or parent).folder
        if start is not None and start in nodes and not _is_ancestor(folder, start, parent_of):
            parent_of[folder] = start
            nodes[start].children.append(node)
    return [node for folder, node in nodes.items() if node.children and folder not in parent_of]


def _is_ancestor(folder: Path, of: Path, parent_of: dict[Path, Path]) -> bool:
    """Whether `folder` is `of` or one of its ancestors: to begin from `of` would close a circle."""
    path: Path | None = of
    while path is not None and path != folder:
        path = parent_of.get(path)
    return path is not None


def place_nodes(trees: list[Node]) -> tuple[list[tuple[Node, Node | None]], int]:
    """Set the position of up to MAX_NODES nodes. Return them with their parents, and the number of all nodes."""
    placed: list[tuple[Node, Node | None]] = []
    rows = total = 0
    stack: list[tuple[Node, Node | None]] = [(tree, None) for tree in reversed(trees)]
    while stack:  # depth first, without recursion: a chain may be long
        node, parent = stack.pop()
        total += 1
        if len(placed) < MAX_NODES:
            node.x = parent.x + WIDTH + GAP_X if parent else 0
            node.y = rows * (HEIGHT + GAP_Y)
            placed.append((node, parent))
            rows += not node.children
        stack += [(child, node) for child in sorted(node.children, key=lambda child: -(child.row.begun or 0.0))]
    return placed, total


# --- page and text ------------------------------------------------------------------------------------------------------

LinkOf = Callable[[ListedRun], str | None]


def list_page(runs: RunList, link_of: LinkOf, is_served: bool) -> str:
    """Return the page.

    `link_of`: address of a run's page, None if it has none; `is_served`: comparisons are links, and the list is live.
    """
    parents = parents_of(runs)
    placed, total = place_nodes(lineage_trees(runs, parents))
    return render(
        "list.jinja",
        ("charts.js", "list.js"),
        ("page.css", "run.css", "table.css", "list.css"),
        {"reload": RELOAD_SECONDS if is_served else None, "command": shlex.join(command_line_here("report"))},
        runs=runs,
        parents=parents,
        is_served=is_served,
        link_of=link_of,
        loss_text=loss_or_problem,
        quote=shlex.quote,
        age_text=age_text,
        now=time.time(),
        placed=placed,
        total=total,
        box={"width": WIDTH, "height": HEIGHT, "gap": GAP_X},
        statuses=sorted({row.status for row in runs.rows}),
        stages=sorted({row.stage for row in runs.rows if row.stage}),
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
    now, parents = time.time(), parents_of(runs)
    table = [["run", "status", "stage", "eval loss", "train loss", "age", "began from"]]
    for row in rows[:TERMINAL_ROWS]:
        name, path, parent = row.text("name", 20), str(row.folder.relative_to(runs.root)), parents.get(row.folder)
        losses = (loss_or_problem(row.evaluation_loss), loss_or_problem(row.training_loss))
        shown = f"{name}  {path}" if name else path
        age = age_text(row.begun, now)
        table.append([shown, row.status, row.stage, *losses, age, parent.label if parent else ""])
    lines = shortened_table(table, [False, False, False, True, True, True, False]) if rows else []
    more = [f"and {len(rows) - TERMINAL_ROWS} older ones"] if len(rows) > TERMINAL_ROWS else []
    return "\n".join([f"{runs.root}: {_counts(runs)}", *lines, *more])
