"""Commands in a forked process that is killed at its n-th change of the file system: just before it, or for a new file just after it was created."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

KILLED = 137
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
CREATES = os.O_CREAT | os.O_TRUNC


def run_in_fork(action: Callable[[], object], root: Path, kill_at: int = -1, after_creation: bool = False) -> tuple[int, int, str]:
    """Run `action` in a forked process, and kill it at change number `kill_at` below `root` (-1: never).

    Return (exit code, number of changes, output). With `after_creation` a file that would be created exists, empty.
    """
    reader, writer = os.pipe()
    output = root.parent / "output.txt"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            counter = install_counter(root, kill_at, after_creation)
            try:
                action()
                code = 0
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 0
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(writer, str(counter[0]).encode())
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader) as pipe:
        changes = pipe.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), int(changes or 0), output.read_text()


def install_counter(root: Path, kill_at: int, after_creation: bool) -> list[int]:
    """Count the changes below `root` in a list of one number."""
    counter, prefix = [0], str(root)

    def hook(event: str, arguments: tuple) -> None:
        is_open = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if not (is_open or event in CHANGES) or not str(arguments[0]).startswith(prefix):
            return
        if counter[0] == kill_at:
            counter[0] += 1  # the open below is an event, too
            if is_open and after_creation and arguments[2] & CREATES:
                os.close(os.open(arguments[0], os.O_WRONLY | arguments[2] & CREATES))
            os._exit(KILLED)
        counter[0] += 1

    sys.addaudithook(hook)
    return counter
