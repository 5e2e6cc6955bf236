"""Why a training process ended, whether a restart is worth it, and the record of each failure.

The kind of a failure comes from the exit code, what the process has recorded, and what the kernel has counted.
`incidents.jsonl` of the run directory has one record per failure.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from common.errors import STOP_SIGNALS, Outcome, TrainingError, print_note
from common.filesystem import write_all
from common.guarded_files import open_append
from runner.engine.device.compile import OUT_OF_MEMORY_TEXTS

# Files with a counter of processes that the kernel has killed for lack of memory: of the control group (versions 2 and
# 1), or of the machine
OOM_COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)
FIRST_SIGNAL_CODE = 128  # a process that exits by itself because of signal n has exit code 128 + n
# Texts in the message of an exception, in the order in which they are looked for
ERROR_TEXTS = (
    ("out_of_memory", ("memoryerror", *OUT_OF_MEMORY_TEXTS)),
    ("data_worker", ("data worker", "dataloader worker")),
    ("device", ("cuda error", "cublas", "cudnn", "nccl", "hip error", "device-side assert", "ecc error")),
    ("peer", ("another rank", "closed by peer", "reset by peer")),
)


class FailureKind(StrEnum):
    KILLED = "killed"  # SIGKILL
    OUT_OF_MEMORY = "out_of_memory"  # the kernel's, a device's, or Python's
    CRASH = "crash"  # another signal: SIGSEGV, SIGBUS, SIGABRT, ...
    HANG = "hang"  # no sign of life
    DATA_WORKER = "data_worker"
    DEVICE = "device"
    PEER = "peer"  # a rank lost another one
    ERROR = "error"  # an exception
    DIVERGED = "diverged"
    STOPPED = "stopped"  # by a signal that only the training process received


@dataclass(frozen=True)
class Failure:
    code: int  # exit code of `rank`, which failed first; negative: killed by this signal
    rank: int
    error: TrainingError
    is_hanging: bool
    stacks: list[str]


def classify_failure(code: int, error: str, outcome: str | None, is_hanging: bool, oom_kills: int) -> FailureKind:
    """Return the kind of a failure.

    `outcome` and `error`: of run.json; `oom_kills`: processes that the kernel has killed for memory meanwhile.
    """
    if is_hanging:
        return FailureKind.HANG
    if code == -signal.SIGKILL:
        return FailureKind.OUT_OF_MEMORY if oom_kills > 0 else FailureKind.KILLED
    if -code in STOP_SIGNALS or code - FIRST_SIGNAL_CODE in STOP_SIGNALS:
        return FailureKind.STOPPED
    if code < 0:
        return FailureKind.CRASH
    if outcome == Outcome.DIVERGED:
        return FailureKind.DIVERGED
    text = error.lower()
    return FailureKind(
        next((kind for kind, texts in ERROR_TEXTS if any(part in text for part in texts)), FailureKind.ERROR)
    )


def count_oom_kills(files: Iterable[Path] = OOM_COUNTERS) -> int:
    """Return how many processes the kernel has killed for lack of memory since it started: of this control group, or
    else of the machine.
    """
    for file in files:
        try:
            lines = file.read_text(encoding="ascii", errors="replace").splitlines()
            return next(int(value) for name, _, value in (line.partition(" ") for line in lines) if name == "oom_kill")
        except (OSError, ValueError, StopIteration):
            continue
    return 0


INCIDENTS_FILE = "incidents.jsonl"


def append_incident(folder: Path, record: dict[str, Any]) -> None:
    """Append a record. A disk that refuses it does not stop the supervisor."""
    try:
        with open_append(folder / INCIDENTS_FILE) as file:
            write_all(file.fileno(), json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
    except OSError as error:
        print_note(f"warning: {INCIDENTS_FILE} cannot be written: {error.strerror or error}")


# A restart would fail alike, or was not wanted
PERMANENT = {
    FailureKind.DIVERGED: "a diverged run diverges again",
    FailureKind.STOPPED: "the training process was asked to stop",
}
MAX_DELAY = 300.0  # seconds between a failure and the restart


@dataclass(frozen=True)
class Decision:
    restarts: bool
    action: str  # one line, for the console and the record
    delay: float = 0.0  # seconds


class RestartPolicy:
    """At most `max_restarts` in a row without a newer checkpoint: a fault that comes back at the same step is
    permanent.

    `counts_all`: progress does not reset the count. The delay doubles with every restart of a row, from `first_delay`
    (seconds) to MAX_DELAY.
    """

    def __init__(self, max_restarts: int, first_delay: float = 0.0, counts_all: bool = False) -> None:
        self._max_restarts, self._first_delay, self._counts_all = max_restarts, first_delay, counts_all
        self._step = -1  # of the newest checkpoint at the last failure
        self._count = 0

    def decide(self, kind: FailureKind, step: int) -> Decision:
        """Return what to do about a failure. `step`: of the newest checkpoint, 0 if there is none."""
        if kind in PERMANENT:
            return Decision(False, f"no restart: {PERMANENT[kind]}")
        if step > self._step and not self._counts_all:
            self._count = 0
        self._step = step
        if self._count >= self._max_restarts:
            return Decision(
                False,
                f"no restart: {self._count} restarts without a newer checkpoint than step {step}"
                if self._count
                else "no restart",
            )
        self._count += 1
        delay = min(MAX_DELAY, self._first_delay * 2.0 ** (self._count - 1))
        origin = f"step {step}" if step else "the start"
        return Decision(
            True,
            f"restart {self._count} of {self._max_restarts} from {origin}" + (f" in {delay:g} s" if delay else ""),
            delay,
        )
