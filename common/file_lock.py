"""Exclusive POSIX locks on files (lockf).

The kernel frees such a lock when its process ends, however it ends, and forked children do not inherit it: data workers
that outlive a killed trainer do not hold it. Two properties of POSIX need care: closing *any* descriptor of the file
frees the lock of the process, and a process is granted a lock that it already holds. Hence a lock file has no content,
nothing but this module opens it, only its holder deletes it, and a second acquire in the same process fails.

A file system without such locks gets an owner file beside the lock file (common/ownership.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.filesystem import add_weaker_promise
from common.ownership import OwnerFile, live_owners

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
NO_LOCKS_PROMISE = "this file system has no locks: a file names the process that writes here; one that died on another host must be removed by hand (*.owner)"

WAIT_POLL_SECONDS = 0.2  # between two attempts to take a lock that is held
FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid
_holders: dict[Path, int] = {}  # lock file -> pid: a forked child sees the entry, but does not hold the lock


@dataclass(eq=False)
class FileLock:
    """Lock on a file, or on a range of its bytes. Held until `release` or the end of the process."""

    path: Path
    _fd: int
    _start: int
    _length: int
    _owner: OwnerFile | None  # on a file system without locks

    @classmethod
    def acquire(cls, path: Path, start: int = 0, length: int = 0, wait: bool = False) -> FileLock:
        """Lock the bytes [start, start + length) of `path`; length 0: all bytes from `start` on.

        Raises BlockingIOError if this process holds a lock on the file, or if another one does and `wait` is False; any
        other OSError if the file cannot be opened or locked.
        """
        path = _absolute(path)
        if _is_held_here(path):
            raise BlockingIOError(errno.EAGAIN, "locked by this process", str(path))
        while True:
            try:
                fd, owner = _lock(path, start, length)
            except BlockingIOError:
                if not wait:
                    raise
                time.sleep(WAIT_POLL_SECONDS)
                continue
            if _is_file(path, fd):
                _holders[path] = os.getpid()
                return cls(path, fd, start, length, owner)
            _unlock(fd, owner)  # its holder has deleted the file meanwhile

    def shrink(self, length: int) -> None:
        """Keep the first `length` bytes locked only, so that other processes can lock the bytes behind them."""
        if self._owner is None:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 0, length)
        else:
            self._owner.shrink()
        self._length = length

    def is_intact(self) -> bool:
        """Return whether the lock file, and the owner file if there is one, are those that this process has locked."""
        return _is_file(self.path, self._fd) and (self._owner is None or self._owner.is_intact())

    def move_to(self, folder: Path) -> None:
        """Follow the lock file, whose folder is called `folder` now."""
        _holders[folder / self.path.name] = _holders.pop(self.path)
        self.path = folder / self.path.name
        if self._owner is not None:
            self._owner.path = folder / self._owner.path.name

    def restore(self) -> None:
        """Lock the file again after it was deleted.

        Raises BlockingIOError if another process has locked it meanwhile, OSError if that fails.
        """
        fd, owner = _lock(self.path, self._start, self._length)
        os.close(self._fd)  # of a file that no path leads to
        self._fd, self._owner = fd, owner

    def release(self, delete: bool = False) -> None:
        """`delete`: remove the file, too. A process that waits for the lock creates it again."""
        if delete and _is_file(self.path, self._fd):
            with suppress(OSError):
                os.unlink(self.path)
        _holders.pop(self.path, None)
        _unlock(self._fd, self._owner)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(path: Path, start: int, length: int) -> tuple[int, OwnerFile | None]:
    """Return a descriptor of the locked file, and its owner file if the file system has no locks.

    Raises BlockingIOError if another process holds the lock.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        return fd, None
    except OSError as error:
        if error.errno in NO_LOCKS:
            add_weaker_promise(NO_LOCKS_PROMISE)
            try:
                return fd, OwnerFile.acquire(path, start if length else None)
            except BaseException:
                os.close(fd)
                raise
        os.close(fd)
        if error.errno == errno.EACCES:  # POSIX allows EACCES or EAGAIN for a lock that is held
            raise BlockingIOError(errno.EAGAIN, "locked by another process", str(path)) from error
        raise


def _unlock(fd: int, owner: OwnerFile | None) -> None:
    if owner is not None:
        owner.release()
    os.close(fd)


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
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)  # also a file that this user cannot write
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return bool(live_owners(path))
    finally:
        os.close(fd)
    return False


def lock_holder(path: Path) -> int | None:
    """Return the pid of another process of this machine that holds a lock on `path`; None if there is none, or if the
    system does not say.
    """
    path = _absolute(path)
    if _is_held_here(path) or not sys.platform.startswith("linux"):
        return None
    with suppress(OSError, struct.error):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            flock = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, flock))
        finally:
            os.close(fd)
        if kind != fcntl.F_UNLCK and pid > 0:  # -1: of another machine
            return int(pid)
    return None


def _absolute(path: Path) -> Path:
    return path.parent.resolve() / path.name


def _is_held_here(path: Path) -> bool:
    return _holders.get(path) == os.getpid()
