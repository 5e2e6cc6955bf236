"""Interface of a console; by itself it prints nothing (`tracker.console=quiet`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Event = Mapping[str, Any]  # JSON values


class Console:
    """No output.

    Each method gets the text to print, and what a program reads instead (`tracker.console=json`).
    """

    width = 80  # cells of a line

    def start(self, lines: list[str], event: Event) -> None:
        """Show the header of the run; `event` has `total_steps`."""

    def show_data(self, files: list[dict[str, Any]], text: str) -> None:
        """Show the counts of the data files (`data` of run.json), as a table."""
        self.print(text)

    def show_record(self, record: Event, line: str, numbers: str) -> None:
        """Show a record of metrics.jsonl: `line` is the whole plain line, `numbers` the few values that fit next to a
        bar.
        """

    def show_activity(self, name: str, done: int, total: int, unit: str) -> None:
        """Show that `done` of `total` units of something between two steps are done, from 0 to all of them."""

    def show_sample(self, record: Event, line: str) -> None:
        """Show a record of samples.jsonl."""

    def print(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        """Show a warning, given without the label."""

    def stop(self) -> None:
        """End what is drawn again and again."""

    def end(self, lines: list[str], event: Event) -> None:
        """Show how the run ended."""
