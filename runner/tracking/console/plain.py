"""Lines without control codes: text for pipes, files and logs, and JSON for programs."""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

from runner.tracking.console.base import Console, Event

ACTIVITY_INTERVAL = 10.0  # seconds between two lines about what happens between two steps


class LineConsole(Console):
    """Writes lines. A closed pipe or terminal does not stop training: train.log has every line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._shown = 0.0  # when the current activity began, or was last mentioned

    def write_line(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=self._stream, flush=True)
        except (OSError, ValueError):
            self._stream = None

    def is_activity_due(self, done: int, total: int) -> bool:
        """Return whether to mention an activity now: it is neither new nor done, and was not mentioned for
        ACTIVITY_INTERVAL seconds.
        """
        now = time.monotonic()
        if done == 0:
            self._shown = now
        if not 0 < done < total or now - self._shown < ACTIVITY_INTERVAL:
            return False
        self._shown = now
        return True


class PlainConsole(LineConsole):
    """One line per message."""

    def start(self, lines: list[str], event: Event) -> None:
        self.print("\n".join(lines))

    def show_record(self, record: Event, line: str, numbers: str) -> None:
        self.print(line)

    def show_activity(self, name: str, done: int, total: int, unit: str) -> None:
        if self.is_activity_due(done, total):
            self.print(f"{name}: {done:,} of {total:,} {unit}")

    def show_sample(self, record: Event, line: str) -> None:
        self.print(line)

    def print(self, text: str) -> None:
        self.write_line(text)

    def warn(self, text: str) -> None:
        self.print(f"warning: {text}")

    def end(self, lines: list[str], event: Event) -> None:
        self.print("\n".join(lines))


class JsonConsole(LineConsole):
    """One JSON object per line with the field `event`: docs/reference/console-events.md."""

    def write_event(self, name: str, event: Event) -> None:
        self.write_line(json.dumps({"event": name, **event}))  # ASCII: text of a model may hold control characters

    def start(self, lines: list[str], event: Event) -> None:
        self.write_event("start", event)

    def show_data(self, files: list[dict[str, Any]], text: str) -> None:
        self.write_event("data", {"files": files})

    def show_record(self, record: Event, line: str, numbers: str) -> None:
        self.write_event("eval" if record["kind"] == "eval" else "step", record)

    def show_activity(self, name: str, done: int, total: int, unit: str) -> None:
        if self.is_activity_due(done, total):
            self.write_event("progress", {"activity": name, "done": done, "total": total, "unit": unit})

    def show_sample(self, record: Event, line: str) -> None:
        self.write_event("sample", record)

    def print(self, text: str) -> None:
        self.write_event("message", {"text": text})

    def warn(self, text: str) -> None:
        self.write_event("warning", {"text": text})

    def end(self, lines: list[str], event: Event) -> None:
        self.write_event("end", event)
