"""Progress bars of a run and of a single long task, and text that fits the width of a terminal.

Widths are in cells: a Chinese character takes two.
"""

from __future__ import annotations

import os
import shlex
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from runner.tracking.lines import LINE_WIDTH, Console, Event, LineConsole

if TYPE_CHECKING:
    from rich.console import Console as RichTerminal
    from rich.progress import Progress

MIN_WIDTH, MAX_WIDTH = 40, 120  # of a terminal
CONTINUED = " \\"  # at the end of a line of a shell command that goes on
ELLIPSIS = "..."
DUMB_TERMINALS = ("", "dumb", "unknown")  # values of TERM: no cursor movement


def is_live_terminal(stream: TextIO) -> bool:
    """Return whether lines of `stream` can be drawn again: it is a terminal that knows control codes."""
    return stream.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS


def cell_width(text: str) -> int:
    """Return the number of terminal cells of `text`: two for a wide character, none for a combining one."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def pad(text: str, width: int, is_number: bool = False) -> str:
    """Return `text` filled up with spaces to `width` cells, on the left for a number."""
    spaces = " " * (width - cell_width(text))
    return spaces + text if is_number else text + spaces


def wrap_text(text: str, first: str, indent: str, width: int = LINE_WIDTH) -> list[str]:
    """Return the lines of `text`, the first after `first`, the others after `indent`.

    A line breaks at spaces, and in text of wide characters, which has none. A path is not broken, so that it can be
    copied, and is longer than `width` where it has to be.
    """
    lines, line, has_part = [], first, False
    for part in text.split(" "):
        fits = cell_width(line) + has_part + cell_width(part) <= width
        if not fits and "/" not in part and any(cell_width(character) == 2 for character in part):
            for character in f"{' ' * has_part}{part}":
                if cell_width(line + character) > width:
                    lines.append(line)
                    line = indent
                line += character
            has_part = True
            continue
        if has_part and not fits:
            lines.append(line)
            line, has_part = indent, False
        line, has_part = (f"{line} {part}" if has_part else line + part), True
    return [*lines, line.rstrip()]


def labelled_lines(rows: Collection[tuple[str, object]], width: int = LINE_WIDTH) -> list[str]:
    """Return `label  value` for each row, values in one column and wrapped below each other.

    A line break in a value begins another line.
    """
    column = max((cell_width(label) for label, _ in rows), default=0) + 2
    lines: list[str] = []
    for label, value in rows:
        first = pad(label, column)
        for part in str(value).split("\n"):
            lines += wrap_text(part, first, " " * column, width)
            first = " " * column
    return lines


def command_lines(arguments: Sequence[str], comment: str, width: int) -> list[str]:
    """Return a shell command below its comment, in lines of at most `width` cells where its arguments allow it; all but
    the last end with a backslash.
    """
    lines, line = [], ""
    for part in map(shlex.quote, arguments):
        longer = f"{line} {part}" if line else part
        if line and cell_width(longer) > width - len(CONTINUED):
            lines.append(line + CONTINUED)
            longer = f"  {part}"
        line = longer
    return [*(wrap_text(comment, "# ", "# ", width) if comment else []), *lines, line]


def shorten_middle(text: str, width: int) -> str:
    """Return `text` with an ellipsis in its middle if it has more than `width` cells; the end, e.g. of a file name,
    stays longest.
    """
    if cell_width(text) <= width:
        return text
    head, tail = "", ""
    space = width - len(ELLIPSIS)
    for character in text:
        if cell_width(head + character) > space // 3:
            break
        head += character
    for character in reversed(text):
        if cell_width(head + character + tail) > space:
            break
        tail = character + tail
    return head + ELLIPSIS + tail


def table_lines(table: Sequence[Sequence[str]], is_number: Sequence[bool]) -> list[str]:
    """Return the rows of `table` with aligned columns, two spaces between them."""
    widths = [max(map(cell_width, cells)) for cells in zip(*table, strict=True)]
    return ["  ".join(map(pad, row, widths, is_number)).rstrip() for row in table]


def widest(lines: Iterable[str]) -> int:
    """Return the cells of the widest line."""
    return max(map(cell_width, lines), default=0)


REFRESH_PER_SECOND = 4  # more takes CPU time from training
BAR_MIN_CELLS = 4  # on a narrow terminal the bar shrinks, not the numbers
TITLE_CELLS = 32  # of the title of a task
WARNING_STYLE = "bold yellow"


def open_terminal(stream: TextIO) -> RichTerminal:
    """Return rich's terminal; with NO_COLOR it prints no colours or styles."""
    from rich.console import Console as RichTerminal

    return RichTerminal(
        file=stream,
        force_terminal=True,
        highlight=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # https://no-color.org
    )


def open_bar(
    terminal: RichTerminal, label: str, total: int | None, numbers: str, *, done: int = 0, title: str = ""
) -> Progress:
    """Show a bar of one task between `label`, a format of rich, and its field `numbers`.

    With a `title` it also shows the time left, and disappears at the end. `total` None: it only moves.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    progress = Progress(
        TextColumn(label, markup=False, table_column=Column(no_wrap=True, max_width=TITLE_CELLS)),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=BAR_MIN_CELLS)),
        TextColumn("{task.fields[numbers]}", markup=False, table_column=Column(no_wrap=True)),
        *([TimeRemainingColumn()] if title else []),
        console=terminal,
        refresh_per_second=REFRESH_PER_SECOND,
        expand=True,
        transient=bool(title),
    )
    progress.add_task(shorten_middle(title, TITLE_CELLS), total=total, completed=done, numbers=numbers)
    progress.start()
    return progress


class BarConsole(Console):
    """A progress bar fixed at the bottom; messages scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        self._terminal = open_terminal(stream)
        self.width = min(max(self._terminal.width, MIN_WIDTH), MAX_WIDTH)
        self._bar: Progress | None = None
        self._numbers = "first step"  # next to the bar: of the newest logged step

    def show(self, name: str, event: Event, text: str, numbers: str = "") -> None:
        if name == "step":
            self._numbers = numbers
            self._update(numbers, completed=event["step"])
        elif name == "progress":
            self._update(numbers if event["done"] < event["total"] else self._numbers)
        elif name == "warning":
            lines = wrap_text(event["text"], "warning: ", "  ", self.width)
            self._terminal.print("\n".join(lines), markup=False, soft_wrap=True, style=WARNING_STYLE)
        else:
            self._terminal.print(text, markup=False, soft_wrap=True)
        if name == "start":
            label, total = "{task.completed}/{task.total}", event["total_steps"]
            self._bar = open_bar(self._terminal, label, total, self._numbers, done=event["step"])

    def _update(self, numbers: str, completed: int | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=completed, numbers=numbers)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def open_console(mode: str, stream: TextIO | None = None) -> Console:
    """Return the console of `tracker.console=mode`, which writes to stdout."""
    stream = stream or sys.stdout
    if mode == "quiet":
        return Console()
    if mode == "rich" or (mode == "auto" and is_live_terminal(stream)):
        return BarConsole(stream)
    return LineConsole(stream, is_json=mode == "json")
