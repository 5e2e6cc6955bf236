"""Exclusive POSIX locks on files (lockf).

The kernel frees such a lock when its process ends, however it ends, and forked children do not inherit it: data workers that
outlive a killed trainer do not hold it. Two properties of POSIX need care: closing *any* descriptor of the file frees the lock
of the process, and a process is granted a lock that it already holds. Hence a lock file has no content, nothing but this module
opens it, only its holder deletes it, and a second acquire in the same process fails.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

_holders: dict[Path, int] = {}  # lock file -> pid: a forked child sees the entry, but does not hold the lock


class FileLock:
    """Lock on a file, or on a range of its bytes. Held until `release` or the end of the process."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    @classmethod
    def acquire(cls, path: Path, start: int = 0, length: int = 0, wait: bool = False) -> FileLock:
        """Lock the bytes [start, start + length) of `path`; length 0: all bytes from `start` on.

        Raises BlockingIOError if this process holds a lock on the file, or if another one does and `wait` is False; any other
        OSError if the file cannot be opened or locked.
        """
        path = _absolute(path)
        if _is_held_here(path):
            raise BlockingIOError(errno.EAGAIN, "locked by this process", str(path))
        fd = _lock(path, start, length, wait)
        while not _is_file(path, fd):  # its holder has deleted it meanwhile
            os.close(fd)
            fd = _lock(path, start, length, wait)
        _holders[path] = os.getpid()
        return cls(path, fd)

    def shrink(self, length: int) -> None:
        """Keep the first `length` bytes locked only, so that other processes can lock the bytes behind them."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 0, length)

    def release(self, delete: bool = False) -> None:
        """`delete`: remove the file, too. A process that waits for the lock creates it again."""
        if delete:
            with suppress(OSError):
                os.unlink(self.path)
        _holders.pop(self.path, None)
        os.close(self._fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(path: Path, start: int, length: int, wait: bool) -> int:
    """Return a descriptor of the locked file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), length, start)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EACCES:  # POSIX allows EACCES or EAGAIN for a lock that is held
            raise BlockingIOError(errno.EAGAIN, "locked by another process", str(path)) from error
        raise
    return fd


def _is_file(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def is_file_locked(path: Path) -> bool:
    """Return whether a process holds a lock on any byte of `path`. The file is not created."""
    path = _absolute(path)
    if _is_held_here(path):
        return True  # opening and closing the file would free the lock
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    finally:
        os.close(fd)
    return False


def _absolute(path: Path) -> Path:
    return path.parent.resolve() / path.name


def _is_held_here(path: Path) -> bool:
    return _holders.get(path) == os.getpid()
