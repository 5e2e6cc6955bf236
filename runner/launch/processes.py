"""A program of ours in a process of its own, which does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

SHARE = "RUNNER_THREADS"  # how many cores of the machine are a job's, where several run at once
PR_SET_PDEATHSIG = 1


def surroundings() -> dict[str, str]:
    """Our environment, without what the door sets for this process only."""
    return {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}


def begin(program: list[str], environment: dict[str, str], out: int | None) -> subprocess.Popen:
    """A program of ours in a process of its own, which does not outlive us; `out` is where it speaks, None where we do."""
    return subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=environment,
        process_group=0,  # Ctrl-C in a terminal reaches us alone; we pass it on, once
        preexec_fn=end_with_parent(os.getpid()),
    )


def end_with_parent(parent: int) -> Callable[[], None]:
    """Should the parent be killed, whoever calls this is asked to save and leave. Linux only; elsewhere it trains to its end, and its lock is waited for."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before we could ask
            os._exit(128 + signal.SIGTERM)

    return ask


def run_and_end(main: Callable[[], int | None]) -> NoReturn:
    """`main`, and then the end of this process with its exit code, without the end that Python makes.

    A process group is never destroyed, and its threads free tensors whenever they come to it: one that asks for an interpreter that is
    going down is ended by it in the midst of C++, which aborts the process. `main` has closed what must be closed, and waits for threads itself.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as left:
        code = left.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed before we began
            stream.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
