"""logs/rank<k>.log of a run directory: the output of every rank but rank 0, over all attempts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, TextIO

from common.errors import print_safely
from common.filesystem import make_dirs
from common.guarded_files import last_lines, open_append

LOGS_DIR = "logs"
STACKS_MARK = "Timeout ("  # first bytes of the report that faulthandler writes for a rank that hangs
TAIL_LINES, MAX_STACK_LINES = 30, 200
MAX_LOG_BYTES = 1 << 20  # read from the end of a log


class RankLog:
    """The log of one rank, from the current attempt on."""

    def __init__(self, folder: Path, rank: int, world_size: int, attempt: int) -> None:
        self.rank, self.path = rank, folder / LOGS_DIR / f"rank{rank}.log"
        self._header = f"--- attempt {attempt}, rank {rank} of {world_size}, {datetime.now().astimezone().isoformat(timespec='seconds')}\n"
        self._start = 0  # byte at which this attempt begins

    def open(self) -> BinaryIO:
        """Append the header of this attempt and return the file; the caller closes it."""
        out = open_append(self.path)
        out.write(self._header.encode())
        self._start = os.fstat(out.fileno()).st_size
        return out

    def tail(self) -> list[str]:
        return self._lines()[-TAIL_LINES:]

    def last_error_lines(self) -> list[str]:
        """Return the last lines from the first traceback on, or else from the first `error:` on, or else all of them."""
        lines = self.tail()
        for mark in ("Traceback (", "error: "):
            if starts := [index for index, line in enumerate(lines) if line.startswith(mark)]:
                return lines[starts[0] :]
        return lines

    def stacks(self) -> list[str]:
        """Return the stack traces of a rank that waited for longer than distributed.timeout; empty for the others."""
        _, mark, stacks = "\n".join(self._lines()).partition(STACKS_MARK)
        return (mark + stacks).splitlines()[:MAX_STACK_LINES]

    def _lines(self) -> list[str]:
        return last_lines(self.path, MAX_LOG_BYTES, self._start)


@contextmanager
def redirect_stdio_to(log: RankLog) -> Iterator[TextIO]:
    """Send stdout and stderr of this process to `log`; yield the previous stderr."""
    make_dirs(log.path.parent)
    terminal = os.fdopen(os.dup(2), "w")
    with terminal, log.open() as out:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(out.fileno(), number)
        yield terminal
        sys.stdout.flush()


def print_rank_lines(rank: int, lines: list[str], stream: TextIO | None = None) -> None:
    """Print `lines` to `stream` (stderr), each with the number of the rank in front."""
    for line in lines:
        print_safely(f"[rank {rank}] {line}", stream or sys.stderr)
