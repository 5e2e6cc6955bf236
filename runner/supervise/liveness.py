"""Whether the ranks of a training are alive: each counts its micro-batches in a file. A rank that stops counting is made to write its stacks."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from common.guarded_files import read_from
from runner.engine.device.heartbeat import HEARTBEAT_ENV, RECORD, Sign, read_sign

STACKS_ENV = "RUNNER_STACKS"  # file for the stacks that faulthandler writes at a crash
CHECK_SECONDS = 10.0
MAX_STACKS_BYTES = 1 << 16
MAX_STACKS_LINES = 60
TICKS = os.sysconf("SC_CLK_TCK")
BUSY_SHARE = 0.01  # of one core; a process that waits for ever uses less


class Liveness:
    """The files of the ranks of one attempt, in a private folder of the system: the run directory may be on a full or slow disk."""

    def __init__(self, count: int, hang_seconds: float) -> None:
        """`hang_seconds`: without a sign of life; 0: hangs are not looked for."""
        self._folder = tempfile.TemporaryDirectory(prefix="lm-runner-supervise-")
        self._heartbeats = [Path(self._folder.name) / f"heartbeat{rank}" for rank in range(count)]
        self._stacks = [Path(self._folder.name) / f"stacks{rank}" for rank in range(count)]
        self._seconds = hang_seconds
        now = time.monotonic()
        self._counts, self._alive_at, self._checked_at = [0] * count, [now] * count, now
        self._cpu_seconds = [0.0] * count
        for file in self._heartbeats:
            file.write_bytes(bytes(RECORD.size))

    def environment(self, rank: int) -> dict[str, str]:
        return {HEARTBEAT_ENV: str(self._heartbeats[rank]), STACKS_ENV: str(self._stacks[rank])}

    def hanging_rank(self, processes: Sequence[subprocess.Popen]) -> int | None:
        """Return the rank that has given no sign of life for too long, the one with the smallest count if several have not; None: no rank.

        Before its first step is done (imports, tokenizing, compilation) a process that computes is alive, too.
        """
        now = time.monotonic()
        if not self._seconds or now - self._checked_at < min(CHECK_SECONDS, self._seconds / 4):
            return None
        elapsed, self._checked_at = now - self._checked_at, now
        if elapsed > max(CHECK_SECONDS, self._seconds) / 2 + CHECK_SECONDS:  # this process was stopped meanwhile, and perhaps the ranks with it
            self._alive_at = [now] * len(processes)
        for rank, process in enumerate(processes):
            sign = read_sign(self._heartbeats[rank])
            used = _cpu_seconds(process.pid) if sign.step == 0 else 0.0
            is_starting = used - self._cpu_seconds[rank] > BUSY_SHARE * elapsed
            if sign.beats != self._counts[rank] or is_starting or process.returncode is not None:
                self._alive_at[rank] = now
            self._counts[rank], self._cpu_seconds[rank] = sign.beats, used
        hanging = [rank for rank, alive_at in enumerate(self._alive_at) if now - alive_at > self._seconds]
        return min(hanging, key=lambda rank: self._counts[rank]) if hanging else None

    def signs(self) -> list[Sign]:
        """Return what each rank has written last."""
        return [read_sign(file) for file in self._heartbeats]

    def request_stacks(self, processes: Sequence[subprocess.Popen]) -> None:
        """Make the ranks write the stacks of all their threads, and end."""
        for process in processes:
            if process.poll() is None:
                with suppress(OSError):
                    process.send_signal(signal.SIGABRT)
                    process.send_signal(signal.SIGCONT)  # it may be stopped

    def stacks(self, rank: int) -> list[str]:
        """Return the stacks that `rank` has written, at a crash or on request."""
        try:
            return read_from(self._stacks[rank], 0, MAX_STACKS_BYTES).decode("utf-8", "replace").splitlines()[:MAX_STACKS_LINES]
        except OSError:
            return []

    def close(self) -> None:
        self._folder.cleanup()


def write_stacks_at_a_crash() -> None:
    """Have this process write the stacks of its threads to the supervisor's file when a signal such as SIGSEGV or SIGABRT ends it."""
    if path := os.environ.get(STACKS_ENV):
        faulthandler.enable(open(path, "w"))  # open until the process ends


def _cpu_seconds(group: int) -> float:
    """Return the processor time that the living processes of a process group have used; 0 where there is no /proc."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # the process has ended meanwhile
            fields = file.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return ticks / TICKS
