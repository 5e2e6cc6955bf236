"""Bars on a terminal: that of a run, and that of a single long task."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from runner.tracking.console.base import Console, Event
from runner.tracking.console.layout import MAX_WIDTH, MIN_WIDTH, has_colours, shorten_middle, wrap_text

if TYPE_CHECKING:
    from rich.console import Console as RichTerminal
    from rich.progress import Progress, TaskID

REFRESH_PER_SECOND = 4  # more takes CPU time from training
BAR_MIN_CELLS = 4  # on a narrow terminal the bar shrinks, not the numbers
TITLE_CELLS = 32  # of the title of a task
WARNING_STYLE = "bold yellow"


def open_terminal(stream: TextIO) -> RichTerminal:
    """Return rich's terminal; with NO_COLOR it prints no colours or styles."""
    from rich.console import Console as RichTerminal

    return RichTerminal(file=stream, force_terminal=True, highlight=False, color_system="auto" if has_colours() else None)


class BarConsole(Console):
    """A progress bar fixed at the bottom; messages scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        self._terminal = open_terminal(stream)
        self.width = min(max(self._terminal.width, MIN_WIDTH), MAX_WIDTH)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._numbers = "first step"  # next to the bar: of the newest logged step

    def start(self, lines: list[str], event: Event) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self.print("\n".join(lines))
        steps = TextColumn("{task.completed}/{task.total}", table_column=Column(no_wrap=True))
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=BAR_MIN_CELLS))
        numbers = TextColumn("{task.fields[numbers]}", markup=False, table_column=Column(no_wrap=True))
        self._bar = Progress(steps, bar, numbers, console=self._terminal, refresh_per_second=REFRESH_PER_SECOND, expand=True)
        self._task = self._bar.add_task("train", total=event["total_steps"], completed=event["step"], numbers=self._numbers)
        self._bar.start()

    def show_record(self, record: Event, line: str, numbers: str) -> None:
        if record["kind"] != "train":
            return self.print(line)
        self._numbers = numbers
        self._update(numbers, completed=record["step"])

    def show_activity(self, name: str, done: int, total: int, unit: str) -> None:
        self._update(f"{name} {done:,}/{total:,} {unit}" if done < total else self._numbers)

    def _update(self, numbers: str, completed: int | None = None) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=completed, numbers=numbers)

    def show_sample(self, record: Event, line: str) -> None:
        self.print(line)

    def print(self, text: str) -> None:
        self._terminal.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        lines = wrap_text(text, "warning: ", "  ", self.width)
        self._terminal.print("\n".join(lines), markup=False, soft_wrap=True, style=WARNING_STYLE)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def end(self, lines: list[str], event: Event) -> None:
        self.print("\n".join(lines))


class TaskBar:
    """The bar of one long task: title, bar, `done/total unit`, time left. It disappears at the end unless it is `kept`."""

    def __init__(self, title: str, unit: str, total: int, stream: TextIO, kept: bool = False) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        text = TextColumn("{task.description}", markup=False, table_column=Column(overflow="ellipsis", no_wrap=True, max_width=TITLE_CELLS))
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=BAR_MIN_CELLS))
        count = TextColumn("{task.fields[count]}", markup=False, table_column=Column(no_wrap=True))
        self._bar = Progress(
            text, bar, count, TimeRemainingColumn(), console=open_terminal(stream), refresh_per_second=REFRESH_PER_SECOND, expand=True, transient=not kept
        )
        self._task = self._bar.add_task(shorten_middle(title, TITLE_CELLS), total=total or None, count=f"0/{total:,} {unit}")  # None: a bar that only moves
        self._bar.start()

    def reset(self, title: str, unit: str, total: int) -> None:
        """Begin another task in the same bar."""
        self._bar.reset(self._task, total=total, description=shorten_middle(title, TITLE_CELLS), count=f"0/{total:,} {unit}")

    def update(self, done: int, count: str) -> None:
        self._bar.update(self._task, completed=done, count=count)

    def stop(self) -> None:
        self._bar.stop()
