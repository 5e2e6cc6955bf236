"""report.html of a run: one file without requests.

Its content security policy allows only the scripts of this folder, by their hash.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import strip_control
from common.filesystem import retry_disk, write_atomic_file
from runner.reporting.page_template import (
    CHART_LIBRARY,
    CHART_STYLE,
    CSS,
    RELOAD_SECONDS,
    json_block,
    load_template,
    short_number,
)
from runner.reporting.run_folders import tags_of
from runner.reporting.run_page.facts import (
    beginning,
    commands,
    error_line,
    error_parts,
    format_number,
    labels,
    notes,
    numbers,
)
from runner.reporting.run_page.read import RunReport, read_run_report
from runner.reporting.run_page.series import AXES, Series
from runner.tracking.console.numbers import format_size

if TYPE_CHECKING:
    import jinja2

PAGE_FILE = "report.html"
RUN_PAGE_FOLDER = Path(__file__).parent
# a page that is older than the time of 10 records, and than STALE_SECONDS, says that the run may have ended
STALE_RECORDS = 10
STALE_SECONDS = 120
SMOOTHED_RECORDS = 100  # curves with fewer points are not smoothed at first
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
DATA_FIELDS = (
    "file",
    "schema",
    "read",
    "kept",
    "split",
    "truncated",
    "dropped",
    "bad",
    "tokens",
    "loss_tokens",
    "lost_loss_tokens",
    "longest_conversation",
)
ATTEMPT_COLUMNS = ("attempt", "started", "ended", "outcome", "step", "exact", "error")


def write_run_page(folder: Path) -> Path:
    """Write report.html of the run in `folder` again, atomically; return its path.

    Raises OSError if the disk refuses.
    """
    path = folder / PAGE_FILE
    retry_disk(partial(write_atomic_file, path, run_page(read_run_report(folder)).encode("utf-8", "backslashreplace")))
    return path


def run_text(folder: Path) -> str:
    """Return status, numbers, notes and commands of a run as text for a terminal."""
    run = read_run_report(folder)
    lines = [
        f"run {folder}",
        " · ".join([run.status, *labels(run)]),
        *(f"{name:<22}{value}" for name, value in numbers(run)),
    ]
    lines += [f"error: {error_line(error)}"] if (error := error_parts(run)[0]) else []
    lines += [f"note: {note}" for note in notes(run)]
    for purpose, command in commands(run):
        lines += ["", f"{purpose}:", command]
    return strip_control("\n".join(lines))


def run_page(run: RunReport) -> str:
    charts = _charts(run)
    return _template().render(
        run=run,
        checkpoints=[(name, format_size(size)) for name, size in run.checkpoints],
        tags=tags_of(run.fields),
        facts={
            "labels": labels(run),
            "numbers": numbers(run),
            "notes": notes(run),
            "commands": commands(run),
            "error": error_parts(run),
        },
        beginning=beginning(run),
        charts=charts,
        smoothing=0.6 if len(run.series.train) >= SMOOTHED_RECORDS else 0,
        table=_newest(run.series.train),
        nonfinite=", ".join(f"{name} in {count} records" for name, count in run.series.nonfinite.items()),
        data_rows=_data_table(run.fields.get("data")),
        different=[setting for setting in run.settings if setting.differs],
        attempts=_table(
            ATTEMPT_COLUMNS, [{**attempt, "error": error_line(attempt.get("error") or "")} for attempt in run.attempts]
        ),
        environment=_environment(run, run.attempts),
        data_json=_data(run, charts),
        created=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    )


@cache
def _template() -> jinja2.Template:
    return load_template(
        RUN_PAGE_FOLDER / "run.jinja",
        (CHART_LIBRARY, RUN_PAGE_FOLDER / "run.js"),
        (CSS, RUN_PAGE_FOLDER / "run.css", CHART_STYLE),
    )


def _charts(run: RunReport) -> list[dict[str, Any]]:
    train, evaluation = run.series.train, run.series.eval
    present = [name for name in dict.fromkeys([*train.fields, *evaluation.fields]) if name not in NOT_CHARTED]
    listed = {name for _, names, _ in CHARTS for name in names}
    charts = [(title, [name for name in names if name in present], log) for title, names, log in CHARTS]
    charts += [(name.replace("_", " "), [name], False) for name in present if name not in listed]
    return [
        {
            "title": title,
            "fields": names,
            "log": log,
            "smooth": not EXACT_FIELDS.issuperset(names),
            "bytes": BYTE_FIELDS.issuperset(names),
        }
        | {"summary": _summary(train, evaluation, names)}
        for title, names, log in charts
        if names
    ]


def _summary(train: Series, evaluation: Series, names: Iterable[str]) -> str:
    """Return e.g. `3.0496, validation 2.6975`: the newest values."""
    values = [_value(name, train.last(name)) for name in names if name in train.columns]
    values += [f"validation {_value(name, evaluation.last(name))}" for name in names if name in evaluation.columns]
    return ", ".join(values)


def _value(name: str, value: float | None) -> str:
    return format_size(value) if name in BYTE_FIELDS and value is not None else format_number(value)


def _newest(train: Series) -> dict[str, list]:
    names = [*AXES, *train.fields]
    start = max(0, len(train) - TABLE_ROWS)
    return {
        "names": names,
        "rows": [
            [_value(name, train.columns[name][index]) for name in names] for index in reversed(range(start, len(train)))
        ],
    }


def _table(names: Iterable[str], rows: list[dict[str, Any]]) -> dict[str, list] | None:
    return (
        {
            "names": [name.replace("_", " ") for name in names],
            "rows": [[_cell(row.get(name)) for name in names] for row in rows],
        }
        if rows
        else None
    )


def _data_table(entries: Any) -> dict[str, list] | None:
    """Return the table of the data files; `reasons` has lines for each row: `bad 12: no text (first: rows.jsonl:3)`."""
    files = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    table = _table(
        DATA_FIELDS,
        [{**file, **{kind: sum(found.values()) for kind, found in _counts(file).items()}} for file in files],
    )
    return table and {**table, "reasons": [_reasons(file) for file in files]}


def _counts(file: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the rows of a data file that are not used: kind -> reason -> rows."""
    found = {kind: file.get(kind) for kind in ("dropped", "bad")}
    return {
        kind: {str(reason): rows for reason, rows in value.items() if type(rows) is int}
        for kind, value in found.items()
        if isinstance(value, Mapping)
    }


