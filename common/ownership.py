"""Identity of a process, and a lock by a file that names its owner.

The identity holds after the pid has been reused; what is unknown is None, and nothing raises.

The lock is for file systems without POSIX locks (some NFS and FUSE mounts). `<lock>.owner` belongs to the process that
holds the whole lock, `<lock>.owner-<k>` to one that holds byte k. The files are created with O_EXCL. The file of a
process that has died on this host is removed. A file of a process on another host, or an unreadable one, counts as held.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.filesystem import read_bounded, temp_name, write_all
from common.limits import parse_json

IDENTITY = ("host", "pid", "boot_id", "start_ticks")  # fields of process_id()


def process_id() -> dict[str, Any]:
    """Return what identifies this process, also after its pid has been reused."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": boot_id(),
        "start_ticks": start_ticks(os.getpid()),
    }


def is_same_process(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in IDENTITY)


def is_alive(process: Mapping[str, Any]) -> bool:
    """Return whether the process that `process_id` described is alive.

    Of a process on another host nothing is known: True.
    """
    return not is_on_this_host(process) or is_alive_here(process)


def is_alive_here(process: Mapping[str, Any]) -> bool:
    """Return whether the process that `process_id` described is alive on this host.

    One that has ended, and that its parent has not noticed, is not.
    """
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


def process_stat(pid: Any) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; [] if there is no such process or no /proc."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError, TypeError):
        return []


def start_ticks(pid: Any) -> int | None:
    """Return when the process started (clock ticks since boot), None if it has ended, if there is no such process or no
    /proc.
    """
    fields = process_stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


MAX_OWNER_BYTES = 4096


@dataclass
class OwnerFile:
    """The owner file of this process."""

    lock: Path
    path: Path
    content: bytes  # unique: a file that another process has put in its place differs

    @classmethod
    def acquire(cls, lock: Path, byte: int | None) -> OwnerFile:
        """Take the whole lock (`byte` None) or one byte of it. Raises BlockingIOError if it is held."""
        is_held = BlockingIOError(errno.EAGAIN, "locked by another process", str(lock))
        if live_owners(lock, byte):
            raise is_held
        path = _path(lock, byte)
        content = json.dumps({**process_id(), "token": secrets.token_hex(8)}).encode()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError:
            raise is_held from None
        try:
            write_all(fd, content)
            os.fsync(fd)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        owner = cls(lock, path, content)
        if live_owners(lock, byte, own=path):  # another process has taken a part of it meanwhile
            owner.release()
            raise is_held
        return owner

    def is_intact(self) -> bool:
        return _read(self.path) == self.content

    def shrink(self) -> None:
        """Keep byte 0 only."""
        os.rename(self.path, _path(self.lock, 0))
        self.path = _path(self.lock, 0)

    def release(self) -> None:
        if self.is_intact():
            with suppress(OSError):
                os.unlink(self.path)


def is_owner_file(lock_name: str, name: str) -> bool:
    return name.startswith(f"{lock_name}.owner")


def live_owners(lock: Path, byte: int | None = None, own: Path | None = None) -> list[Path]:
    """Return the owner files that exclude taking `byte` (None: the whole lock), after removing those of dead processes."""
    paths = {lock.parent / name for name in os.listdir(lock.parent) if is_owner_file(lock.name, name)} - {own}
    if byte is not None:
        paths &= {_path(lock, None), _path(lock, byte)}
    return [path for path in paths if not _remove_if_dead(path)]


def _remove_if_dead(path: Path) -> bool:
    """Remove the owner file of a process that has died on this host; return whether there is none any more."""
    content = _read(path)
    if content is None:
        return not os.path.lexists(path)
    try:
        owner = parse_json(content)
    except ValueError:
        return False
    if not isinstance(owner, dict) or not owner or is_alive(owner):
        return False
    moved = path.with_name(temp_name("del", path.name))
    try:
        os.rename(path, moved)
    except FileNotFoundError:
        return True
    if _read(moved) != content:  # another process has replaced it meanwhile: put it back
        os.rename(moved, path)
        return False
    os.unlink(moved)
    return True


def _read(path: Path) -> bytes | None:
    try:
        return read_bounded(path, MAX_OWNER_BYTES)
    except OSError:
        return None


def _path(lock: Path, byte: int | None) -> Path:
    return lock.with_name(f"{lock.name}.owner" + ("" if byte is None else f"-{byte}"))
