"""Child processes of this program (ranks, jobs of a sweep): start them, end with the parent, explain how they ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1


def child_env() -> dict[str, str]:
    """Return the environment for a child, without HYDRA_FULL_ERROR, which the command line interface sets for its own
    process.
    """
    return {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}


def spawn(program: list[str], environment: dict[str, str], out: int | None) -> subprocess.Popen:
    """Start `python *program` in a process group of its own.

    `out` is the descriptor for stdout and stderr; None: those of this process.
    """
    return subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=environment,
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


def run_then_hard_exit(main: Callable[[], int | None]) -> NoReturn:
    """Run `main`, flush, then `os._exit(code)`.

    Interpreter shutdown is skipped: threads of a torch process group that free tensors while Python finalises abort the
    process. `main` itself closes files and joins threads.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the parent closed it
            stream.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


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
    reason, setting = output[start].removeprefix("error: "), "".join(output[start + 1 : start + 2])
    return f"{reason} ({setting.removeprefix('where:').strip()})" if setting.startswith("where:") else reason
