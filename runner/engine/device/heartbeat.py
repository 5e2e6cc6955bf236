"""Sign of life of a rank: a counter in a small file that its supervisor reads. To count is one write to mapped memory, no system call."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from common.filesystem import read_bounded

HEARTBEAT_ENV = "RUNNER_HEARTBEAT"  # file of the counter; unset: there is no supervisor
COUNTER = struct.Struct("<Q")


class Heartbeat:
    def __init__(self, path: Path) -> None:
        """`path` has COUNTER.size bytes."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, COUNTER.size)
        finally:
            os.close(fd)
        self._count = 0

    def beat(self) -> None:
        self._count += 1
        COUNTER.pack_into(self._memory, 0, self._count)


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


def read_heartbeat(path: Path) -> int:
    """Return the counter in `path`, 0 if it cannot be read."""
    try:
        return int(COUNTER.unpack(read_bounded(path, COUNTER.size))[0])
    except (OSError, struct.error):
        return 0