def _reasons(file: Mapping[str, Any]) -> list[str]:
    first = file.get("first_seen")
    rows_seen = (
        {reason: f" (first: {Path(str(row)).name})" for reason, row in first.items()}
        if isinstance(first, Mapping)
        else {}
    )
    return [
        f"{kind} {rows:,}: {reason}{rows_seen.get(reason, '')}"
        for kind, found in _counts(file).items()
        for reason, rows in found.items()
    ]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_cell(inner)}" for name, inner in value.items()) or "0"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def _environment(run: RunReport, attempts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return what the newest attempt ran on: host, processor, libraries, commit."""
    newest = attempts[-1] if attempts else {}
    parts = {
        "host": {"host": run.fields.get("host")},
        "": newest.get("environment"),
        "versions": newest.get("versions"),
        "code": newest.get("code"),
    }
    return [
        (f"{part}.{name}" if part in ("versions", "code") else str(name), _cell(value))
        for part, facts in parts.items()
        if isinstance(facts, dict)
        for name, value in facts.items()
        if value is not None
    ]


def _data(run: RunReport, charts: list[dict[str, Any]]) -> Any:
    """Return the numbers of the charts as JSON for the script of the page."""
    columns = {
        kind: {name: [short_number(value) for value in column] for name, column in series.columns.items()}
        for kind, series in vars(run.series).items()
        if isinstance(series, Series)
    }
    charts = [{name: chart[name] for name in ("fields", "log", "smooth", "bytes")} for chart in charts]
    live = (
        {"reload": RELOAD_SECONDS, "written": int(time.time()), "stale": _stale_seconds(run)}
        if run.is_running
        else {"reload": None}
    )
    return json_block({**columns, "charts": charts, "attempts": run.series.attempt_starts, **live})


def _stale_seconds(run: RunReport) -> int:
    """Return the age from which on the page of a run that trains should have been written again."""
    seconds = run.series.train.columns.get("seconds", [])
    between = ((seconds[-1] or 0) - (seconds[0] or 0)) / (run.series.train.records - 1) if len(seconds) > 1 else 0
    return int(max(STALE_SECONDS, STALE_RECORDS * between))
