"""The page that compares runs, and the same as text for a terminal: one file that makes no request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import one_line, strip_control
from runner.reporting.compare_page.read import ComparedRun, Comparison
from runner.reporting.curve_points import choose_points
from runner.reporting.page_template import (
    CHART_LIBRARY,
    CHART_STYLE,
    CSS,
    RELOAD_SECONDS,
    json_block,
    load_template,
    short_number,
)
from runner.reporting.sweep_results.metrics_reader import LossPoint
from runner.tracking.console.bar import cell_width, pad
from runner.tracking.console.numbers import format_seconds

if TYPE_CHECKING:
    import jinja2

COMPARE_FOLDER = Path(__file__).parent
TABLE_SCRIPT, TABLE_STYLE = COMPARE_FOLDER.parent / "table.js", COMPARE_FOLDER.parent / "table.css"
COMPARE_SCRIPTS = (CHART_LIBRARY, TABLE_SCRIPT, COMPARE_FOLDER / "compare.js")
COMPARE_STYLES = (
    CSS,
    COMPARE_FOLDER.parent / "run_page" / "run.css",
    CHART_STYLE,
    TABLE_STYLE,
    COMPARE_FOLDER / "compare.css",
)
COMPARE_COLORS, DASHES = 8, 4  # classes s0 to s7 and d0 to d3 of page.css
MAX_PAGE_POINTS, MIN_CURVE_POINTS = 14_000, 12  # of all curves; of one curve
MAX_CELLS = 12_000  # of the table of settings that differ
# on a terminal: settings that differ; characters of a value, and of the first column
TERMINAL_SETTINGS, TERMINAL_WIDTH, FIRST_COLUMN = 24, 20, 40


@dataclass(frozen=True)
class RunColumn:
    """A column of the table of runs."""

    title: str
    terminal: str  # title on a terminal; "": not shown there
    get: Callable[[ComparedRun], Any]  # a number, or text; None: unknown
    text: Callable[[Any], str] = str
    is_number: bool = True


def loss_or_problem(value: float | None) -> str:
    return "" if value is None else "not finite" if math.isinf(value) else f"{value:.4f}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


RUN_COLUMNS = (
    RunColumn("status", "status", lambda run: run.status, is_number=False),
    RunColumn("best evaluation loss", "best eval", lambda run: run.best[0] if run.best else None, loss_or_problem),
    RunColumn("at step", "at step", lambda run: run.best[1] if run.best else None, _count),
    RunColumn("newest evaluation loss", "eval", lambda run: run.evaluation_loss, loss_or_problem),
    RunColumn("newest training loss", "train", lambda run: run.training_loss, loss_or_problem),
    RunColumn("step", "", lambda run: run.step, _count),
    RunColumn("tokens", "tokens", lambda run: run.tokens, _count),
    RunColumn("time", "time", lambda run: run.seconds, _seconds),
    RunColumn("tokens/s", "tok/s", lambda run: run.metrics.tokens_per_second, _count),
    RunColumn("attempts", "", lambda run: run.attempts, _count),
)


def compare_page(comparison: Comparison, reloads: bool = False) -> str:
    """Return the page. `reloads`: it is served, and is loaded again while a run trains."""
    differing = comparison.differing
    shown = differing[: max(1, MAX_CELLS // len(comparison.runs))]
    columns = [column for column in RUN_COLUMNS if any(column.get(run) not in (None, 0, "") for run in comparison.runs)]
    return _template().render(
        comparison=comparison,
        columns=columns,
        best=comparison.best_labels,
        cells=[
            [(column, sort_key(column.get(run)), _text(column, run)) for column in columns] for run in comparison.runs
        ],
        styles=[
            f"s{index % COMPARE_COLORS} d{index // COMPARE_COLORS % DASHES}" for index in range(len(comparison.runs))
        ],
        shown=shown,
        hidden=len(differing) - len(shown),
        data_json=json_block(
            {"runs": _curves(comparison.runs), "reload": RELOAD_SECONDS if reloads and comparison.is_running else None}
        ),
        created=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    )


@cache
def _template() -> jinja2.Template:
    return load_template(COMPARE_FOLDER / "compare.jinja", COMPARE_SCRIPTS, COMPARE_STYLES)


def sort_key(value: Any) -> str:
    """Return what a cell is sorted by; an unknown value is last."""
    return "" if value is None else "1e300" if value == math.inf else str(value)


def _text(column: RunColumn, run: ComparedRun) -> str:
    value = column.get(run)
    return "" if value is None else column.text(value)


def _curves(runs: list[ComparedRun]) -> list[dict[str, Any]]:
    limit = max(MIN_CURVE_POINTS, MAX_PAGE_POINTS // (2 * len(runs)))
    return [
        {
            "label": strip_control(run.label),
            "train": _points(run.metrics.train, limit),
            "eval": _points(run.metrics.eval, limit),
        }
        for run in runs
    ]


def _points(points: list[LossPoint], limit: int) -> dict[str, list]:
    kept = [points[index] for index in choose_points([point.loss for point in points], limit)]
    columns: dict[str, list[float | None]] = {
        "step": [point.step for point in kept],
        "tokens": [point.tokens for point in kept],
        "seconds": [point.time for point in kept],
        "loss": [point.loss for point in kept],
    }
    return {name: [short_number(value) for value in values] for name, values in columns.items()}


def compare_text(comparison: Comparison) -> str:
    """Return warnings, the table of runs and the settings that differ, for a terminal."""
    columns = [
        column for column in RUN_COLUMNS if column.terminal and any(_text(column, run) for run in comparison.runs)
    ]
    best = comparison.best_labels
    table = [["run", *(column.terminal for column in columns)]]
    table += [
        [("* " if run.label in best else "") + run.label, *(_text(column, run) for column in columns)]
        for run in comparison.runs
    ]
    lines = aligned(table, ["<", *(">" if column.is_number else "<" for column in columns)])
    lines += ["* lowest evaluation loss (best eval); eval, train: the newest losses"] if best else []
    lines += [f"warning: the evaluation losses cannot be compared: {comparison.problem}"] if comparison.problem else []
    lines += [f"note: {note}" for note in comparison.notes]
    if differing := comparison.differing:
        numbers = (
            [str(number) for number in range(1, len(comparison.runs) + 1)]
            if len(comparison.runs) > 6
            else [run.label for run in comparison.runs]
        )
        lines += [
            "",
            "what differs"
            + (f" (the first {TERMINAL_SETTINGS} of {len(differing)})" if len(differing) > TERMINAL_SETTINGS else ""),
        ]
        if len(comparison.runs) > 6:
            lines += [f"{key}: {_few_values(values)}" for key, values in differing[:TERMINAL_SETTINGS]]
        else:
            lines += aligned(
                [["", *numbers], *([key, *values] for key, values in differing[:TERMINAL_SETTINGS])],
                ["<"] * (len(numbers) + 1),
            )
    else:
        lines += ["", "no setting differs"]
    return "\n".join(lines)


def _few_values(values: list[str]) -> str:
    found = [*dict.fromkeys(values)]
    return ", ".join(_shorten(value) for value in found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")


def _shorten(text: str, width: int = TERMINAL_WIDTH) -> str:
    text = one_line(text)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def aligned(table: list[list[str]], alignment: list[str]) -> list[str]:
    """Return the lines of a table whose columns are aligned by "<" or ">"; long cells keep their end, wide characters
    take two cells.
    """
    table = [[_shorten(line[0], FIRST_COLUMN), *map(_shorten, line[1:])] for line in table]
    widths = [max(map(cell_width, cells)) for cells in zip(*table, strict=True)]
    return [
        "  ".join(
            pad(cell, width, align == ">") for cell, align, width in zip(line, alignment, widths, strict=True)
        ).rstrip()
        for line in table
    ]
