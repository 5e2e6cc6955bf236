"""What a run or a sweep prints without a terminal: nothing, lines of text, or JSON lines for programs; and numbers as
short text.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from common.errors import print_note, print_safely
from common.limits import parse_record

LINE_WIDTH = 80  # cells, of files and pipes
CONSOLE_MODES = ("auto", "rich", "plain", "json", "quiet")
ACTIVITY_INTERVAL = 10.0  # seconds between two lines about what happens between two steps

Event = Mapping[str, Any]  # JSON values
MAX_EVENT_CHARACTERS = 1 << 20  # of a line of a job that is passed on as an event
MetricValues = Mapping[str, int | float | None]

# How a metric is printed; one that is not listed is printed as `name value`.
VALUE_FORMATS = {
    "loss": "loss {:.3f}",
    "lr": "lr {:.1e}",
    "grad_norm": "gnorm {:.2f}",
    "perplexity": "perplexity {:.4g}",
}
BAR_FIELDS = ("loss", "lr", "tokens_per_second")
HIDDEN_FIELDS = "epoch loss_tokens tokens tokens_per_second data_wait save_stall peak_memory".split()
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Console:
    """No output (`tracker.console=quiet`)."""

    width = LINE_WIDTH

    def show(self, name: str, event: Event, text: str, numbers: str = "") -> None:
        """Show an event of docs/reference/console-events.md, which a program reads instead of `text`.

        `numbers`: the few values of a step or an activity that fit next to a bar.
        """

    def print(self, text: str) -> None:
        self.show("message", {"text": text}, text)

    def stop(self) -> None:
        """End what is drawn again and again."""


@dataclass(eq=False)
class LineConsole(Console):
    """Lines of text, or of JSON in ASCII: text of a model may hold control characters.

    A closed pipe or terminal does not stop training: train.log has every line.
    """

    stream: TextIO | None
    is_json: bool = False
    _shown: float = 0.0  # when the current activity began, or was last mentioned

    def show(self, name: str, event: Event, text: str, numbers: str = "") -> None:
        if name != "progress" or self._is_due(event["done"], event["total"]):
            self.write_line(json.dumps({"event": name, **event}) if self.is_json else text)

    def write_line(self, text: str) -> None:
        if self.stream is None:
            return
        encoding = self.stream.encoding or "utf-8"
        try:
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=self.stream, flush=True)
        except (OSError, ValueError):
            self.stream = None

    def _is_due(self, done: int, total: int) -> bool:
        """Return whether to mention an activity now: it is neither new nor done, and was not mentioned for
        ACTIVITY_INTERVAL seconds.
        """
        now = time.monotonic()
        is_due = 0 < done < total and now - self._shown >= ACTIVITY_INTERVAL
        if is_due or done == 0:
            self._shown = now
        return is_due


class SweepLines:
    """Prints lines.

    `tracker.console=json`: events, and what a job prints besides its events goes to stderr.
    """

    def __init__(self, mode: str) -> None:
        self._json = LineConsole(sys.stdout, is_json=True) if mode == "json" else None

    def show(self, name: str, event: Event, text: str) -> None:
        if self._json is None:
            return print_safely(text)
        self._json.show(name, event, text)

    def job_output(self, job: str, prefix: str, line: str) -> None:
        """Pass on a line that a job has printed."""
        if self._json is None:
            print_safely(f"{prefix}{line}")
        elif event := _event_of(line):
            self._json.write_line(json.dumps({"event": event["event"], "job": job, **event}))
        else:
            print_note(f"{prefix}{line}")

    def job_started(self, number: str, job: str, verb: str) -> None:
        """`verb`: starts or continues; `number`: e.g. 2/8."""
        self.show("job_start", {"job": job, "number": number, "verb": verb}, f"[{number}] {job} {verb}")

    def job_failed(self, number: str, job: str, reason: str) -> None:
        if self._json is not None:
            self._json.show("job_failed", {"job": job, "number": number, "error": reason}, "")
        print_note(f"[{number}] {job} failed: {reason}")


def _event_of(line: str) -> dict[str, Any] | None:
    """Return the event that a job has printed; None for any other line."""
    if not line.startswith('{"event": "') or len(line) > MAX_EVENT_CHARACTERS:
        return None
    event = parse_record(line.encode())
    return event if isinstance(event.get("event"), str) else None


def format_values(numbers: MetricValues, validation: str) -> str:
    """Return `loss 3.412 | val 3.50@100 | lr 4.9e-04 | 41.2k tok/s`; `validation` is inserted after the loss."""
    parts = []
    for name, value in numbers.items():
        if name in HIDDEN_FIELDS:
            continue
        parts.append(f"{name} not finite" if value is None else VALUE_FORMATS.get(name, name + " {:.4g}").format(value))
        if name == "loss" and validation:
            parts.append(validation)
    speed = numbers.get("tokens_per_second")
    if speed is not None:
        parts.append(f"{format_rate(speed)} tok/s")
    return " | ".join(parts)


def format_rate(per_second: float) -> str:
    """Return `950` or `41.2k`."""
    return f"{per_second / 1000:.1f}k" if per_second >= 1000 else f"{per_second:.0f}"


def remaining_seconds(
    first: tuple[int | float, float], last: tuple[int | float, float], total_steps: int
) -> float | None:
    """Return the seconds from the `last` logged step to the last step of the run, at the mean pace since the `first`
    one of this attempt.

    Both are (step, seconds), evaluations and saves included: they come again. None where no step lies between.
    """
    steps, seconds = last[0] - first[0], last[1] - first[1]
    return seconds / steps * max(0, total_steps - last[0]) if steps > 0 else None


def format_seconds(seconds: float) -> str:
    """Return `00:18:20`."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"


def format_size(size: float) -> str:
    """Return `612 MiB` for a number of bytes."""
    unit = 0
    while size >= 1024 and unit < len(BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {BYTE_UNITS[unit]}" if size >= 100 or unit == 0 else f"{size:.3g} {BYTE_UNITS[unit]}"
