"""What a sweep prints: its start and end, its jobs, and what they print themselves."""

from __future__ import annotations

import json
import sys
from typing import Any

from common.errors import print_note, print_safely
from common.limits import parse_record
from runner.tracking.console.plain import Event, LineConsole

MAX_EVENT_CHARACTERS = 1 << 20  # of a line of a job that is passed on as an event


class SweepLines:
    """Prints lines.

    `tracker.console=json`: events, and what a job prints besides its events goes to stderr.
    """

    def __init__(self, mode: str) -> None:
        self._json = LineConsole(sys.stdout, is_json=True) if mode == "json" else None

    def _show(self, name: str, event: Event, text: str) -> None:
        if self._json is None:
            return print_safely(text)
        self._json.show(name, event, text)

    def start(self, text: str, event: Event) -> None:
        self._show("sweep_start", event, text)

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
        self._show("job_start", {"job": job, "number": number, "verb": verb}, f"[{number}] {job} {verb}")

    def job_failed(self, number: str, job: str, reason: str) -> None:
        if self._json is not None:
            self._json.show("job_failed", {"job": job, "number": number, "error": reason}, "")
        print_note(f"[{number}] {job} failed: {reason}")

    def end(self, text: str, event: Event) -> None:
        self._show("sweep_end", event, text)


def _event_of(line: str) -> dict[str, Any] | None:
    """Return the event that a job has printed; None for any other line."""
    if not line.startswith('{"event": "') or len(line) > MAX_EVENT_CHARACTERS:
        return None
    event = parse_record(line.encode())
    return event if isinstance(event.get("event"), str) else None
