"""Child processes of this program (ranks, jobs of a sweep): start them, end with the parent, explain how they ended;
and logs/rank<k>.log of a run directory, the output of every rank but rank 0, over all attempts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from common.errors import print_safely
from common.filesystem import make_dirs
from common.guarded_files import last_lines, open_append

POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1
LOGS_DIR = "logs"
STACKS_MARK = "Timeout ("  # first bytes of the report that faulthandler writes for a rank that hangs
TAIL_LINES, MAX_STACK_LINES = 30, 200
MAX_LOG_BYTES = 1 << 20  # read from the end of a log


def spawn(
    program: list[str], variables: dict[str, str], out: int | None, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen:
    """Start `python *program` in a process group of its own, with `variables` added to the environment.

    `out` is the descriptor for stdout and stderr; None: those of this process.
    """
    # with it every error ends with code 1, and the codes of children are read
    inherited = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    return subprocess.Popen(
        [sys.executable, *program],
        stdin=stdin,
        stdout=out,
        stderr=out,
        env=inherited | {"PYTHONUNBUFFERED": "1"} | variables,
        process_group=0,  # Ctrl-C reaches only this process, which forwards it once
        preexec_fn=die_with_parent(os.getpid()),
    )


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return a function that makes the calling process receive SIGTERM when process `parent` dies (Linux; on other
    systems it trains to its end).
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: the function runs between fork and exec

    def request_signal() -> None:
        # the handler of the parent would swallow a SIGTERM that comes before exec
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(128 + signal.SIGTERM)

    return request_signal


def failure_reason(code: int, fields: dict[str, Any], lines: list[str]) -> str:
    """Return one line that says why a child failed: its signal, the error in run.json (`fields`), or the last error in
    its output `lines`.
    """
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (
            " (out of memory, or kill -9)" if code == -signal.SIGKILL else ""
        )
    if fields.get("status") == "failed" and fields.get("error"):
        return " ".join(str(fields["error"]).split())
    output = [line.strip() for line in lines if line.strip()]
    start = next((index for index, line in enumerate(output) if line.startswith("error: ")), None)
    if start is None:
        return output[-1] if output else f"exit code {code}"
    where = next((index for index, line in enumerate(output) if index > start and line.startswith("where:")), None)
    reason = " ".join(output[start : where or start + 1]).removeprefix("error: ")
    return f"{reason} ({output[where].removeprefix('where:').strip()})" if where else reason


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
