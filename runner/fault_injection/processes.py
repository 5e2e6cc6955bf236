"""Processes of a launch: its session, from /proc, and its data workers, which it reports itself."""

from __future__ import annotations

import mmap
import multiprocessing.process
import os
import signal
import struct
from contextlib import suppress
from pathlib import Path

PID = struct.Struct("q")
MAX_WORKERS = 500


class WorkerProbe:
    """The data workers that a forked launch has started, in memory that its parent reads."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, PID.size * (MAX_WORKERS + 1))

    def install(self, victim: int = 0, number: int = 0) -> None:
        """Record every data worker that starts, and send the signal `number` to the one that starts as the `victim`-th; call it in a fork."""
        start = multiprocessing.process.BaseProcess.start

        def recording_start(process: multiprocessing.process.BaseProcess) -> None:
            is_data_worker = getattr(getattr(process, "_target", None), "__module__", "").startswith("data.batching")  # start() deletes _target
            start(process)
            if is_data_worker:
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
