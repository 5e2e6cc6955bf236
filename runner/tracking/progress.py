"""Progress of long preparations, and output streams that survive a closed pipe."""

from __future__ import annotations

import io
import os
import sys
import time
from typing import Any, TextIO

from common.errors import strip_control
from runner.tracking.console import format_seconds


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
