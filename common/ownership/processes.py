"""Identity of a process, also after its pid has been reused. Nothing here raises; what is unknown is None."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IDENTITY = ("host", "pid", "boot_id", "start_ticks")  # fields of process_id()


def process_id() -> dict[str, Any]:
    """Return what identifies this process, also after its pid has been reused."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": boot_id(), "start_ticks": start_ticks(os.getpid())}


def is_same_process(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in IDENTITY)


def is_alive(process: Mapping[str, Any]) -> bool:
    """Return whether the process that `process_id` described is alive. Of a process on another host nothing is known: True."""
    return not is_on_this_host(process) or is_alive_here(process)


def is_alive_here(process: Mapping[str, Any]) -> bool:
    """Return whether the process that `process_id` described is alive on this host. One that has ended, and that its parent has not noticed, is not."""
    if not is_on_this_host(process) or process.get("boot_id") != boot_id():
        return False
    ticks = process.get("start_ticks")
    return _has_pid(process.get("pid")) if ticks is None else ticks == start_ticks(process.get("pid"))


def _has_pid(pid: Any) -> bool:
    """Return whether there is a process `pid`: all that is known without /proc."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, TypeError, OverflowError):
        return False
    return int(pid) > 0


def is_on_this_host(process: Mapping[str, Any]) -> bool:
    return process.get("host") == socket.gethostname()


def boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def start_ticks(pid: Any) -> int | None:
    """Return when the process started (clock ticks since boot), None if it has ended, if there is no such process or no /proc."""
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, TypeError, IndexError):
        return None
