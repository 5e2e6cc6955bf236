"""The page with all runs and sweeps, as one file or served, and the same as text for a terminal."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from common.paths import command_line_here
from runner.reporting.compare_page.page import TABLE_SCRIPT, TABLE_STYLE, aligned, loss_or_problem
from runner.reporting.page_template import CSS, RELOAD_SECONDS, json_block, load_template
from runner.reporting.run_folders import text_of
from runner.reporting.run_list.lineage import draw_lineage, lineage_trees, parents_of
from runner.reporting.run_list.scan import ListedRun, RunList

if TYPE_CHECKING:
    import jinja2

LIST_FOLDER = Path(__file__).parent
TERMINAL_ROWS = 20
AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (0.0, "s"))
LinkOf = Callable[[ListedRun], str | None]


def list_page(runs: RunList, link_of: LinkOf, is_served: bool) -> str:
    """Return the page. `link_of`: address of a run's page, None if it has none; `is_served`: comparisons are links, and the list is live."""
    parents = parents_of(runs)
    picture, hidden = draw_lineage(lineage_trees(runs, parents), link_of)
    now = time.time()
    rows = [_row(row, runs.root, parents.get(row.folder), link_of, now) for row in runs.rows]
    return _template().render(
        runs=runs,
        rows=rows,
        is_served=is_served,
        picture=picture,
        hidden=hidden,
        statuses=[*dict.fromkeys(sorted(row.status for row in runs.rows))],
        stages=[*dict.fromkeys(sorted(row.stage for row in runs.rows if row.stage))],
        counts=_counts(runs),
        data_json=json_block({"reload": RELOAD_SECONDS if is_served else None, "command": shlex.join(command_line_here("report"))}),
        created=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    )


@cache
def _template() -> jinja2.Template:
    scripts, styles = (TABLE_SCRIPT, LIST_FOLDER / "list.js"), (CSS, LIST_FOLDER.parent / "run_page" / "run.css", TABLE_STYLE, LIST_FOLDER / "list.css")
    return load_template(LIST_FOLDER / "list.jinja", scripts, styles)


def _row(row: ListedRun, root: Path, parent: ListedRun | None, link_of: LinkOf, now: float) -> dict[str, Any]:
    return {
        "run": row,
        "link": link_of(row),
        "path": str(row.folder),
        "value": str(row.folder.relative_to(root)),
        "argument": shlex.quote(str(row.folder)),
        "loss": loss_or_problem(row.evaluation_loss),
        "training_loss": loss_or_problem(row.training_loss),
        "age": age_text(row.started, now),
        "parent": parent,
        "parent_link": link_of(parent) if parent else None,
    }


def _counts(runs: RunList) -> str:
    kinds = {"run": ("run", "runs"), "sweep": ("sweep", "sweeps"), "job": ("job of a sweep", "jobs of sweeps"), "other": ("other folder", "other folders")}
    counts = {kind: sum(row.kind == kind for row in runs.rows) for kind in kinds}
    return ", ".join(f"{count} {kinds[kind][count > 1]}" for kind, count in counts.items() if count) or "no runs"


def age_text(started: float | None, now: float) -> str:
    """Return e.g. `3 h`: how long ago a run was first started."""
    if started is None:
        return ""
    age = max(0.0, now - started)
    size, unit = next(pair for pair in AGES if age >= pair[0])
    return f"{age / (size or 1.0):.0f} {unit}"


def file_link(row: ListedRun, page: Path) -> str | None:
    """Return the address of a run's report.html for a page whose file is `page`."""
    return None if row.page is None else quote(os.path.relpath(row.page, page.parent), errors="backslashreplace")


def served_link(root: Path) -> LinkOf:
    """Return the function that gives the address of a run's page below `/run/` of the server."""

    def link_of(row: ListedRun) -> str | None:
        return None if row.kind == "other" or row.status == "broken" else f"run/{quote(str(row.folder.relative_to(root)), errors='backslashreplace')}/"

    return link_of


def list_text(runs: RunList) -> str:
    """Return the newest runs and sweeps as a table; the jobs of a sweep are left out."""
    rows = [row for row in runs.rows if row.kind in ("run", "sweep")]
    now = time.time()
    table = [["run", "status", "stage", "eval loss", "train loss", "age", "began from"]]
    parents = parents_of(runs)
    for row in rows[:TERMINAL_ROWS]:
        losses, parent = (loss_or_problem(row.evaluation_loss), loss_or_problem(row.training_loss)), parents.get(row.folder)
        path, name = str(row.folder.relative_to(runs.root)), text_of(row.fields.get("name"), 20)
        table.append([f"{name}  {path}" if name else path, row.status, row.stage, *losses, age_text(row.started, now), parent.label if parent else ""])
    more = [f"and {len(rows) - TERMINAL_ROWS} older ones"] if len(rows) > TERMINAL_ROWS else []
    return "\n".join([f"{runs.root}: {_counts(runs)}", *(aligned(table, ["<", "<", "<", ">", ">", ">", "<"]) if rows else []), *more])
