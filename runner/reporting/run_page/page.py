"""report.html of a run: one file without requests. Its content security policy allows only the scripts of this folder, by their hash."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import strip_control
from common.filesystem import retry_disk, write_atomic_file
from common.paths import REPO_ROOT
from runner.reporting.page_template import CSS, page_environment
from runner.reporting.run_page.read import RunReport, read_run_report
from runner.reporting.run_page.series import AXES, Series
from runner.run_dir.saved_config import REPO_INTERPOLATION
from runner.tracking.console import format_seconds
from runner.tracking.next_commands import STAGE_METRICS, next_commands

if TYPE_CHECKING:
    import jinja2

PAGE_FILE = "report.html"
FOLDER = Path(__file__).parent
SCRIPTS = (FOLDER / "vendor" / "uPlot.iife.min.js", FOLDER / "run.js")
STYLES = (CSS, FOLDER / "run.css", FOLDER / "vendor" / "uPlot.min.css")
RELOAD_SECONDS = 5  # of the page of a run that trains
TABLE_ROWS = 20
EXACT_FIELDS = {"lr", "data_wait", "save_stall", "scale", "overflows", "skipped_steps"}  # drawn without smoothing
# Title, fields on one plot, and whether the y axis may be logarithmic. Fields that are not listed have a plot of their own.
CHARTS = (
    ("Loss", ("loss",), True),
    ("Reward accuracy", ("reward_accuracy",), False),
    ("Reward margin", ("reward_margin",), False),
    ("Rewards", ("reward_chosen", "reward_rejected"), False),
    ("Learning rate", ("lr",), True),
    ("Gradient norm", ("grad_norm",), True),
    ("Tokens per second", ("tokens_per_second",), False),
    ("Share of time that waits for data", ("data_wait",), False),
    ("Seconds that saves took", ("save_stall",), False),
)
NOT_CHARTED = {"perplexity"}  # the exponential of a loss that is drawn
DATA_FIELDS = ("file", "schema", "read", "kept", "split", "truncated", "dropped", "bad", "tokens", "loss_tokens", "lost_loss_tokens")
ATTEMPT_COLUMNS = ("attempt", "started", "ended", "outcome", "step", "exact", "error")


def write_run_page(folder: Path) -> Path:
    """Write report.html of the run in `folder` again, atomically; return its path. Raises OSError if the disk refuses."""
    path = folder / PAGE_FILE
    retry_disk(partial(write_atomic_file, path, run_page(read_run_report(folder)).encode("utf-8", "backslashreplace")))
    return path


def run_text(folder: Path) -> str:
    """Return status, numbers, notes and commands of a run as text for a terminal."""
    run = read_run_report(folder)
    lines = [f"run {folder}", " · ".join([run.status, *_labels(run)]), *(f"{name:<22}{value}" for name, value in _numbers(run))]
    lines += [f"note: {note}" for note in _notes(run)]
    for title, command in _commands(run):
        lines += ["", f"{title}:", command]
    return strip_control("\n".join(lines))


def run_page(run: RunReport) -> str:
    changed = [(key, value) for key, value, is_set in run.settings if is_set]
    attempts = [attempt for attempt in run.fields.get("attempts") or [] if isinstance(attempt, dict)]
    environment = attempts[-1].get("environment") if attempts else None
    return _template().render(
        run=_with_sizes(run),
        facts={"labels": _labels(run), "numbers": _numbers(run), "notes": _notes(run), "commands": _commands(run)},
        charts=_charts(run),
        table=_newest(run.series.train),
        nonfinite=", ".join(f"{name} in {count} records" for name, count in run.series.nonfinite.items()),
        data_rows=_table(DATA_FIELDS, run.fields.get("data")),
        changed_settings=changed,
        attempts=_table(ATTEMPT_COLUMNS, attempts),
        environment=[(str(name), _cell(value)) for name, value in environment.items()] if isinstance(environment, dict) else [],
        data_json=_data(run),
        created=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    )


@cache
def _template() -> jinja2.Template:
    from markupsafe import Markup

    scripts = [path.read_text(encoding="utf-8") for path in SCRIPTS]
    environment = page_environment()
    environment.globals |= {
        "scripts": [Markup(script) for script in scripts],
        "script_hashes": Markup(" ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)),
        "css": Markup("\n".join(path.read_text(encoding="utf-8") for path in STYLES)),
    }
    return environment.from_string((FOLDER / "run.jinja").read_text(encoding="utf-8"))


def _with_sizes(run: RunReport) -> Any:
    """Return `run` with the bytes of checkpoints as text."""
    return {
        **{name: getattr(run, name) for name in ("name", "status", "folder", "fields", "is_running", "samples", "evaluations", "settings", "overrides")},
        "step": run.step,
        "total_steps": run.total_steps,
        "checkpoints": [(name, f"{size / 2**20:,.1f} MiB") for name, size in run.checkpoints],
    }


def _labels(run: RunReport) -> list[str]:
    stage, start = run.fields.get("stage"), run.fields.get("init_from")
    return [str(text) for text in (stage, f"from {start}" if start and start != "scratch" else start and "from random weights") if text]


def _numbers(run: RunReport) -> list[tuple[str, str]]:
    train, evaluation = run.series.train, run.series.eval
    numbers = [("step", f"{run.step:,} of {run.total_steps:,}" if run.total_steps else f"{run.step:,}"), ("training loss", _number(train.last("loss")))]
    if len(evaluation):
        lowest = evaluation.lowest("loss")
        numbers += [("validation loss", _number(evaluation.last("loss")))]
        numbers += [("best validation loss", f"{lowest[0]:.4f} at step {lowest[1]:,.0f}")] if lowest else []
    numbers += [("tokens", f"{train.last('tokens') or 0:,.0f}"), ("tokens per second", _number(train.last("tokens_per_second")))]
    seconds = train.last("seconds")
    numbers += [("training time", format_seconds(seconds))] if seconds is not None else []
    numbers += [("remaining", format_seconds(remaining))] if run.is_running and (remaining := _remaining(run)) is not None else []
    return numbers


def _remaining(run: RunReport) -> float | None:
    """Return the seconds to the last step at the pace of the newest half of the logged steps."""
    steps, seconds = run.series.train.columns.get("step", []), run.series.train.columns.get("seconds", [])
    if run.total_steps is None or len(steps) < 3:
        return None
    middle = len(steps) // 2
    done, took = (steps[-1] or 0) - (steps[middle] or 0), (seconds[-1] or 0) - (seconds[middle] or 0)
    return took / done * max(0, run.total_steps - (steps[-1] or 0)) if done > 0 else None


def _notes(run: RunReport) -> list[str]:
    """Return what a reader should know before the curves: overfitting, gaps in the data, resumes that are not exact, warnings of the log."""
    fields, notes = run.fields, []
    lowest, newest = run.series.eval.lowest("loss"), run.series.eval.last("loss")
    last_step = (run.series.eval.columns.get("step") or [0])[-1] or 0
    if lowest and newest is not None and newest > lowest[0] * 1.02 and last_step > lowest[1]:
        kept = fields.get("export") if isinstance(fields.get("export"), dict) else {}
        weights = "; model/ has the weights of the best evaluation" if kept and kept.get("weights") == "best" else ""
        notes.append(f"overfitting: the validation loss was lowest at step {lowest[1]:,.0f} ({lowest[0]:.4f}) and is {newest:.4f} now{weights}")
    for entry in fields.get("data") or []:
        if isinstance(entry, dict) and isinstance(lost := entry.get("lost_loss_tokens"), int) and lost:
            whole = lost + (entry.get("loss_tokens") or 0)
            notes.append(
                f"{Path(str(entry.get('file'))).name}: truncation removed {lost:,} of {whole:,} tokens with loss ({lost / whole:.0%}); raise data.max_length"
            )
    notes += [f"not bitwise equal to a run without interruption: {reason}" for reason in fields.get("inexact_because") or []]
    notes += [str(message) for message in fields.get("recovered") or []]
    notes += [str(fields["degraded"])] if fields.get("degraded") else []
    return [*notes, *run.warnings]


def _commands(run: RunReport) -> list[tuple[str, str]]:
    if run.is_unfinished:
        return [("Continue it", run.resume_command)]
    settings = {key: value for key, value, _ in run.settings}
    if run.status == "completed" and (data_format := settings.get("stage.data_format")) in STAGE_METRICS:
        source = settings.get("data.path", "").replace(REPO_INTERPOLATION, str(REPO_ROOT))
        data_path = Path(source) if source and source != "null" and not source.startswith(("[", "{")) else None
        return [("Next", next_commands(run.folder, str(run.fields.get("stage")), data_format, data_path, None))]
    return []


def _charts(run: RunReport) -> list[dict[str, Any]]:
    train, evaluation = run.series.train, run.series.eval
    present = [name for name in dict.fromkeys([*train.fields, *evaluation.fields]) if name not in NOT_CHARTED]
    listed = {name for _, names, _ in CHARTS for name in names}
    charts = [(title, [name for name in names if name in present], log) for title, names, log in CHARTS]
    charts += [(name.replace("_", " "), [name], False) for name in present if name not in listed]
    return [
        {"title": title, "fields": names, "log": log, "smooth": not EXACT_FIELDS.issuperset(names), "summary": _summary(train, evaluation, names)}
        for title, names, log in charts
        if names
    ]


def _summary(train: Series, evaluation: Series, names: Iterable[str]) -> str:
    """Return e.g. `3.0496, validation 2.6975`: the newest values."""
    values = [_number(train.last(name)) for name in names if name in train.columns]
    values += [f"validation {_number(evaluation.last(name))}" for name in names if name in evaluation.columns]
    return ", ".join(values)


def _newest(train: Series) -> dict[str, list]:
    names = [*AXES, *train.fields]
    start = max(0, len(train) - TABLE_ROWS)
    return {"names": names, "rows": [[_number(train.columns[name][index]) for name in names] for index in reversed(range(start, len(train)))]}


def _table(names: Iterable[str], entries: Any) -> dict[str, list] | None:
    rows = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    return {"names": [name.replace("_", " ") for name in names], "rows": [[_cell(row.get(name)) for name in names] for row in rows]} if rows else None


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_cell(inner)}" for name, inner in value.items()) or "0"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def _number(value: float | None) -> str:
    """Return e.g. 2.6975, 2,597, 5.031e-04; a dash for a value that is missing or not finite."""
    if value is None:
        return "–"
    if 1e3 <= abs(value) < 1e15 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 else f"{value:.3e}"


def _data(run: RunReport) -> Any:
    """Return the numbers of the charts as JSON that cannot end its <script> element."""
    from markupsafe import Markup

    columns = {
        kind: {name: [_rounded(value) for value in column] for name, column in series.columns.items()}
        for kind, series in vars(run.series).items()
        if isinstance(series, Series)
    }
    content = {**columns, "attempts": run.series.attempt_starts, "reload": RELOAD_SECONDS if run.is_running else None}
    return Markup(strip_control(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")))


def _rounded(value: float | None) -> float | int | None:
    if value is None:
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.7g}")
