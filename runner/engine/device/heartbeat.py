"""Sign of life of a rank: a counter, and what the rank does now, in a small file that the launcher reads. To write it
is no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from common.filesystem import read_bounded

HEARTBEAT_ENV = "RUNNER_HEARTBEAT"  # file of the record; unset: nothing watches this process
# counter, time of the last change (CLOCK_MONOTONIC: the same for all processes of a machine), step, activity
RECORD = struct.Struct("<Qdq64s")


class Sign(NamedTuple):
    """What a rank has written last."""

    beats: int
    time: float
    step: int
    activity: str


@dataclass(eq=False)
class Heartbeat:
    """The record of a process; nothing reads it before `write_to`."""

    _memory: bytearray | mmap.mmap = field(default_factory=lambda: bytearray(RECORD.size))
    _count: int = 0
    _step: int = 0
    _activity: str = ""

    def write_to(self, path: Path) -> None:
        """Count from now on, in a file of RECORD.size bytes."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._memory, self._count = mmap.mmap(fd, RECORD.size), 0
        finally:
            os.close(fd)

    def beat(self) -> None:
        """Call it between two pieces of work that end by themselves: a micro-batch, a generated token."""
        self._count += 1
        self.enter(self._activity)

    def enter(self, activity: str, step: int | None = None) -> None:
        """Record what this rank does from now on, e.g. "in an evaluation", and after which step."""
        self._activity, self._step = activity, self._step if step is None else step
        RECORD.pack_into(self._memory, 0, self._count, time.monotonic(), self._step, activity.encode())

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Record `activity` while the block runs, then the previous one."""
        before = self._activity
        self.enter(activity)
        try:
            yield
        finally:
            self.enter(before)


HEARTBEAT = Heartbeat()  # of this process
beat, enter, during = HEARTBEAT.beat, HEARTBEAT.enter, HEARTBEAT.during


def start_heartbeat() -> None:
    """Count from now on, if a supervisor watches this process."""
    if path := os.environ.get(HEARTBEAT_ENV):
        HEARTBEAT.write_to(Path(path))


def read_sign(path: Path) -> Sign:
    """Return what a rank has written; zeros if it cannot be read."""
    try:
        beats, changed, step, activity = RECORD.unpack(read_bounded(path, RECORD.size))
    except (OSError, struct.error):
        return Sign(0, 0.0, 0, "")
    return Sign(beats, changed, step, activity.rstrip(b"\0").decode("ascii", "replace"))
