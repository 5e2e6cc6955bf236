"""The page with all runs and sweeps, as HTML and as text, and which run began from which.

Which run began from which, pretrain -> sft -> dpo, and its picture as SVG. Only runs of the list are connected: a path
that leads out of it is text.

The page with all runs and sweeps, as one file or served, and the same as text for a terminal.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from common.errors import strip_control
from common.paths import command_line_here
from runner.reporting.compare_page.page import TABLE_SCRIPT, TABLE_STYLE, aligned, loss_or_problem
from runner.reporting.page_template import CSS, RELOAD_SECONDS, json_block, load_template
from runner.reporting.run_folders import text_of
from runner.reporting.run_list.scan import ListedRun, RunList

MAX_NODES = 150  # of the picture
WIDTH, HEIGHT, GAP_X, GAP_Y = 230, 46, 46, 12  # of a box and between boxes, pixels
LABEL_CHARACTERS, DETAIL_CHARACTERS = 27, 36  # that fit into a box


@dataclass
class Node:
    row: ListedRun
    children: list[Node] = field(default_factory=list)
    depth: int = 0
    y: float = 0.0


def parents_of(runs: RunList) -> dict[Path, ListedRun]:
    """Return the run or sweep that each run began from, by the folder of the run; those that began from nothing in the
    list are missing.
    """
    by_folder = runs.by_folder()
    parents: dict[Path, ListedRun] = {}
    for row in runs.rows:
        if row.kind != "other" and os.path.isabs(row.init_from) and "\0" not in row.init_from:
            start = Path(os.path.normpath(row.init_from))
            found = next(
                (
                    by_folder[path]
                    for path in (start, *start.parents)
                    if path in by_folder and by_folder[path].kind != "other"
                ),
                None,
            )
            if found is not None and found is not row and found.sweep is not row and row.sweep is not found:
                parents[row.folder] = found
    return parents


def lineage_trees(runs: RunList, parents: dict[Path, ListedRun]) -> list[Node]:
    """Return the trees with at least two runs, newest first.

    A job of a sweep is part of its sweep; a circle, which no training makes, is cut.
    """
    rows = [row for row in runs.rows if row.kind in ("run", "sweep")]
    nodes = {row.folder: Node(row) for row in rows}
    parent_of: dict[Path, Path] = {}
    for row in rows:
        parent = parents.get(row.folder)
        folder = None if parent is None else (parent.sweep or parent).folder
        if folder is not None and folder in nodes and not _is_ancestor(row.folder, folder, parent_of):
            parent_of[row.folder] = folder
            nodes[folder].children.append(nodes[row.folder])
    return [node for folder, node in nodes.items() if node.children and folder not in parent_of]


def _is_ancestor(folder: Path, of: Path, parent_of: dict[Path, Path]) -> bool:
    """Whether `folder` is `of` or one of its ancestors: to begin from `of` would close a circle."""
    path: Path | None = of
    while path is not None and path != folder:
        path = parent_of.get(path)
    return path is not None


def draw_lineage(trees: list[Node], link_of: Callable[[ListedRun], str | None]) -> tuple[str, int]:
    """Return the picture of the trees, "" for none, and the number of runs that are left out.

    `link_of`: address of a run's page.
    """
    from markupsafe import Markup, escape

    drawn: list[Node] = []
    lines: list[tuple[Node, Node]] = []
    rows, total = 0, 0
    pending = [(tree, 0, None) for tree in reversed(trees)]
    stack: list[tuple[Node, int, Node | None]] = [*pending]
    while stack:  # depth first, without recursion: a chain may be long
        node, depth, parent = stack.pop()
        total += 1
        if len(drawn) < MAX_NODES:
            node.depth, node.y = depth, rows * (HEIGHT + GAP_Y)
            drawn.append(node)
            lines += [(parent, node)] if parent is not None else []
            rows += not node.children
        stack += [
            (child, depth + 1, node) for child in sorted(node.children, key=lambda child: -(child.row.started or 0.0))
        ]
    if not drawn:
        return "", 0
    width = max(node.depth for node in drawn) * (WIDTH + GAP_X) + WIDTH + 2
    height = max(node.y for node in drawn) + HEIGHT + 2
    parts = [
        Markup('<svg width="{}" height="{}" viewBox="-1 -1 {} {}" role="img" aria-label="{}">').format(
            width, height, width, height, f"{total} runs, each connected with the run that it began from"
        )
    ]
    for parent, node in lines:
        x, y, end, end_y = (
            parent.depth * (WIDTH + GAP_X) + WIDTH,
            parent.y + HEIGHT / 2,
            node.depth * (WIDTH + GAP_X),
            node.y + HEIGHT / 2,
        )
        parts.append(
            Markup('<path class="edge" d="M{} {}C{} {} {} {} {} {}"/>').format(
                x, y, x + GAP_X / 2, y, end - GAP_X / 2, end_y, end, end_y
            )
        )
    for node in drawn:
        box = Markup('<rect class="box {}" x="{}" y="{}" width="{}" height="{}" rx="6"/>').format(
            node.row.status, _x(node), node.y, WIDTH, HEIGHT
        )
        title = Markup("<title>{}</title>").format(
            strip_control(f"{node.row.label}, {node.row.status}: {node.row.folder}")
        )
        texts = [
            (19, "name", _cut(node.row.label, LABEL_CHARACTERS)),
            (36, "detail", _cut(_detail(node.row), DETAIL_CHARACTERS)),
        ]
        inner = (
            box
            + title
            + Markup("").join(
                Markup('<text class="{}" x="{}" y="{}">{}</text>').format(css, _x(node) + 10, node.y + y, text)
                for y, css, text in texts
            )
        )
        link = link_of(node.row)
        parts.append(Markup('<a href="{}">{}</a>').format(link, inner) if link else Markup("<g>{}</g>").format(inner))
    return escape("").join([*parts, Markup("</svg>")]), total - len(drawn)


def _x(node: Node) -> int:
    return node.depth * (WIDTH + GAP_X)


def _detail(row: ListedRun) -> str:
    loss = "" if row.evaluation_loss is None else f"{'best ' if row.kind == 'sweep' else ''}{row.evaluation_loss:.4f}"
    return " · ".join(
        filter(
            None,
            [
                row.stage,
                f"sweep of {len(row.jobs)}" if row.kind == "sweep" else "",
                row.status if row.status != "completed" else "",
                loss,
            ],
        )
    )


def _cut(text: str, limit: int) -> str:
    text = strip_control(text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


if TYPE_CHECKING:
    import jinja2

LIST_FOLDER = Path(__file__).parent
TERMINAL_ROWS = 20
AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (0.0, "s"))
LinkOf = Callable[[ListedRun], str | None]


def list_page(runs: RunList, link_of: LinkOf, is_served: bool) -> str:
    """Return the page.

    `link_of`: address of a run's page, None if it has none; `is_served`: comparisons are links, and the list is live.
    """
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
        data_json=json_block(
            {"reload": RELOAD_SECONDS if is_served else None, "command": shlex.join(command_line_here("report"))}
        ),
        created=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    )


@cache
def _template() -> jinja2.Template:
    scripts, styles = (
        (TABLE_SCRIPT, LIST_FOLDER / "list.js"),
        (CSS, LIST_FOLDER.parent / "run_page" / "run.css", TABLE_STYLE, LIST_FOLDER / "list.css"),
    )
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
    kinds = {
        "run": ("run", "runs"),
        "sweep": ("sweep", "sweeps"),
        "job": ("job of a sweep", "jobs of sweeps"),
        "other": ("other folder", "other folders"),
    }
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
        return (
            None
            if row.kind == "other" or row.status == "broken"
            else f"run/{quote(str(row.folder.relative_to(root)), errors='backslashreplace')}/"
        )

    return link_of


def list_text(runs: RunList) -> str:
    """Return the newest runs and sweeps as a table; the jobs of a sweep are left out."""
    rows = [row for row in runs.rows if row.kind in ("run", "sweep")]
    now = time.time()
    table = [["run", "status", "stage", "eval loss", "train loss", "age", "began from"]]
    parents = parents_of(runs)
    for row in rows[:TERMINAL_ROWS]:
        losses, parent = (
            (loss_or_problem(row.evaluation_loss), loss_or_problem(row.training_loss)),
            parents.get(row.folder),
        )
        path, name = str(row.folder.relative_to(runs.root)), text_of(row.fields.get("name"), 20)
        table.append(
            [
                f"{name}  {path}" if name else path,
                row.status,
                row.stage,
                *losses,
                age_text(row.started, now),
                parent.label if parent else "",
            ]
        )
    more = [f"and {len(rows) - TERMINAL_ROWS} older ones"] if len(rows) > TERMINAL_ROWS else []
    return "\n".join(
        [f"{runs.root}: {_counts(runs)}", *(aligned(table, ["<", "<", "<", ">", ">", ">", "<"]) if rows else []), *more]
    )
