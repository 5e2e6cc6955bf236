"""One run as its page shows it, read from its directory; and its text: numbers, notes, what a reader should know
before the curves, and the commands to go on.

A missing or damaged file leaves its part out and never raises.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from common.errors import strip_control
from common.guarded_files import last_lines
from common.paths import CONF_DIR, REPO_ROOT
from common.settings import as_typed, flat_settings
from runner.checkpoint.atomic_dir import step_names
from runner.config.compose import compose_values
from runner.reporting.metrics import MAX_METRICS_BYTES, Metrics, count_number, iter_records, metrics_of
from runner.reporting.runs import Run, as_dict, longer_override
from runner.run_dir.best_job import parse_number
from runner.run_dir.saved_config import REPO_INTERPOLATION
from runner.tracking.lines import format_seconds, format_size, remaining_seconds
from runner.tracking.progress import folder_bytes
from runner.tracking.run_end import STAGE_METRICS, commands_after_divergence, commands_to_continue, next_commands

# steps and prompts that are shown; characters of an answer
MAX_SAMPLE_STEPS, MAX_SAMPLES, MAX_SAMPLE_CHARS = 30, 8, 2000
MAX_EVALUATIONS = 1000  # of evaluate.py, the newest
MAX_WARNINGS = 40  # different ones, the newest
LOG_TAIL_BYTES = 1 << 20  # read from the end of train.log
WARNING = re.compile(r"^warning: (.+)$", re.MULTILINE)
ERROR_LINES, ERROR_CHARS = 21, 1600  # of a recorded error that are not folded
ERROR_LINE_CHARS = 200  # of an error that is shown as one line
# in train.log: it says the same as the note, and which length would do
TRUNCATION_WARNING = re.compile(r"data\.max_length=\d+ cuts off ")
INTERPOLATED = "${workspace:}"


@dataclass(frozen=True)
class Setting:
    key: str
    value: str
    default: str | None  # of a run of the same stage; None: it has no such setting

    @property
    def differs(self) -> bool:
        if self.default is not None and self.default.startswith(INTERPOLATED):  # a folder of this machine
            return not self.value.endswith(self.default.partition("}")[2])
        return self.value != self.default


class RunReport(Run):
    """What the page of a run shows."""

    @cached_property
    def metrics(self) -> Metrics:
        """All fields, with the points of a page."""
        return metrics_of(iter_records(self.folder / "metrics.jsonl"))

    @cached_property
    def samples(self) -> dict[str, list[tuple[int, str]]]:
        """The newest MAX_SAMPLE_STEPS (step, answer) of each of the MAX_SAMPLES prompts that were answered last, cut to
        MAX_SAMPLE_CHARS.
        """
        answers: dict[str, deque[tuple[int, str]]] = {}
        for record in iter_records(self.folder / "samples.jsonl"):
            step, prompt, answer = count_number(record.get("step")), record.get("prompt"), record.get("answer")
            if step is not None and isinstance(prompt, str) and isinstance(answer, str):
                answers[prompt] = answers.pop(prompt, deque(maxlen=MAX_SAMPLE_STEPS))  # the newest is the last
                answers[prompt].append((int(step), answer[:MAX_SAMPLE_CHARS]))
                if len(answers) > MAX_SAMPLES:
                    del answers[next(iter(answers))]
        return {prompt: [*found] for prompt, found in answers.items()}

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The newest records of evaluations.jsonl."""
        return [*deque(iter_records(self.folder / "evaluations.jsonl"), maxlen=MAX_EVALUATIONS)]

    @cached_property
    def compared_settings(self) -> list[Setting]:
        """The settings beside those of a run of the same stage without overrides."""
        if not self.settings:
            return []
        default = stage_defaults(self.settings.get("stage.name", ""))
        return [Setting(key, value, default.get(key)) for key, value in self.settings.items()]

    @cached_property
    def checkpoints(self) -> dict[str, str]:
        """Name and size of each checkpoint."""
        folder = self.folder / "checkpoints"
        return {name: format_size(folder_bytes(folder / name)) for name in step_names(folder)}

    @cached_property
    def log(self) -> str:
        """The end of train.log."""
        return "\n".join(last_lines(self.folder / "train.log", LOG_TAIL_BYTES))

    @property
    def is_whole(self) -> bool:
        """Whether the run has reached its last step, as far as that is known."""
        return self.total_steps is None or self.step >= self.total_steps

    @property
    def warnings(self) -> list[str]:
        """The newest warnings of train.log, and a message if metrics.jsonl is too large to be drawn."""
        found = [*dict.fromkeys(WARNING.findall(self.log))][-MAX_WARNINGS:]
        with suppress(OSError):
            if (self.folder / "metrics.jsonl").lstat().st_size > MAX_METRICS_BYTES:
                limit = f"{MAX_METRICS_BYTES >> 20} MiB"
                found.append(f"metrics.jsonl is larger than {limit}: its curves and numbers are left out")
        return found

    @property
    def labels(self) -> list[str]:
        """Return the stage and what the run began from."""
        return [text for text in (self.fields["stage"], self.began) if text]

    @property
    def numbers(self) -> dict[str, str]:
        """Return the newest numbers by name."""
        series, train, steps = self.metrics, self.metrics.train, self.total_steps
        found = {
            "step": f"{self.step:,} of {steps:,}" if steps else f"{self.step:,}",
            "training loss": format_number(train.last("loss")),
        }
        if len(series.eval):
            found["validation loss"] = format_number(series.eval.last("loss"))
        if lowest := series.eval.lowest():
            found["best validation loss"] = f"{lowest[0]:.4f} at step {lowest[1]:,.0f}"
        found["tokens"] = f"{train.last('tokens') or 0:,.0f}"
        found["mean tokens/s"] = format_number(series.tokens_per_second)
        if series.peak_memory is not None:
            found["peak memory"] = format_size(int(series.peak_memory))
        if (seconds := train.last("seconds")) is not None:
            found["training time"] = format_seconds(seconds)
        if self.is_running and steps and series.attempt_first and series.attempt_last:
            remaining = remaining_seconds(series.attempt_first, series.attempt_last, steps)
            found |= {} if remaining is None else {"remaining": format_seconds(remaining)}
        return found

    @property
    def error_parts(self) -> tuple[str, str]:
        """Return the beginning of the recorded error, and the rest; both empty where there is none, or an attempt goes on."""
        error = "" if self.is_running else self.fields["error"]
        shown = "\n".join(error.split("\n")[:ERROR_LINES])[:ERROR_CHARS]
        return shown, error[len(shown) :].removeprefix("\n")

    @property
    def notes(self) -> Iterator[str]:
        """Yield what a reader should know before the curves: overfitting, gaps in the data, resumes that are not exact,
        warnings of the log.
        """
        fields, warnings = self.fields, self.warnings
        if self.metrics.overfitting:
            lowest, newest = self.metrics.overfitting
            is_best = as_dict(fields["export"]).get("weights") == "best"
            weights = "; model/ has the weights of the best evaluation" if is_best else ""
            yield f"overfitting: the validation loss was lowest at step {lowest.step:,} ({lowest.loss:.4f}) and is {newest.loss:.4f} now{weights}"
        for file in [] if any(map(TRUNCATION_WARNING.match, warnings)) else fields["data"]:
            lost, kept = file.get("lost_loss_tokens"), file.get("loss_tokens")
            if isinstance(lost, int) and lost > 0:
                whole = lost + (kept if isinstance(kept, int) and kept > 0 else 0)
                yield f"{Path(str(file.get('file'))).name}: truncation removed {lost:,} of {whole:,} tokens with loss ({lost / whole:.0%}); raise data.max_length"
        for reason in fields["inexact_because"]:
            yield f"not bitwise equal to a run without interruption: {reason}"
        for change in fields["changed"]:
            yield f"a resume changed {change}"
        yield from map(str, fields["recovered"])
        yield from filter(None, [fields["degraded"]])
        yield from warnings

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Return (purpose, shell command) of what to type next."""
        settings = self.settings
        data_format = settings.get("stage.data_format", "")
        lr = parse_number(settings.get("optimizer.lr", ""))
        if self.status == "completed" and data_format in STAGE_METRICS:
            settings = {name: value.replace(REPO_INTERPOLATION, str(REPO_ROOT)) for name, value in settings.items()}
            path = settings.get("data.path", "")
            data_path = Path(path) if path and path != "null" and not path.startswith(("[", "{")) else None
            longer = longer_override(settings) if self.is_whole else None
            found = next_commands(self.folder, self.fields["stage"], data_format, data_path, longer, settings)
        elif self.status == "diverged" and lr:
            can_resume = bool(self.checkpoints) and (self.total_steps is None or self.step < self.total_steps)
            is_branch = self.branched_from is not None
            found = commands_after_divergence(self.folder, lr, self.overrides, can_resume, is_branch)
        elif self.status in ("interrupted", "paused", "failed"):
            found = commands_to_continue(self.folder, bool(self.checkpoints))
        else:
            return []
        return [(command.purpose, shlex.join(command.arguments)) for command in found]


@lru_cache(maxsize=16)
def stage_defaults(stage: str) -> dict[str, str]:
    """Return the settings of `train.py stage=<stage>` by key, uninterpolated as in a saved config; those of train.py
    for a stage that is not in conf/.
    """
    known = {path.stem for path in (CONF_DIR / "stage").glob("*.yaml")}
    values = flat_settings(compose_values([f"stage={stage}"] if stage in known else []))
    return {key: as_typed(value) for key, value in values}


def run_text(folder: Path) -> str:
    """Return status, numbers, notes and commands of a run as text for a terminal."""
    run = RunReport.read(folder)
    lines = [
        f"run {folder}",
        " · ".join([run.status, *run.labels]),
        *(f"{name:<22}{value}" for name, value in run.numbers.items()),
    ]
    lines += [f"error: {error_line(error)}"] if (error := run.error_parts[0]) else []
    lines += [f"note: {note}" for note in run.notes]
    for purpose, command in run.commands:
        lines += ["", f"{purpose}:", command]
    return strip_control("\n".join(lines))


def error_line(error: object) -> str:
    """Return the first line of a recorded error, cut to ERROR_LINE_CHARS."""
    line, _, rest = str(error).strip().partition("\n")
    return f"{line[:ERROR_LINE_CHARS]}{' ...' if rest or len(line) > ERROR_LINE_CHARS else ''}"


def format_number(value: float | None) -> str:
    """Return e.g. 2.6975, 2,597, 5.031e-04; a dash for a value that is missing or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    if 1e3 <= abs(value) < 1e15 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 else f"{value:.3e}"
