"""The leaderboard of a sweep, as text for a terminal and as leaderboard.csv; the update of both files of the sweep
directory; and the last lines of a sweep: its best points, how sure the best one is, and the commands that come next.
"""

from __future__ import annotations

import csv
import io
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean_path, one_line, strip_control
from common.guarded_files import check_own_files
from common.paths import command_line, command_line_here, display_path, outputs_dir
from runner.reporting.columns import (
    loss_text,
    swept_text,
    table_columns,
    trained_value,
    with_note,
)
from runner.reporting.page_kit import write_text
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.runs import REPORT_FILE
from runner.reporting.sweep_page import sweep_page
from runner.reporting.sweep_results import ResultRow, SweepResults
from runner.reporting.verdict import SweepVerdict
from runner.run_dir.best_job import SEED_KEY, parse_number
from runner.tracking.bar import (
    LINE_WIDTH,
    labelled_lines,
    shorten_middle,
    table_lines,
    widest,
    wrap_text,
)
from runner.tracking.run_end import COMMAND_INDENT, next_lines

CONTINUE = "train the jobs that are not completed"  # the last line of the process has this command
MAX_LEADERS = 10  # points of the table
MIN_CELL = 8  # cells of a swept value
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
    seed = [SEED_KEY] * sweep.has_seeds
    table = [["", *sweep.shown_keys, *seed, *(column.title for column in columns)]]
    for row in sweep.rows:
        for line in row.lines:
            rank = _rank(line) if line.rank or line is row else ""
            swept = [swept_text(row, key) if line is row else "" for key in sweep.shown_keys]
            cells = [rank, *swept, *[line.seed for _ in seed], *(column.cell(line) for column in columns)]
            table.append([*map(strip_control, cells)])
    is_number = [False] * (len(table[0]) - len(columns)) + [column.is_number for column in columns]
    text = [f"sweep {sweep.folder}", f"{sweep.status}: {sweep.status_counts()}", "", *table_lines(table, is_number)]
    explained = [job for row in sweep.rows for job in row.jobs if job.reason or job.note]
    if explained:
        text.append("")
    for job in explained:
        text.append(": ".join(filter(None, [job.label, with_note(job.status, job), job.reason])))
    verdict = SweepVerdict(sweep)
    if sweep.problem:
        text += ["", f"no best job: {sweep.problem}"]
    elif verdict.winner:
        text += ["", f"{verdict.certainty} ({verdict.judged_on})" if verdict.judged_on else verdict.certainty]
    if best := sweep.best:
        text += ["", f"{with_note('best job', best)}: {sweep.job_command(best)}"]
        text += filter(None, [sweep.command_note(best)])
        if best.model:
            text.append(f"its model: {best.run_dir} ({best.model})")
    if sweep.is_unfinished and not sweep.is_running:
        text += ["", f"continue with: {sweep.resume_command}"]
    return strip_control("\n".join(text))


def _rank(row: ResultRow) -> str:
    return f"{row.rank}." if row.rank else "-"


def leaderboard_csv(sweep: SweepResults) -> str:
    """Return one line per grid point (`row` is "point") and, below it, one per job where it has several (`row` is
    "job"). Times are in seconds.
    """
    columns = table_columns(sweep)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_csv_cell, ["row", "rank", *sweep.shown_keys, SEED_KEY, *(column.key for column in columns)]))
    for row in sweep.rows:
        for line in row.lines:
            swept = [trained_value(line, key) for key in sweep.shown_keys]
            identity = ["point" if line is row else "job", line.rank, *swept, "" if line.members else line.seed]
            writer.writerow(map(_csv_cell, [*identity, *(column.csv_value(line) for column in columns)]))
    return out.getvalue()


def _csv_cell(value: object) -> str:
    """Numbers without separators; an apostrophe before text that a spreadsheet would run as a formula."""
    if value is None:
        return ""
    if isinstance(value, int | float):
        return f"{value:.15g}"
    text = strip_control(str(value))
    return f"'{text}" if text.lstrip(" ").startswith(FORMULA_PREFIXES) and parse_number(text) is None else text


# --- the last lines of a sweep -----------------------------------------------------------------------------------------


