"""Which point of a sweep won: leaderboard.csv and report.html in its folder, and the same table for a terminal."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, did_you_mean_path
from common.filesystem import write_atomic_file
from common.paths import REPO_ROOT
from runner.reporting import html
from runner.reporting.results import JobResult, MeanStd, ResultRow, SweepResults, number_in, read_sweep_results
from runner.tracking.console import format_seconds, strip_control

REPORT_FILE, LEADERBOARD_FILE = "report.html", "leaderboard.csv"
SPREADSHEET_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins so


@dataclass
class ReportConfig:
    sweep: str  # a sweep's folder or anything in it, or last


def print_leaderboard(folder: Path) -> list[ResultRow]:
    """The points of a sweep, the best first."""
    return read_sweep_results(folder).rows


def update_report(folder: Path) -> None:
    """Bring leaderboard.csv and report.html up to date; a reader finds the old file or the new one."""
    sweep = read_sweep_results(folder.absolute())
    write_atomic_file(folder / LEADERBOARD_FILE, leaderboard_csv(sweep).encode("utf-8", "backslashreplace"))
    write_atomic_file(folder / REPORT_FILE, html.sweep_page(sweep).encode("utf-8", "backslashreplace"))


def resolve_sweep(name: str) -> Path:
    """The sweep that is meant: its folder, anything inside it, or `last`."""
    if name == "last":
        sweeps = list((REPO_ROOT / "outputs" / "multirun").glob("*/*/sweep.json"))
        if not sweeps:
            raise UserError("there is no sweep yet", "sweep=last", "start one: python runner/train.py --multirun optimizer.lr=1e-4,5e-4")
        return max(sweeps, key=lambda sweep: sweep.stat().st_mtime).parent
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise UserError("there is no such file or folder", f"sweep={name}", did_you_mean_path(name))
    for place in (path, *path.parents):
        if (place / "sweep.json").is_file():
            return place
    raise UserError("there is no sweep here", f"sweep={name}", "give the folder of a sweep: it holds a sweep.json")


def leaderboard_text(folder: Path) -> str:
    """Aligned text: a line for each point, under it its jobs where it has several, then why some have no place, then what to type."""
    sweep = read_sweep_results(folder.absolute())
    seeds = ["seed"] * any("seed" in job.words for job in sweep.jobs)
    titles = ["", *sweep.words, *seeds, f"final {sweep.judged} loss", f"best {sweep.judged} loss", "at step", "tokens", "time", "tokens/s", "status"]
    lines, reasons = [titles], []
    for place, row in enumerate(sweep.rows, start=1):
        for number, line in enumerate([row, *map(sweep.row_of, row.members)]):
            which = f"{len(line.jobs)} seeds" if line.members else line.jobs[0].words.get("seed", "")
            words = [row.words.get(word, "") if number == 0 else "" for word in sweep.words]
            rank = "" if number else f"{place}." if row.ranked else "-"
            lines.append([rank, *words, *[which] * len(seeds), *_number_cells(line), html.status_text(line)])
        reasons += [
            f"{html.point_label(job.words) or job.name}: {job.status}{html.marked_value(job)}{_sentence(job)}" for job in row.jobs if job.reason or job.mark
        ]
    text = [f"sweep {sweep.folder}", f"{sweep.status}: {html.status_counts(sweep)}", "", *_aligned(lines)]
    text += ["", *reasons] if reasons else []
    text += ["", f"the best again{html.marked_value(sweep.best)}: {sweep.again(sweep.best)}"] if sweep.best else []
    text += ["", f"continue with: {sweep.continued}"] if sweep.unfinished else []
    return strip_control("\n".join(text))


def _sentence(job: JobResult) -> str:
    return f": {job.reason}" if job.reason else ""


def _number_cells(row: ResultRow) -> list[str]:
    return [
        html.mean_std_text(row.final),
        html.mean_std_text(row.best),
        html.count_text(row.best_step),
        html.count_text(row.tokens),
        "" if row.seconds is None else format_seconds(row.seconds),
        html.count_text(row.tokens_per_second),
    ]


def _aligned(lines: list[list[str]]) -> list[str]:
    lines = [[strip_control(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    first = len(lines[0]) - 7  # the numbers
    return [
        "  ".join(
            f"{cell:>{width}}" if first <= i < len(line) - 1 else f"{cell:<{width}}" for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def leaderboard_csv(sweep: SweepResults) -> str:
    """A line for each point (`row` is point), then for its jobs where it has several (`row` is job). Numbers are plain: seconds, no separators."""
    kind = sweep.judged
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    losses = [f"{which}_{kind}_loss{part}" for which in ("final", "best") for part in ("", "_deviation")]
    rest = [
        "best_step",
        "final_training_loss",
        "tokens",
        "seconds",
        "tokens_per_second",
        "status",
        "jobs",
        "completed",
        "diverged",
        "folder",
        "continued_with",
        "other_data_than",
        "reason",
    ]
    if kind == "training":  # it stands under `losses`
        rest.remove("final_training_loss")
    writer.writerow(map(_csv_safe, ["row", "rank", *sweep.words, "seed", *losses, *rest]))
    for place, row in enumerate(sweep.rows, start=1):
        lines = [("point", row, row.jobs[0].words.get("seed", "") if len(row.jobs) == 1 else "")]
        lines += [("job", sweep.row_of(job), job.words.get("seed", "")) for job in row.members]
        for name, line, seed in lines:
            rank = place if name == "point" and line.ranked else None
            words = [line.words.get(word, "") for word in sweep.words]
            writer.writerow(map(_csv_safe, [name, rank, *words, seed, *_mean_and_std(line.final), *_mean_and_std(line.best), *_remaining_cells(line, kind)]))
    return out.getvalue()


def _mean_and_std(spread: MeanStd | None) -> list[float | None]:
    return [spread.mean, spread.deviation] if spread else [None, None]


def _remaining_cells(row: ResultRow, kind: str) -> list[object]:
    completed = sum(job.status == "completed" for job in row.jobs)
    folder = row.jobs[0].name if len(row.jobs) == 1 else ""
    train = [row.train.mean if row.train else None] if kind == "validation" else []
    numbers = [row.best_step, *train, row.tokens, row.seconds, row.tokens_per_second]
    return [
        *numbers,
        row.status,
        len(row.jobs),
        completed,
        row.diverged,
        folder,
        *(html.over_jobs(row, text) for text in (_mark_manual, _mark_different_data, _reason)),
    ]


def _mark_manual(job: JobResult) -> str:
    return " ".join(job.by_hand)


def _mark_different_data(job: JobResult) -> str:
    return job.unlike


def _reason(job: JobResult) -> str:
    return job.reason


def _csv_safe(cell: object) -> str:
    """Numbers as they are; text that a spreadsheet would run as a formula begins with an apostrophe."""
    if cell is None:
        return ""
    if isinstance(cell, int | float):
        return f"{cell:.10g}"
    text = strip_control(str(cell))
    return f"'{text}" if text.lstrip(" ").startswith(SPREADSHEET_FORMULA) and number_in(text) is None else text
