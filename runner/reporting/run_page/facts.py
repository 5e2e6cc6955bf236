"""What the page of a run says as text: its numbers, what a reader should know before the curves, and the commands to go
on.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.paths import REPO_ROOT
from runner.reporting.run_page.read import RunReport
from runner.run_dir.best_job import parse_number
from runner.run_dir.saved_config import REPO_INTERPOLATION
from runner.tracking.console.numbers import format_seconds, format_size, remaining_seconds
from runner.tracking.run_end import STAGE_METRICS, commands_after_divergence, commands_to_continue, next_commands

ERROR_LINES, ERROR_CHARS = 21, 1600  # of a recorded error that are not folded
ERROR_LINE_CHARS = 200  # of an error that is shown as one line
# in train.log: it says the same as the note, and which length would do
TRUNCATION_WARNING = re.compile(r"data\.max_length=\d+ cuts off ")


def labels(run: RunReport) -> list[str]:
    """Return the stage and what the run began from."""
    stage, start = run.fields.get("stage"), run.fields.get("init_from")
    return [
        str(text)
        for text in (stage, f"from {start}" if start and start != "scratch" else start and "from random weights")
        if text
    ]


def numbers(run: RunReport) -> list[tuple[str, str]]:
    """Return (name, value) of the newest numbers."""
    train, evaluation = run.series.train, run.series.eval
    found = [
        ("step", f"{run.step:,} of {run.total_steps:,}" if run.total_steps else f"{run.step:,}"),
        ("training loss", format_number(train.last("loss"))),
    ]
    if len(evaluation):
        lowest = evaluation.lowest("loss")
        found += [("validation loss", format_number(evaluation.last("loss")))]
        found += [("best validation loss", f"{lowest[0]:.4f} at step {lowest[1]:,.0f}")] if lowest else []
    found += [
        ("tokens", f"{train.last('tokens') or 0:,.0f}"),
        ("mean tokens/s", format_number(run.series.tokens_per_second)),
    ]
    if (memory := run.series.peak_memory) is not None:
        found += [("peak memory", format_size(int(memory)))]
    if (seconds := train.last("seconds")) is not None:
        found += [("training time", format_seconds(seconds))]
    if run.is_running and (remaining := _remaining(run)) is not None:
        found += [("remaining", format_seconds(remaining))]
    return found


def _remaining(run: RunReport) -> float | None:
    """Return the seconds to the last step, as the console prints them."""
    first, last = run.series.attempt_first, run.series.attempt_last
    return remaining_seconds(first, last, run.total_steps) if run.total_steps and first and last else None


def error_parts(run: RunReport) -> tuple[str, str]:
    """Return the beginning of the recorded error, and the rest; both empty where there is none, or an attempt goes on."""
    error = "" if run.is_running else str(run.fields.get("error") or "")
    shown = "\n".join(error.split("\n")[:ERROR_LINES])[:ERROR_CHARS]
    return shown, error[len(shown) :].removeprefix("\n")


def error_line(error: object) -> str:
    """Return the first line of a recorded error, cut to ERROR_LINE_CHARS."""
    lines = str(error).strip().split("\n")
    return f"{lines[0][:ERROR_LINE_CHARS]}{' ...' if len(lines) > 1 or len(lines[0]) > ERROR_LINE_CHARS else ''}"


def beginning(run: RunReport) -> str:
    """Return when the run began, and its newest attempt: `started` of run.json is that of the newest one."""
    newest = str(run.fields.get("started") or "at an unknown time")
    if len(run.attempts) < 2 or not run.attempts[0].get("started"):
        return f"started {newest}"
    number = run.attempts[0].get("attempt")
    first = "started" if number in (1, None) else f"attempt {number} began"  # the first of many attempts are not kept
    return f"{first} {run.attempts[0]['started']} · attempt {run.attempts[-1].get('attempt')} began {newest}"


def notes(run: RunReport) -> list[str]:
    """Return what a reader should know before the curves: overfitting, gaps in the data, resumes that are not exact,
    warnings of the log.
    """
    fields = run.fields
    found = [*_overfitting(run)]
    found += (
        [] if any(TRUNCATION_WARNING.match(warning) for warning in run.warnings) else _truncation(fields.get("data"))
    )
    found += [
        f"not bitwise equal to a run without interruption: {reason}" for reason in _texts(fields.get("inexact_because"))
    ]
    found += [f"a resume changed {change}" for change in _texts(fields.get("changed"))]
    found += _texts(fields.get("recovered"))
    found += [str(fields["degraded"])] if fields.get("degraded") else []
    return [*found, *run.warnings]


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _overfitting(run: RunReport) -> Iterator[str]:
    if run.series.overfitting:
        lowest, newest = run.series.overfitting
        export = run.fields.get("export")
        weights = (
            "; model/ has the weights of the best evaluation"
            if isinstance(export, dict) and export.get("weights") == "best"
            else ""
        )
        yield f"overfitting: the validation loss was lowest at step {lowest.step:,} ({lowest.loss:.4f}) and is {newest.loss:.4f} now{weights}"


def _truncation(files: Any) -> Iterator[str]:
    for entry in files if isinstance(files, list) else ():
        if not isinstance(entry, dict):
            continue
        lost, kept = entry.get("lost_loss_tokens"), entry.get("loss_tokens")
        if isinstance(lost, int) and lost > 0:
            whole = lost + (kept if isinstance(kept, int) and kept > 0 else 0)
            yield f"{Path(str(entry.get('file'))).name}: truncation removed {lost:,} of {whole:,} tokens with loss ({lost / whole:.0%}); raise data.max_length"


def commands(run: RunReport) -> list[tuple[str, str]]:
    """Return (purpose, shell command) of what to type next."""
    if run.is_running:
        return []
    settings = {setting.key: setting.value for setting in run.settings}
    if run.status == "completed":
        data_format = settings.get("stage.data_format")
        if data_format not in STAGE_METRICS:
            return []
        path = settings.get("data.path", "").replace(REPO_INTERPOLATION, str(REPO_ROOT))
        data_path = Path(path) if path and path != "null" and not path.startswith(("[", "{")) else None
        family = settings.get("model.family", "")
        found = next_commands(
            run.folder, str(run.fields.get("stage")), str(data_format), data_path, _longer(run, settings), family
        )
    elif run.status == "diverged":
        lr, can_resume = (
            parse_number(settings.get("optimizer.lr", "")),
            bool(run.checkpoints) and (run.total_steps is None or run.step < run.total_steps),
        )
        found = commands_after_divergence(run.folder, lr, run.overrides, can_resume) if lr else ()
    elif run.status in ("interrupted", "failed"):
        found = commands_to_continue(run.folder, bool(run.checkpoints))
    else:
        return []
    return [(command.purpose, shlex.join(command.arguments)) for command in found]


def _longer(run: RunReport, settings: dict[str, str]) -> str | None:
    """Return the override that doubles the training, None where the run ended before its last step."""
    if run.total_steps is not None and run.step < run.total_steps:
        return None
    for key in ("train.max_steps", "train.epochs"):
        value = settings.get(key, "")
        if value.isdecimal() and 0 < int(value) < 1 << 53:
            return f"{key}={2 * int(value)}"
    return None


def format_number(value: float | None) -> str:
    """Return e.g. 2.6975, 2,597, 5.031e-04; a dash for a value that is missing or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    if 1e3 <= abs(value) < 1e15 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 else f"{value:.3e}"