def describe_sweep_end(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the last lines of the sweep in `folder`, and the same as JSON values."""
    sweep = read_sweep_results(folder.absolute())
    verdict = SweepVerdict(sweep)
    commands = next_sweep_commands(sweep, verdict)
    score = verdict.winner.score if verdict.winner else None
    lines = [*_leaders(sweep, verdict), *labelled_lines(_rows(sweep, verdict).items())]
    lines += next_lines([each for each in commands if each[1] != CONTINUE], LINE_WIDTH)
    event = {
        "folder": str(sweep.folder),
        "status": sweep.status,
        "winner": verdict.name or None,
        "job": verdict.job.name if verdict.job else None,
        "loss": score.mean if score else None,
        "certainty": verdict.certainty,
        "told_apart": verdict.is_sure,
        "judged_on": verdict.judged_on,
        "ties": len(verdict.ties),
        "next": [arguments for arguments, _ in commands],
    }
    return strip_control("\n".join(lines)), event


def next_sweep_commands(sweep: SweepResults, verdict: SweepVerdict) -> list[tuple[list[str], str]]:
    """Return (arguments, purpose) of each command, as it is typed where this process was started."""
    commands = [
        (verdict.transfer, "train the model of full width with this learning rate, which mup scales"),
        (verdict.train_longer, "train the best point longer"),
        (verdict.repeat, ", ".join(filter(None, ["repeat the best point with three seeds", verdict.command_note]))),
        *((edge.command, f"the best point has the {edge.side} {edge.key}: extend its range") for edge in verdict.edges),
        (sweep.resume_command if sweep.is_unfinished else "", CONTINUE),
    ]
    return [(_typed_here(shlex.split(command)), purpose) for command, purpose in commands if command]


def _typed_here(arguments: list[str]) -> list[str]:
    """Return the arguments of a train command of a page, which name the checkout's own python, with the path of
    `resume=` relative to the current directory.
    """
    own = arguments[len(command_line("train")) :]
    if own and own[0].startswith("resume="):
        own[0] = f"resume={display_path(Path(own[0].removeprefix('resume=')))}"
    return [*command_line_here("train"), *own]


def _shorten_value(text: str, width: int) -> str:
    """Return `text`; if it has more than `width` cells four digits of a fraction, the ends of integers and other text."""
    with suppress(ValueError):
        if len(text) > width and not text.lstrip("-").isdecimal():
            return min(text, f"{float(text):.4g}", key=len)
    return shorten_middle(text, width)


def _leaders(sweep: SweepResults, verdict: SweepVerdict) -> list[str]:
    """Return the table of the best points, with as many cells as fit."""
    keys, shown = sweep.shown_keys, sweep.rows[:MAX_LEADERS]
    table = [["", *keys, f"{sweep.ranked_by} loss", "status"]]
    for row in shown:
        status = f"{row.status}, tied with the best" if row in verdict.ties else row.progress
        table.append([_rank(row), *(swept_text(row, key) for key in keys), loss_text(row.score), status])
    widths = [widest(cells) + 2 for cells in zip(*table, strict=True)]
    space = max(MIN_CELL, (LINE_WIDTH - widths[0] - sum(widths[-2:])) // max(1, len(keys)) - 2)
    table = [[row[0], *(_shorten_value(cell, space) for cell in row[1:-2]), *row[-2:]] for row in table]
    lines = table_lines(table, [False] * len(table[0]))
    if len(sweep.rows) > MAX_LEADERS:
        lines.append(f"and {len(sweep.rows) - MAX_LEADERS:,} more, in {LEADERBOARD_FILE}")
    explained = [job for row in sweep.rows for job in row.jobs if job.reason]
    for job in explained[:MAX_LEADERS]:
        reason = f"{job.label}: {job.status}: {one_line(job.reason)}"
        lines += wrap_text(reason, "", COMMAND_INDENT)
    if len(explained) > MAX_LEADERS:
        lines.append(f"and {len(explained) - MAX_LEADERS:,} more without a result")
    return [*lines, ""]


def _rows(sweep: SweepResults, verdict: SweepVerdict) -> dict[str, str]:
    rows = {"jobs": sweep.status_counts()}
    if verdict.winner:
        title = "winner" if verdict.is_sure and sweep.status == "completed" else "best"
        rows[title] = f"{verdict.name}, {sweep.ranked_by} loss {loss_text(verdict.winner.score)}"
    rows |= {"certainty": verdict.certainty} | ({"judged on": verdict.judged_on} if verdict.judged_on else {})
    if verdict.job and verdict.job.run_dir and verdict.job.model:
        rows["model"] = f"{display_path(verdict.job.run_dir / 'model')} ({verdict.job.model})"
    return rows | {
        "page": display_path(sweep.folder / REPORT_FILE),
        "leaderboard": display_path(sweep.folder / LEADERBOARD_FILE),
    }
