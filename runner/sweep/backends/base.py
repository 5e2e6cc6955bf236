"""What all backends share: options, the interface of the scheduler, and how a job runs in a worker on another machine."""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from common.errors import FAILED, INTERRUPTED
from common.guarded_files import open_append
from common.settings import check_at_least
from runner.launch import subprocesses
from runner.launch.signals import handled_signals

CONSOLE_LOG = "console.log"  # output of a job, all its attempts; in its run directory


@dataclass
class JobExit:
    """How a job ended. `reason` is set where the backend knows more than the exit code."""

    code: int
    reason: str | None = None


@dataclass
class Backend:
    """Options of every `hydra/launcher`, and how it runs jobs.

    A job is the command line of a process in `run_dir`, which exists; its output goes to `run_dir/console.log`. Each
    backend has `submit`, `poll` and `cancel` of its own.
    """

    _target_: str = "hydra_plugins.lm_runner.JobLauncher"
    workers: Optional[int] = None  # jobs at the same time, 1 or more
    fail_fast: bool = False  # stop the sweep at the first job that failed
    retries: int = 0  # how often a failed job is tried again from its newest checkpoint; a diverged one is not

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_at_least("hydra.launcher.workers", self.workers, 1, example=2)
        check_at_least("hydra.launcher.retries", self.retries, 0, example=1)
        self.capacity: float = self.workers or math.inf  # jobs at the same time

    def check_available(self) -> None:
        """Raise UserError if the package of the backend is missing."""

    def open(self, sweep_dir: Path) -> None:
        """Get ready for the jobs of the sweep in `sweep_dir`."""

    def submit(self, run_dir: Path, command: list[str], env: dict[str, str]) -> Any:
        """Start `python *command` with `env` added to the environment and return a handle."""
        raise NotImplementedError

    def poll(self, handle: Any) -> JobExit | None:
        """Return how the job ended, or None while it runs."""
        raise NotImplementedError

    def cancel(self, handle: Any) -> None:
        """Ask the job to save and exit."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what `open` has taken; all jobs have ended."""


def failed_exit(error: Exception, prefix: str) -> JobExit:
    """Return the end of a job that a cluster could not run, with the last line of its error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return JobExit(FAILED, f"{prefix}: {lines[-1] if lines else type(error).__name__}")


def start_job(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
    """Start `python *command` with its output in `log`."""
    with open_append(log) as out:
        return subprocesses.spawn(command, subprocesses.child_env() | {"PYTHONUNBUFFERED": "1"} | env, out.fileno())


def run_job(command: list[str], env: dict[str, str], log: Path) -> tuple[int, list[int]]:
    """Run `python *command` until it ends, in a worker of a cluster; return its exit code and the signals that arrived
    meanwhile.

    The first signal asks the job to save and exit. The job is a process of its own: one that runs out of memory does
    not kill the worker.
    """
    received: list[int] = []
    process: subprocess.Popen | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if process is not None and not received:
            process.terminate()
        received.append(number)

    is_main = threading.current_thread() is threading.main_thread()  # Python delivers signals to the main thread only
    previous = {
        number: signal.signal(number, forward) for number in ((*handled_signals(), signal.SIGUSR2) if is_main else ())
    }
    try:
        if received:
            return INTERRUPTED, received
        process = start_job(command, env, log)
        if received:  # arrived while the process was being started
            process.terminate()
        # not wait(): Ray sets the signal within the process, which interrupts no system call
        while process.poll() is None:
            time.sleep(subprocesses.POLL_SECONDS)
        return process.returncode, received
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
