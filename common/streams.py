"""Output streams that survive a closed pipe or terminal."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _PipeWriter(io.FileIO):
    """Discards what is written once the reader has closed the pipe, as `tee` does at Ctrl-C."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def ignore_broken_pipe() -> None:
    """Replace stdout and stderr so that a closed pipe or terminal does not end this process; the files of the run have
    every line.
    """
    open_standard_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # not a stream that a caller has installed
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            raw = _PipeWriter(stream.fileno(), "w", closefd=False)
            is_line_buffered = stream.line_buffering or stream.write_through
            setattr(
                sys,
                name,
                io.TextIOWrapper(
                    io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=is_line_buffered
                ),
            )


def open_standard_streams() -> None:
    """Open /dev/null as standard input, output or error where the caller has closed it: the next file of the run would
    get its descriptor, and the output of libraries and children.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and not _is_open(descriptor):
            null = os.open(os.devnull, os.O_RDWR)
            if null == descriptor:
                os.set_inheritable(null, True)
            else:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(
                sys,
                name,
                open(
                    descriptor,
                    "r" if descriptor == 0 else "w",
                    closefd=False,
                    encoding="utf-8",
                    errors="backslashreplace",
                ),
            )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
