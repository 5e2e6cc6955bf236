"""Progress of long preparations and evaluations, and output streams that survive a closed pipe."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Self, TextIO

from common.errors import strip_control
from runner.tracking.console import format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressMeter:
    """Prints the progress of a long preparation to stderr: called with (bytes done, bytes in total, rows done). Below two seconds it prints nothing."""

    DELAY, INTERVAL = 2.0, 10.0  # seconds before the first line, and between two lines where stderr is no terminal

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title, self._stream = strip_control(title), stream or sys.stderr
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> ProgressMeter:
        return self

    def __call__(self, done: int, total: int, rows: int) -> None:
        now, terminal = time.monotonic(), self._stream.isatty()
        seconds = now - self._started
        if seconds < self.DELAY or (not terminal and now - self._printed < self.INTERVAL and self._printed > self._started):
            return
        self._printed = now
        share = min(done / max(total, 1), 1.0)
        eta = format_seconds(seconds / share - seconds) if share else "?"
        line = f"{self._title}: {100 * share:.0f}%, {rows:,} rows, {rows / seconds:,.0f} rows/s, eta {eta}"
        print(f"\r{line}\x1b[K" if terminal else line, end="" if terminal else "\n", file=self._stream, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._stream.isatty() and self._printed > self._started:
            print(file=self._stream)


def _never_listen() -> AbstractContextManager[Callable[[], bool]]:
    return nullcontext(lambda: False)


class EvaluationProgress:
    """How far an evaluation is, on stderr: a bar on a terminal, otherwise a line now and then. `should_stop()`: whether the user has asked to end it.

    `listen` opens what receives that request; it is entered by the first `begin` and left at the end of the block, before and after which Ctrl-C
    ends the command at once.
    """

    DELAY, INTERVAL = 2.0, 10.0  # seconds before the first line, and between two lines where stderr is no terminal

    def __init__(self, title: str, listen: Callable[[], AbstractContextManager[Callable[[], bool]]] | None = None) -> None:
        self.title, self._listen = strip_control(title), listen or _never_listen
        self.unit, self.done, self.total, self.is_stopped = "", 0, 0, False
        self._stop: Callable[[], bool] | None = None
        self._bar: Progress | None = None
        self._stack = ExitStack()
        self._started = self._printed = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._stop = self._bar = None

    def begin(self, unit: str, total: int) -> None:
        """Begin to count `total` of `unit`, e.g. rows."""
        self.unit, self.done, self.total = unit, 0, total
        self._started = self._printed = time.monotonic()
        if self._stop is None:
            self._stop = self._stack.enter_context(self._listen())
        if sys.stderr.isatty():
            self._bar = self._bar or self._open_bar()
            self._bar.reset(self._bar.task_ids[0], total=total, description=self.title, unit=unit)

    def _open_bar(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        title = TextColumn("{task.description}", markup=False, table_column=Column(overflow="ellipsis", no_wrap=True, max_width=24))
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4))
        count = TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}", table_column=Column(no_wrap=True))
        console = Console(file=sys.stderr, highlight=False)
        opened = self._stack.enter_context(Progress(title, bar, count, TimeRemainingColumn(), console=console, refresh_per_second=4, expand=True))
        opened.add_task(self.title, total=self.total, unit=self.unit)
        return opened

    def advance(self, done: int) -> None:
        """Show that `done` of the total are done."""
        self.done = done
        if self._bar is not None:
            return self._bar.update(self._bar.task_ids[0], completed=done)
        now = time.monotonic()
        seconds = now - self._started
        if seconds >= self.DELAY and (now - self._printed >= self.INTERVAL or self._printed == self._started) and not sys.stderr.isatty():
            self._printed = now
            eta = format_seconds(seconds / done * (self.total - done)) if done else "?"
            share = 100 * done / max(self.total, 1)
            print(f"{self.title}: {done:,} of {self.total:,} {self.unit} ({share:.0f}%), eta {eta}", file=sys.stderr, flush=True)

    def hide(self) -> None:
        """Leave the bar as it is, so that results can be printed below it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def should_stop(self) -> bool:
        self.is_stopped = self.is_stopped or (self._stop is not None and self._stop())
        return self.is_stopped


class _PipeWriter(io.FileIO):
    """Discards what is written once the reader has closed the pipe, as `tee` does at Ctrl-C."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def ignore_broken_pipe() -> None:
    """Replace stdout and stderr so that a closed pipe or terminal does not end this process; the files of the run have every line."""
    open_standard_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):  # not a stream that a caller has installed
            raw = _PipeWriter(stream.fileno(), "w", closefd=False)
            is_line_buffered = stream.line_buffering or stream.write_through
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=is_line_buffered))


def open_standard_streams() -> None:
    """Open /dev/null as standard input, output or error where the caller has closed it: the next file of the run would get its descriptor,
    and the output of libraries and children."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and not _is_open(descriptor):
            null = os.open(os.devnull, os.O_RDWR)
            if null == descriptor:
                os.set_inheritable(null, True)
            else:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w", closefd=False, encoding="utf-8", errors="backslashreplace"))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
