"""FIXME runner.tracking.progress."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from runner.tracking.console import format_seconds, strip_control

if TYPE_CHECKING:
    pass


class _ClosedPipe(io.FileIO):
    """A stream whose reader may go away, as `tee` does at Ctrl-C: then nobody reads on, and nothing fails for it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def ignore_broken_pipe() -> None:
    """From here on no lost pipe or terminal ends this program; what it has to say stands in its files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):  # not where somebody has put one of their own
            raw = _ClosedPipe(stream.fileno(), "w", closefd=False)
            told_at_once = stream.line_buffering or stream.write_through
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=told_at_once))


class ProgressMeter:
    """How far a long preparation is: called with (bytes done, bytes in all, rows done). What is over in two seconds shows nothing."""

    PATIENCE, EVERY = 2.0, 10.0  # seconds before the first word, and between two lines where there is no terminal

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title, self._stream = strip_control(title), stream or sys.stderr
        self._began = self._told = time.monotonic()

    def __enter__(self) -> ProgressMeter:
        return self

    def __call__(self, done: int, total: int, rows: int) -> None:
        now, terminal = time.monotonic(), self._stream.isatty()
        seconds = now - self._began
        if seconds < self.PATIENCE or (not terminal and now - self._told < self.EVERY and self._told > self._began):
            return
        self._told = now
        share = min(done / max(total, 1), 1.0)
        eta = format_seconds(seconds / share - seconds) if share else "?"
        line = f"{self._title}: {100 * share:.0f}%, {rows:,} rows, {rows / seconds:,.0f} rows/s, eta {eta}"
        print(f"\r{line}\x1b[K" if terminal else line, end="" if terminal else "\n", file=self._stream, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._stream.isatty() and self._told > self._began:
            print(file=self._stream)
