"""The last lines of a sweep: leaderboard, winner, how sure that is, and the commands that come next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from common.errors import one_line, strip_control
from common.paths import command_line, command_line_here, display_path
from runner.reporting.columns import loss_text, point_label, swept_text
from runner.reporting.leaderboard import LEADERBOARD_FILE
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.runs import REPORT_FILE
from runner.reporting.sweep_results import SweepResults
from runner.reporting.verdict import SweepVerdict, sweep_verdict
from runner.tracking.console.bar import (
    LINE_WIDTH,
    command_lines,
    labelled_lines,
    shorten_middle,
    table_lines,
    widest,
    wrap_text,
)
from runner.tracking.run_end import COMMAND_INDENT

CONTINUE = "train the jobs that are not completed"  # the last line of the process has this command
MAX_LEADERS = 10  # points of the table
MIN_CELL = 8  # cells of a swept value


def describe_sweep_end(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the last lines of the sweep in `folder`, and the same as JSON values."""
    sweep = read_sweep_results(folder.absolute())
    verdict = sweep_verdict(sweep)
    commands = next_sweep_commands(sweep, verdict)
    lines = [*_leaders(sweep, verdict), *labelled_lines(_rows(sweep, verdict).items())]
    printed = [(arguments, purpose) for arguments, purpose in commands if purpose != CONTINUE]
    lines += ["next"] if printed else []
    lines += [
        COMMAND_INDENT + line
        for arguments, purpose in printed
        for line in command_lines(arguments, purpose, LINE_WIDTH - len(COMMAND_INDENT))
    ]
    event = {
        "folder": str(sweep.folder),
        "status": sweep.status,
        "winner": verdict.name or None,
        "job": verdict.job.name if verdict.job else None,
        "loss": verdict.winner.score.mean if verdict.winner and verdict.winner.score else None,
        "certainty": verdict.certainty,
        "ties": len(verdict.ties),
        "next": [arguments for arguments, _ in commands],
    }
    return strip_control("\n".join(lines)), event


def next_sweep_commands(sweep: SweepResults, verdict: SweepVerdict) -> list[tuple[list[str], str]]:
    """Return (arguments, purpose) of each command, as it is typed where this process was started."""
    commands = [
        (verdict.train_longer, "train the winner longer"),
        (verdict.repeat, ", ".join(filter(None, ["repeat the winner with three seeds", verdict.command_note]))),
    ]
    commands += [(edge.command, f"the {edge.side} {edge.key} won: extend its range") for edge in verdict.edges]
    commands += [(sweep.resume_command, CONTINUE)] if sweep.is_unfinished else []
    return [(_typed_here(shlex.split(command)), purpose) for command, purpose in commands if command]


def _typed_here(arguments: list[str]) -> list[str]:
    """Return the arguments of a train command of a page, which name the checkout's own python, with paths inside of the
    current directory relative.
    """
    own = arguments[len(command_line("train")) :]
    key, equals, path = own[0].partition("=") if own else ("", "", "")
    first = [f"{key}={display_path(Path(path))}"] if key == "resume" and equals else own[:1]
    return [*command_line_here("train"), *first, *own[1:]]


def _leaders(sweep: SweepResults, verdict: SweepVerdict) -> list[str]:
    """Return the table of the best points, with as many cells as fit."""
    tied = {id(row) for row in verdict.ties}
    keys, shown = sweep.shown_keys, sweep.rows[:MAX_LEADERS]
    table = [["", *keys, f"{sweep.ranked_by} loss", "status"]]
    for row in shown:
        rank = f"{row.rank}." if row.rank else "-"
        status = f"{row.status}, tied with the best" if id(row) in tied else row.status
        table.append([rank, *(swept_text(row, key) for key in keys), loss_text(row.score), status])
    others = sum(
        widest(cells) + 2 for number, cells in enumerate(zip(*table, strict=True)) if not 0 < number <= len(keys)
    )
    space = max(MIN_CELL, (LINE_WIDTH - others) // max(1, len(keys)) - 2)
    table = [
        [row[0], *(shorten_middle(cell, space) for cell in row[1 : len(keys) + 1]), *row[len(keys) + 1 :]]
        for row in table
    ]
    more = len(sweep.rows) - len(shown)
    lines = [
        *table_lines(table, [False] * len(table[0])),
        *([f"and {more:,} more, in {LEADERBOARD_FILE}"] if more else []),
    ]
    explained = [job for row in sweep.rows for job in row.jobs if job.reason]
    for job in explained[:MAX_LEADERS]:
        lines += wrap_text(
            f"{point_label(job.swept) or job.name}: {job.status}: {one_line(job.reason)}", "", COMMAND_INDENT
        )
    return [
        *lines,
        *([f"and {len(explained) - MAX_LEADERS:,} more without a result"] if len(explained) > MAX_LEADERS else []),
        "",
    ]


def _rows(sweep: SweepResults, verdict: SweepVerdict) -> dict[str, str]:
    rows = {"jobs": sweep.status_counts()}
    if verdict.winner is not None and verdict.winner.score is not None:
        rows["winner" if not verdict.ties else "best"] = (
            f"{verdict.name}, {sweep.ranked_by} loss {loss_text(verdict.winner.score)}"
        )
    rows["certainty"] = verdict.certainty
    if verdict.job is not None and verdict.job.folder and verdict.job.model:
        rows["model"] = f"{display_path(sweep.folder / verdict.job.folder / 'model')} ({verdict.job.model})"
    return rows | {
        "page": display_path(sweep.folder / REPORT_FILE),
        "leaderboard": display_path(sweep.folder / LEADERBOARD_FILE),
    }
