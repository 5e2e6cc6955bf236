"""The consoles of tracker.console that need no terminal: nothing, lines of text, or JSON lines for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, TextIO

LINE_WIDTH = 80  # cells, of files and pipes
CONSOLE_MODES = ("auto", "rich", "plain", "json", "quiet")
ACTIVITY_INTERVAL = 10.0  # seconds between two lines about what happens between two steps

Event = Mapping[str, Any]  # JSON values


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


class LineConsole(Console):
    """Lines of text, or of JSON in ASCII: text of a model may hold control characters.

    A closed pipe or terminal does not stop training: train.log has every line.
    """

    def __init__(self, stream: TextIO, is_json: bool = False) -> None:
        self._stream: TextIO | None = stream
        self._is_json = is_json
        self._shown = 0.0  # when the current activity began, or was last mentioned

    def show(self, name: str, event: Event, text: str, numbers: str = "") -> None:
        if name != "progress" or self._is_due(event["done"], event["total"]):
            self.write_line(json.dumps({"event": name, **event}) if self._is_json else text)

    def write_line(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=self._stream, flush=True)
        except (OSError, ValueError):
            self._stream = None

    def _is_due(self, done: int, total: int) -> bool:
        """Return whether to mention an activity now: it is neither new nor done, and was not mentioned for
        ACTIVITY_INTERVAL seconds.
        """
        now = time.monotonic()
        is_due = 0 < done < total and now - self._shown >= ACTIVITY_INTERVAL
        if is_due or done == 0:
            self._shown = now
        return is_due
