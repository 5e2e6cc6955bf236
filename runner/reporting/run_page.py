"""report.html of a run: charts, samples, data, settings, checkpoints and attempts in one file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.reporting.metrics import AXES, Curve
from runner.reporting.page_kit import RELOAD_SECONDS, render, short_number, write_text
from runner.reporting.run_facts import RunReport, error_line, format_number
from runner.reporting.runs import REPORT_FILE, as_dict
from runner.tracking.lines import format_size

# a page that is older than the time of 10 records, and than STALE_SECONDS, says that the run may have ended
STALE_RECORDS = 10
STALE_SECONDS = 120
TABLE_ROWS = 20
# drawn without smoothing
EXACT_FIELDS = {"lr", "data_wait", "save_stall", "peak_memory", "scale", "overflows", "skipped_steps"}
# Title, fields on one plot, and whether the y axis may be logarithmic. Fields that are not listed have a plot of their
# own.
CHARTS = (
    ("Loss", ("loss",), True),
    ("Reward accuracy", ("reward_accuracy",), False),
    ("Reward margin", ("reward_margin",), False),
    ("Rewards", ("reward_chosen", "reward_rejected"), False),
    ("Learning rate", ("lr",), True),
    ("Gradient norm", ("grad_norm",), True),
    ("Tokens per second", ("tokens_per_second",), False),
    ("Peak memory of each attempt", ("peak_memory",), False),
    ("Share of time that waits for data", ("data_wait",), False),
    ("Seconds that training waited for saves", ("save_stall",), False),
)
BYTE_FIELDS = {"peak_memory"}
NOT_CHARTED = {"perplexity"}  # the exponential of a loss that is drawn


def write_run_page(folder: Path) -> Path:
    """Write report.html of the run in `folder` again, atomically; return its path.

    Raises OSError if the disk refuses.
    """
    path = folder / REPORT_FILE
    write_text(path, run_page(RunReport.read(folder)))
    return path


def run_page(run: RunReport) -> str:
    charts = _charts(run)
    train = run.metrics.train
    return render(
        "run",
        _data(run, charts),
        run=run,
        notes=[*run.notes],
        charts=charts,
        train=train,
        names=[*AXES, *train.fields],
        newest=range(len(train) - 1, max(0, len(train) - TABLE_ROWS) - 1, -1),
        value=_value,
        cell=_cell,
        files=_data_files(run.fields["data"]),
        attempts=[{**attempt, "error": error_line(attempt.get("error") or "")} for attempt in run.fields["attempts"]],
        environment=_environment(run),
    )


def _charts(run: RunReport) -> list[dict[str, Any]]:
    curves = (run.metrics.train, run.metrics.eval)
    present = dict.fromkeys(name for curve in curves for name in curve.fields)
    # loss/law, of the validation set law, is on the plot of the loss
    plots = {name: base if (base := name.rpartition("/")[0]) in present else name for name in present}
    listed = {name for _, names, _ in CHARTS for name in names} | NOT_CHARTED
    own = ((name.replace("_", " "), (name,), False) for name in present if plots[name] not in listed)
    return [
        {
            "title": title,
            "fields": names,
            "log": log,
            "smooth": not EXACT_FIELDS.issuperset(names),
            "bytes": BYTE_FIELDS.issuperset(names),
            # e.g. `3.0496, validation 2.6975`: the newest values
            "summary": ", ".join(
                " ".join(filter(None, (prefix, name.removeprefix(plots[name])[1:], _value(name, curve.last(name)))))
                for prefix, curve in zip(("", "validation"), curves, strict=True)
                for name in names
                if name in curve.columns
            ),
        }
        for title, listed_names, log in (*CHARTS, *own)
        if (names := [name for each in listed_names for name in present if plots[name] == each])
    ]


def _value(name: str, value: float | None) -> str:
    return format_size(value) if name in BYTE_FIELDS and value is not None else format_number(value)


def _data_files(files: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the facts of each data file, and why rows are not used: `bad 12: no text (first: rows.jsonl:3)`."""
    found = []
    for file in files:
        first = {reason: f" (first: {Path(str(row)).name})" for reason, row in as_dict(file.get("first_seen")).items()}
        facts, reasons = {**file}, []
        for kind in ("dropped", "bad"):
            if isinstance(rows := file.get(kind), Mapping):
                counts = {str(reason): count for reason, count in rows.items() if type(count) is int}
                facts[kind] = sum(counts.values())
                reasons += [f"{kind} {count:,}: {reason}{first.get(reason, '')}" for reason, count in counts.items()]
        found.append((facts, reasons))
    return found


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_cell(inner)}" for name, inner in value.items()) or "0"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def _environment(run: RunReport) -> dict[str, Any]:
    """Return what the newest attempt ran on: host, processor, libraries, commit."""
    newest = run.fields["attempts"][-1] if run.fields["attempts"] else {}
    facts = {"host": run.fields["host"] or None, **as_dict(newest.get("environment"))}
    for part in ("versions", "code"):
        facts |= {f"{part}.{name}": value for name, value in as_dict(newest.get(part)).items()}
    return {name: value for name, value in facts.items() if value is not None}


def _data(run: RunReport, charts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers that the script of the page draws."""
    kinds = {
        kind: {name: [short_number(value) for value in column] for name, column in curve.columns.items()}
        for kind, curve in (("train", run.metrics.train), ("eval", run.metrics.eval))
    }
    live = {"written": int(time.time()), "stale": _stale_seconds(run.metrics.train)} if run.is_running else {}
    reload = RELOAD_SECONDS if run.is_running else None
    return {**kinds, "charts": charts, "attempts": run.metrics.attempt_starts, "reload": reload, **live}


def _stale_seconds(train: Curve) -> int:
    """Return the age from which on the page of a run that trains should have been written again."""
    seconds = train.columns.get("seconds", [])
    between = ((seconds[-1] or 0) - (seconds[0] or 0)) / (train.records - 1) if len(seconds) > 1 else 0
    return int(max(STALE_SECONDS, STALE_RECORDS * between))
