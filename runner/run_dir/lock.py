"""The lock of a run's folder, held for as long as any process of one launch lives.

It is a POSIX one (lockf) on `.lock`. Unlike flock it is not inherited by forked children, so data workers that outlive a killed
trainer do not hold it. Its price: closing *any* descriptor of `.lock` in this process lets go of it. So the file is opened once,
here, nothing is ever read from it, and who holds it stands in a file of its own.

A launch takes the whole file. Before it starts ranks it keeps byte 0 only, and each rank holds a byte behind it: whoever comes next
asks for the whole file again, and is refused until the last of them is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.filesystem import make_dirs, read_bounded
from runner.run_dir import provenance

LOCK_FILE, OWNER_FILE = ".lock", ".owner.json"
MAX_JSON_BYTES = 16 << 20  # bytes of a JSON file we believe

_held: dict[Path, int] = {}  # locks of this process: POSIX would grant it the same lock twice


def acquire(folder: Path) -> int:
    """The descriptor that holds the lock for as long as it is open, or a refusal that names who holds it."""
    try:
        make_dirs(folder)
        return _acquire_range(folder, length=0, start=0)  # 0: to the end, wherever that is
    except OSError as error:
        raise folder_unusable_error(folder, error) from error


def shrink(lock: int, keep: int) -> None:
    """From here on hold the first `keep` bytes only: those behind them are for ranks."""
    fcntl.lockf(lock, fcntl.LOCK_UN, 0, keep)


def acquire_rank(folder: Path, rank: int) -> int:
    """As `take`, for a rank of the launch that holds the folder: its own byte."""
    try:
        return _acquire_range(folder, length=1, start=rank + 1)
    except OSError as error:
        raise folder_unusable_error(folder, error) from error


def _acquire_range(folder: Path, length: int, start: int) -> int:
    path = folder.resolve() / LOCK_FILE
    if _held.get(path) == os.getpid():
        raise lock_busy_error(folder)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise lock_busy_error(folder) from error
        raise
    _held[path] = os.getpid()
    return lock


def release(folder: Path, lock: int) -> None:
    _held.pop(folder.resolve() / LOCK_FILE, None)
    os.close(lock)


def lock_busy_error(folder: Path) -> ValueError:
    return UserError(
        f"this run is being trained by {describe_holder(folder)}", str(folder), "wait for it to end, or place this one elsewhere with hydra.run.dir=DIR"
    )


def describe_holder(folder: Path) -> str:
    """Who says in the folder that it is theirs."""
    try:
        owner = json.loads(read_bounded(folder / OWNER_FILE, MAX_JSON_BYTES))
        since = f"on {owner.get('host')} since {owner.get('since')}"
        if provenance.is_alive(owner):
            return f"process {owner.get('pid')} {since}"
        left = [str(rank["pid"]) for rank in owner.get("ranks", []) if provenance.is_alive(rank)]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        left = []  # it holds the lock, but has not come to saying who it is
    return f"process {', '.join(left)} {since}: its launcher is gone, it saves and leaves" if left else "another process"


def folder_unusable_error(folder: Path, error: OSError) -> ValueError:
    return UserError(f"a run cannot live here: {error.strerror or error}", str(folder), "place it elsewhere with hydra.run.dir=DIR")


def describe_processes(pids: list[int]) -> list[dict[str, Any]]:
    """Processes that we have started, as `origin.process` describes this one."""
    return [{**provenance.process_id(), "pid": pid, "start_ticks": provenance.start_ticks(pid)} for pid in pids]


def is_locked(run: Path) -> bool:
    """Whether a process still trains there, one that an earlier driver has left behind."""
    try:
        lock = os.open(run / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    finally:
        os.close(lock)
    return False
