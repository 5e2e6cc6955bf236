"""A program of ours in a process of its own, which does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

THREADS_ENV = "RUNNER_THREADS"  # how many cores of the machine are a job's, where several run at once
PR_SET_PDEATHSIG = 1


def child_env() -> dict[str, str]:
    """Our environment, without what the door sets for this process only."""
    return {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}


def spawn(program: list[str], environment: dict[str, str], out: int | None) -> subprocess.Popen:
    """A program of ours in a process of its own, which does not outlive us; `out` is where it speaks, None where we do."""
    return subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=environment,
        process_group=0,  # Ctrl-C in a terminal reaches us alone; we pass it on, once
        preexec_fn=die_with_parent(os.getpid()),
    )


def die_with_parent(parent: int) -> Callable[[], None]:
    """Should the parent be killed, whoever calls this is asked to save and leave. Linux only; elsewhere it trains to its end, and its lock is waited for."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before we could ask
            os._exit(128 + signal.SIGTERM)

    return ask


def run_then_hard_exit(main: Callable[[], int | None]) -> NoReturn:
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


POLL_SECONDS = 0.05  # seconds
LAST_LINES = 12


def last_lines(log: Path) -> list[str]:
    """What a job said last."""
    with open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - (1 << 16)))
        return file.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:]


def failure_reason(code: int, run: dict, lines: list[str]) -> str:
    """How a job ended that has failed; one line."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (" (out of memory, or kill -9)" if code == -signal.SIGKILL else "")
    if run.get("status") == "failed" and run.get("error"):
        return " ".join(str(run["error"]).split())
    said = [line.strip() for line in lines if line.strip()]
    at = next((place for place, line in enumerate(said) if line.startswith("error: ")), None)
    if at is None:
        return said[-1] if said else f"exit code {code}"
    return said[at].removeprefix("error: ") + "".join(
        f" ({line.removeprefix('where:').strip()})" for line in said[at + 1 : at + 2] if line.startswith("where:")
    )
