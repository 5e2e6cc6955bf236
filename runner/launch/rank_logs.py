"""logs/rank<k>.log: what every rank but the first says, all its attempts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, TextIO

from common.filesystem import make_dirs

LOGS_DIR = "logs"
STACKS_MARK = b"Timeout ("  # so begins what faulthandler says of a rank that hangs
TAIL_LINES, MAX_STACK_LINES = 30, 200  # lines that are told of an end, and of stacks
MAX_LOG_BYTES = 1 << 20  # bytes of a log we look at


class RankLog:
    """The log of one rank, from this attempt on."""

    def __init__(self, folder: Path, rank: int, count: int, attempt: int) -> None:
        self.rank, self.path = rank, folder / LOGS_DIR / f"rank{rank}.log"
        self._title = f"--- attempt {attempt}, rank {rank} of {count}, {datetime.now().astimezone().isoformat(timespec='seconds')}\n"
        self._from = 0

    def open(self) -> BinaryIO:
        out = open(self.path, "ab")  # noqa: SIM115  the caller closes it
        out.write(self._title.encode())
        out.flush()
        self._from = out.tell()
        return out

    def tail(self) -> list[str]:
        """What it said last."""
        return self._said().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]

    def ending(self) -> list[str]:
        """What it said of its end, where it came to saying something; else what it said last."""
        lines = self.tail()
        starts = [place for place, line in enumerate(lines) if line.startswith("Traceback (")] or [
            p for p, line in enumerate(lines) if line.startswith("error: ")
        ]
        return lines[starts[0] :] if starts else lines

    def stacks(self) -> list[str]:
        """Where it stood when it had waited too long; empty where it did not."""
        _, found, stacks = self._said().partition(STACKS_MARK)
        return (found + stacks).decode("utf-8", "replace").splitlines()[:MAX_STACK_LINES]

    def _said(self) -> bytes:
        try:
            with open(self.path, "rb") as log:
                log.seek(max(self._from, os.path.getsize(self.path) - MAX_LOG_BYTES))
                return log.read()
        except OSError:
            return b""


@contextmanager
def redirect_stdio_to(log: RankLog) -> Iterator[TextIO]:
    """What this process says goes into its log; yields where it went before."""
    make_dirs(log.path.parent)
    terminal = os.fdopen(os.dup(2), "w")
    with terminal, log.open() as out:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(out.fileno(), number)
        yield terminal
        sys.stdout.flush()


def print_rank_lines(rank: int, lines: list[str], stream: TextIO | None = None) -> None:
    for line in lines:
        print(f"[rank {rank}] {line}", file=stream or sys.stderr, flush=True)
