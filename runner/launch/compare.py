"""Which point of a sweep won: leaderboard.csv and report.html in its folder, and the same table for a terminal."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from runner.engine.console import clean, clock
from runner.engine.disk import replace
from runner.launch import page
from runner.launch.points import Job, Row, Spread, Sweep, number_in, read
from runner.launch.refusal import nearest_path
from runner.launch.words import ROOT

PAGE, LEADERBOARD = "report.html", "leaderboard.csv"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins so


@dataclass
class ReportConfig:
    sweep: str  # a sweep's folder or anything in it, or last


def table(folder: Path) -> list[Row]:
    """The points of a sweep, the best first."""
    return read(folder).rows


def update(folder: Path) -> None:
    """Bring leaderboard.csv and report.html up to date; a reader finds the old file or the new one."""
    sweep = read(folder.absolute())
    replace(folder / LEADERBOARD, as_csv(sweep).encode("utf-8", "backslashreplace"))
    replace(folder / PAGE, page.page(sweep).encode("utf-8", "backslashreplace"))


def find(name: str) -> Path:
    """The sweep that is meant: its folder, anything inside it, or `last`."""
    if name == "last":
        sweeps = list((ROOT / "outputs" / "multirun").glob("*/*/sweep.json"))
        if not sweeps:
            raise ValueError("there is no sweep yet", "sweep=last", "start one: python runner/train.py --multirun optimizer.lr=1e-4,5e-4")
        return max(sweeps, key=lambda sweep: sweep.stat().st_mtime).parent
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise ValueError("there is no such file or folder", f"sweep={name}", nearest_path(name))
    for place in (path, *path.parents):
        if (place / "sweep.json").is_file():
            return place
    raise ValueError("there is no sweep here", f"sweep={name}", "give the folder of a sweep: it holds a sweep.json")


def terminal(folder: Path) -> str:
    """Aligned text: a line for each point, under it its jobs where it has several, then why some have no place, then what to type."""
    sweep = read(folder.absolute())
    seeds = ["seed"] * any("seed" in job.words for job in sweep.jobs)
    titles = ["", *sweep.words, *seeds, f"final {sweep.judged} loss", f"best {sweep.judged} loss", "at step", "tokens", "time", "tokens/s", "status"]
    lines, reasons = [titles], []
    for place, row in enumerate(sweep.rows, start=1):
        for number, line in enumerate([row, *map(sweep.row_of, row.members)]):
            which = f"{len(line.jobs)} seeds" if line.members else line.jobs[0].words.get("seed", "")
            words = [row.words.get(word, "") if number == 0 else "" for word in sweep.words]
            rank = "" if number else f"{place}." if row.ranked else "-"
            lines.append([rank, *words, *[which] * len(seeds), *_numbers(line), page.status(line)])
        reasons += [f"{page.named(job.words) or job.name}: {job.status}{page.marked(job)}{_told(job)}" for job in row.jobs if job.reason or job.mark]
    text = [f"sweep {sweep.folder}", f"{sweep.status}: {page.counts(sweep)}", "", *_aligned(lines)]
    text += ["", *reasons] if reasons else []
    text += ["", f"the best again{page.marked(sweep.best)}: {sweep.again(sweep.best)}"] if sweep.best else []
    text += ["", f"continue with: {sweep.continued}"] if sweep.unfinished else []
    return clean("\n".join(text))


def _told(job: Job) -> str:
    return f": {job.reason}" if job.reason else ""


def _numbers(row: Row) -> list[str]:
    return [
        page.spread(row.final),
        page.spread(row.best),
        page.count(row.best_step),
        page.count(row.tokens),
        "" if row.seconds is None else clock(row.seconds),
        page.count(row.tokens_per_second),
    ]


def _aligned(lines: list[list[str]]) -> list[str]:
    lines = [[clean(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    first = len(lines[0]) - 7  # the numbers
    return [
        "  ".join(
            f"{cell:>{width}}" if first <= i < len(line) - 1 else f"{cell:<{width}}" for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def as_csv(sweep: Sweep) -> str:
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
    writer.writerow(map(_safe, ["row", "rank", *sweep.words, "seed", *losses, *rest]))
    for place, row in enumerate(sweep.rows, start=1):
        lines = [("point", row, row.jobs[0].words.get("seed", "") if len(row.jobs) == 1 else "")]
        lines += [("job", sweep.row_of(job), job.words.get("seed", "")) for job in row.members]
        for name, line, seed in lines:
            rank = place if name == "point" and line.ranked else None
            words = [line.words.get(word, "") for word in sweep.words]
            writer.writerow(map(_safe, [name, rank, *words, seed, *_pair(line.final), *_pair(line.best), *_rest(line, kind)]))
    return out.getvalue()


def _pair(spread: Spread | None) -> list[float | None]:
    return [spread.mean, spread.deviation] if spread else [None, None]


def _rest(row: Row, kind: str) -> list[object]:
    completed = sum(job.status == "completed" for job in row.jobs)
    folder = row.jobs[0].name if len(row.jobs) == 1 else ""
    train = [row.train.mean if row.train else None] if kind == "validation" else []
    numbers = [row.best_step, *train, row.tokens, row.seconds, row.tokens_per_second]
    return [*numbers, row.status, len(row.jobs), completed, row.diverged, folder, *(page.of_jobs(row, text) for text in (_by_hand, _unlike, _reason))]


def _by_hand(job: Job) -> str:
    return " ".join(job.by_hand)


def _unlike(job: Job) -> str:
    return job.unlike


def _reason(job: Job) -> str:
    return job.reason


def _safe(cell: object) -> str:
    """Numbers as they are; text that a spreadsheet would run as a formula begins with an apostrophe."""
    if cell is None:
        return ""
    if isinstance(cell, int | float):
        return f"{cell:.10g}"
    text = clean(str(cell))
    return f"'{text}" if text.lstrip(" ").startswith(FORMULA) and number_in(text) is None else text
