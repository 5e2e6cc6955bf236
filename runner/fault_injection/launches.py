"""Launches of the training command, and the processes of a launch.

A launch is a fork of this process, which has torch imported already, or the command as it is typed. Its processes are
found by their session, in /proc; data workers report themselves.
"""

from __future__ import annotations

import mmap
import multiprocessing.process
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from common.paths import REPO_ROOT
from data.worker_process import DATA_WORKER

PID = struct.Struct("q")
MAX_WORKERS = 500


class WorkerProbe:
    """The data workers that a forked launch has started, in memory that its parent reads."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, PID.size * (MAX_WORKERS + 1))

    def install(self, victim: int = 0, number: int = 0) -> None:
        """Record every data worker that starts, and send the signal `number` to the one that starts as the `victim`-th;
        call it in a fork.
        """
        start = multiprocessing.process.BaseProcess.start

        def recording_start(process: multiprocessing.process.BaseProcess) -> None:
            start(process)
            if process.name.startswith(DATA_WORKER):
                count = min(self._read(0) + 1, MAX_WORKERS)
                self._write(count, process.pid or 0)
                self._write(0, count)
                if count == victim and process.pid:
                    os.kill(process.pid, number)

        setattr(multiprocessing.process.BaseProcess, "start", recording_start)  # noqa: B010  an assignment is no valid type

    def alive(self) -> list[int]:
        pids = [self._read(index) for index in range(1, self._read(0) + 1)]
        return [pid for pid in pids if (fields := _stat_fields(pid)) and fields[0] != "Z"]

    def _read(self, index: int) -> int:
        return PID.unpack_from(self._shared, PID.size * index)[0]

    def _write(self, index: int, value: int) -> None:
        PID.pack_into(self._shared, PID.size * index, value)


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; [] where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _pids() -> list[int]:
    """Return all processes; none on a system without /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def session_pids(leader: int) -> list[int]:
    """Return the processes of the session that `leader` has begun, without zombies and the leader itself."""
    found = [(pid, _stat_fields(pid)) for pid in _pids() if pid != leader]
    return [pid for pid, fields in found if fields and fields[3] == str(leader) and fields[0] != "Z"]


def kill_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


LAUNCH_POLL_SECONDS = 0.002


@dataclass
class Launch:
    """One process of the training command, which leads a session of its own."""

    pid: int
    output: Path  # its stdout and stderr
    started: float = field(default_factory=time.monotonic)
    code: int | None = None  # exit code, or minus the signal that ended it
    is_hanging: bool = False

    def poll(self) -> int | None:
        if self.code is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(status[1])
        return self.code

    def wait(self, timeout: float, until: Callable[[], object] = lambda: False) -> bool:
        """Wait for the end, or for `until()`; return whether that came first.

        A launch that hangs for `timeout` seconds is killed.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if until():
                return True
            if time.monotonic() > deadline:
                self.is_hanging = True
                os.kill(self.pid, signal.SIGKILL)
                deadline += timeout
            time.sleep(LAUNCH_POLL_SECONDS)
        return False

    def send(self, number: int, to_group: bool = False) -> None:
        if self.poll() is None:
            (os.killpg if to_group else os.kill)(self.pid, number)

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""

    def left_processes(self, timeout: float) -> list[int]:
        """Return the processes of the session that are alive `timeout` seconds after its leader, and end them."""
        deadline = time.monotonic() + timeout
        while (left := session_pids(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in left:
            kill_process(pid)
        return left


def import_heavy_libraries() -> None:
    """Import what a training needs, once, before the first fork.

    Nothing is computed: threads would not survive a fork.
    """
    import torch._dynamo  # otherwise the first AdamW imports it, for a second, in every fork

    import runner.engine.build
    import runner.engine.loop  # noqa: F401  imported here so that each fork finds it loaded; no name of it is used

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))


def launch_fork(argv: list[str], output: Path, prepare: Callable[[], object] = lambda: None) -> Launch:
    """Run `python runner/train.py *argv` in a fork, after `prepare()` there."""
    import lm_runner

    def command() -> int:
        sys.argv = [str(REPO_ROOT / "runner" / "train.py"), *argv]
        lm_runner.run_command("train")
        return 0

    return Launch(fork_process(command, output, prepare), output)


def launch_command(argv: list[str], output: Path) -> Launch:
    """Run `python runner/train.py *argv` as it is typed."""

    def command() -> int:
        os.execv(sys.executable, [sys.executable, str(REPO_ROOT / "runner" / "train.py"), *argv])

    return Launch(fork_process(command, output), output)


def fork_process(
    main: Callable[[], int], output: Path, prepare: Callable[[], object] = lambda: None, new_session: bool = True
) -> int:
    """Return the pid of a fork of this process that calls `prepare` and `main` and exits with the code of `main`; its
    output is appended to `output`.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # after a fork the tokenizers would wait for threads of the parent
    try:
        if new_session:
            os.setsid()
        stdin, out = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stdin, 0), os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        prepare()
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        traceback.print_exc()
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        _end_process(code)
    raise AssertionError("_end_process does not return")


def _end_process(code: int) -> None:
    try:
        join_threads()
    finally:
        os._exit(code)


def join_threads() -> None:
    """Wait for the checkpoint writer and flush the output, as at the end of any program."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush(), sys.stderr.flush()
