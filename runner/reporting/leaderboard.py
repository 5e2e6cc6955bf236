"""The leaderboard of a sweep: as text for a terminal, as leaderboard.csv, and the update of both files of the sweep
directory.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from common.errors import UserError, did_you_mean_path, strip_control
from common.guarded_files import check_own_files
from common.paths import outputs_dir
from runner.reporting.columns import (
    point_label,
    swept_text,
    table_columns,
    trained_value,
    with_note,
)
from runner.reporting.page_kit import write_text
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.runs import REPORT_FILE
from runner.reporting.sweep_page import sweep_page
from runner.reporting.sweep_results import SweepResults
from runner.run_dir.best_job import SEED_KEY, parse_number
from runner.tracking.console.bar import table_lines

LEADERBOARD_FILE = "leaderboard.csv"
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell with one of these as a formula


def update_report(folder: Path, is_final: bool = True) -> None:
    """Write leaderboard.csv and report.html of the sweep in `folder` again.

    Each file is replaced atomically.

    `is_final=False` leaves out what takes seconds, for a sweep whose jobs still run.
    """
    sweep = read_sweep_results(folder.absolute())
    write_text(folder / LEADERBOARD_FILE, leaderboard_csv(sweep))
    write_text(folder / REPORT_FILE, sweep_page(sweep, is_final))


def resolve_sweep(name: str) -> Path:
    """Return the sweep directory which is, or contains, the path `name`; the newest one for `last`."""
    if name == "last":
        sweeps = list((outputs_dir() / "multirun").glob("*/*/sweep.json"))
        if not sweeps:
            raise UserError(
                "there is no sweep in outputs/multirun",
                "sweep=last",
                "start one: python runner/train.py --multirun optimizer.lr=1e-4,5e-4",
            )
        return max(sweeps, key=lambda sweep: sweep.stat().st_mtime).parent
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise UserError("there is no such file or directory", f"sweep={name}", did_you_mean_path(name))
    for parent in (path, *path.parents):
        if (parent / "sweep.json").is_file():
            check_own_files(parent, ("sweep.json", LEADERBOARD_FILE, REPORT_FILE))
            return parent
    raise UserError(
        "this is not a sweep directory: there is no sweep.json",
        f"sweep={name}",
        "give a sweep directory, or sweep=last",
    )


def leaderboard_text(folder: Path) -> str:
    """Return the table, the reasons of jobs without a result, and the commands for the best job and for resuming the
    sweep.
    """
    sweep = read_sweep_results(folder.absolute())
    columns = [column for column in table_columns(sweep) if column.title and column.in_terminal]
    table = [["", *sweep.shown_keys, *[SEED_KEY] * sweep.has_seeds, *(column.title for column in columns)]]
    for row in sweep.rows:
        for line in [row, *row.members]:
            rank = f"{line.rank}." if line.rank else "-" if line is row else ""
            swept = [swept_text(row, key) if line is row else "" for key in sweep.shown_keys]
            table.append(
                [rank, *swept, *[line.seed] * sweep.has_seeds, *(column.text(column.get(line)) for column in columns)]
            )
    explained = [job for row in sweep.rows for job in row.jobs if job.reason or job.note]
    reasons = [
        ": ".join(filter(None, [point_label(job.swept) or job.name, with_note(job.status, job), job.reason]))
        for job in explained
    ]
    is_number = [False] * (len(table[0]) - len(columns)) + [column.is_number for column in columns]
    lines = table_lines([[*map(strip_control, line)] for line in table], is_number)
    text = [f"sweep {sweep.folder}", f"{sweep.status}: {sweep.status_counts()}", "", *lines]
    text += ["", *reasons] if reasons else []
    text += ["", f"no best job: {sweep.problem}"] if sweep.problem else []
    text += ["", f"{with_note('best job', sweep.best)}: {sweep.job_command(sweep.best)}"] if sweep.best else []
    text += [note] if sweep.best and (note := sweep.command_note(sweep.best)) else []
    text += (
        [f"its model: {sweep.folder / sweep.best.folder} ({sweep.best.model})"]
        if sweep.best and sweep.best.model and sweep.best.folder
        else []
    )
    text += ["", f"continue with: {sweep.resume_command}"] if sweep.is_unfinished and not sweep.is_running else []
    return strip_control("\n".join(text))


def leaderboard_csv(sweep: SweepResults) -> str:
    """Return one line per grid point (`row` is "point") and, below it, one per job where it has several (`row` is
    "job"). Times are in seconds.
    """
    columns = table_columns(sweep)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_csv_cell, ["row", "rank", *sweep.shown_keys, SEED_KEY, *(column.key for column in columns)]))
    for row in sweep.rows:
        for line in [row, *row.members]:
            swept = [trained_value(line, key) for key in sweep.shown_keys]
            identity = ["point" if line is row else "job", line.rank, *swept, "" if line.members else line.seed]
            writer.writerow(map(_csv_cell, [*identity, *(column.csv(column.get(line)) for column in columns)]))
    return out.getvalue()


def _csv_cell(value: object) -> str:
    """Numbers without separators; an apostrophe before text that a spreadsheet would run as a formula."""
    if value is None:
        return ""
    if isinstance(value, int | float):
        return f"{value:.10g}"
    text = strip_control(str(value))
    return f"'{text}" if text.lstrip(" ").startswith(FORMULA_PREFIXES) and parse_number(text) is None else text
