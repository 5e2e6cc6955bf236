"""Progress of long preparations and evaluations."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from common.errors import strip_control
from runner.tracking.bar import TITLE_CELLS, is_live_terminal, open_bar, open_terminal, shorten_middle
from runner.tracking.lines import format_seconds, format_size

if TYPE_CHECKING:
    from rich.progress import Progress

PROGRESS_POLL_SECONDS = 1.0
DELAY, INTERVAL = 2.0, 10.0  # seconds before a task is shown, and between two of its lines where stderr is no terminal


class TaskProgress:
    """How far a long task is, on stderr: a bar on a terminal, otherwise a line now and then.

    A task below DELAY shows nothing.
    """

    def __init__(self, title: str, mode: str = "auto") -> None:
        """`mode`: tracker.console of the run; `quiet` shows nothing."""
        self.title, self.unit, self.done, self.total = strip_control(title), "", 0, 0
        self._mode = mode
        self._bar: Progress | None = None
        self._started = self._printed = time.monotonic()

    def begin(self, unit: str, total: int) -> None:
        """Begin to count `total` of `unit`, e.g. rows."""
        self.unit, self.done, self.total = unit, 0, total
        self._started = self._printed = time.monotonic()
        if self._bar is not None:
            title = shorten_middle(self.title, TITLE_CELLS)
            self._bar.reset(self._bar.task_ids[0], total=total, description=title, numbers=f"0/{total:,} {unit}")

    def advance(self, done: int, count: str | None = None) -> None:
        """Show that `done` of the total are done; `count` is printed instead of these numbers."""
        self.done = done
        now = time.monotonic()
        seconds = now - self._started
        if self._mode == "quiet" or (self._bar is None and seconds < DELAY):
            return
        if self._mode == "rich" or (self._mode in ("auto", "json") and is_live_terminal(sys.stderr)):
            numbers = count or f"{done:,}/{self.total:,} {self.unit}"
            if self._bar is None:
                self._bar = open_bar(
                    open_terminal(sys.stderr), "{task.description}", self.total or None, numbers, title=self.title
                )
            self._bar.update(self._bar.task_ids[0], completed=done, numbers=numbers)
        elif now - self._printed >= INTERVAL or self._printed == self._started:
            self._printed = now
            eta = format_seconds(seconds / done * max(0, self.total - done)) if done else "?"
            share = f" ({min(100, 100 * done / self.total):.0f}%), eta {eta}" if self.total else ""
            text = count or f"{done:,} of {self.total:,} {self.unit}"
            print(f"{self.title}: {text}{share}", file=sys.stderr, flush=True)

    def hide(self) -> None:
        """Remove the bar, so that results can be printed in its place."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.hide()


class ProgressMeter(TaskProgress):
    """The progress of a preparation that reads a file: called with (bytes done, bytes in total, rows done)."""

    def __call__(self, done: int, total: int, rows: int) -> None:
        self.total = total
        self.advance(done, f"{rows:,} rows, {rows / max(time.monotonic() - self._started, 1e-9):,.0f} rows/s")


class PolledProgress(TaskProgress):
    """Progress of work that reports none, e.g. a download: a thread looks at it every second.

    Without `measure` it shows the seconds.
    """

    def __init__(self, title: str, measure: Callable[[], int] | None = None, total: int = 0) -> None:
        """`measure()` returns the bytes that are there, `total`: the bytes at the end that are not there at the
        beginning.
        """
        super().__init__(title)
        self._measure, self._before = measure, 0
        self.total = total
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._before = self._measure() if self._measure else 0
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        super().__exit__(*error)

    def _poll(self) -> None:
        while not self._ended.wait(PROGRESS_POLL_SECONDS):
            if self._measure is None:
                seconds = time.monotonic() - self._started
                self.advance(0, f"{seconds:.0f} s")
            else:
                done = max(0, self._measure() - self._before)
                self.advance(done, f"{format_size(done)} of {format_size(self.total)}")


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below `folder`, 0 where there is none. Files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def watch_download(title: str, folder: Path, total: int) -> PolledProgress:
    """Return the progress of a download of `total` bytes into `folder`, as a context manager."""
    return PolledProgress(title, lambda: folder_bytes(folder), total)


class EvaluationProgress(TaskProgress):
    """How far an evaluation is. `should_stop()`: whether the user has asked to end it.

    `listen` opens what receives that request; it is entered by the first `begin` and left at the end of the block,
    before and after which Ctrl-C ends the command at once.
    """

    def __init__(
        self, title: str, listen: Callable[[], AbstractContextManager[Callable[[], bool]]] | None = None
    ) -> None:
        super().__init__(title)
        self._listen, self._stack = listen, ExitStack()
        self._stop: Callable[[], bool] = lambda: False
        self.is_stopped = False

    def begin(self, unit: str, total: int) -> None:
        super().begin(unit, total)
        if self._listen is not None:
            self._stop, self._listen = self._stack.enter_context(self._listen()), None

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()

    def should_stop(self) -> bool:
        self.is_stopped = self.is_stopped or self._stop()
        return self.is_stopped
