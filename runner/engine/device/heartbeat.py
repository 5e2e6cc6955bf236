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


class Heartbeat:
    def __init__(self, path: Path) -> None:
        """`path` has RECORD.size bytes."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, RECORD.size)
        finally:
            os.close(fd)
        self._count, self._step, self.activity = 0, 0, b""

    def beat(self) -> None:
        self._count += 1
        self._write()

    def enter(self, activity: bytes, step: int | None = None) -> None:
        self.activity, self._step = activity, self._step if step is None else step
        self._write()

    def _write(self) -> None:
        RECORD.pack_into(self._memory, 0, self._count, time.monotonic(), self._step, self.activity)


_heartbeat: Heartbeat | None = None


def start_heartbeat() -> None:
    """Count from now on, if a supervisor watches this process."""
    global _heartbeat
    if path := os.environ.get(HEARTBEAT_ENV):
        _heartbeat = Heartbeat(Path(path))


def beat() -> None:
    """Call it between two pieces of work that end by themselves: a micro-batch, a generated token."""
    if _heartbeat is not None:
        _heartbeat.beat()


def enter(activity: str, step: int | None = None) -> None:
    """Record what this rank does from now on, e.g. "in an evaluation", and after which step."""
    if _heartbeat is not None:
        _heartbeat.enter(activity.encode(), step)


@contextmanager
def during(activity: str) -> Iterator[None]:
    """Record `activity` while the block runs, then the previous one."""
    before = b"" if _heartbeat is None else _heartbeat.activity
    enter(activity)
    try:
        yield
    finally:
        if _heartbeat is not None:
            _heartbeat.enter(before)


def read_sign(path: Path) -> Sign:
    """Return what a rank has written; zeros if it cannot be read."""
    try:
        beats, changed, step, activity = RECORD.unpack(read_bounded(path, RECORD.size))
    except (OSError, struct.error):
        return Sign(0, 0.0, 0, "")
    return Sign(beats, changed, step, activity.rstrip(b"\0").decode("ascii", "replace"))
