"""The lock of a run or sweep directory, held as long as any process of one launch lives.

A launch locks all bytes of `.lock`. Before it starts ranks it keeps byte 0 only, and rank k locks byte k + 1. The next
launch asks for all bytes again and is refused until the last of these processes has ended. The owner is recorded in a
second file, because closing any descriptor of `.lock` frees the lock.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from common import ownership
from common.errors import DISK_ERRORS, LostRunDirError, UserError, print_note
from common.file_lock import FileLock, is_file_locked
from common.filesystem import describe_disk_error, read_json_object, retry_disk, write_json
from runner.run_dir.contents import LOCK_FILE, OWNER_FILE, claim, create_dirs, remove_dir, timestamp


class RunLock:
    """A lock of the run directory `folder`, and what identifies the directory: its inode, kept open, and its owner."""

    def __init__(self, folder: Path, lock: FileLock, owner: Mapping[str, Any]) -> None:
        """`owner`: what `process_id` returned in the process that has locked the whole directory; {} if unknown."""
        self._folder, self._lock, self._owner = folder, lock, owner
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._seen_owner_file: tuple[int, int] | None = None  # inode and time of the owner file that was compared last
        self._lost: LostRunDirError | None = None

    def shrink(self, length: int) -> None:
        self._lock.shrink(length)

    def release(self, is_owner: bool = False) -> None:
        """`is_owner`: this process is named in the owner file, which is removed, too."""
        with suppress(OSError):
            if is_owner and ownership.is_same_process(read_json_object(self._folder / OWNER_FILE), self._owner):
                (self._folder / OWNER_FILE).unlink(missing_ok=True)
        self._lock.release()
        os.close(self._fd)

    def check(self) -> None:
        """Raise LostRunDirError unless the directory is the one that was locked, and no other launch has taken it.

        A lock file that was deleted is created and locked again. What cannot be checked, e.g. on a broken disk, is left
        to the next write.
        """
        if self._lost is not None:
            raise self._lost
        try:
            self._check()
        except LostRunDirError as error:
            self._lost = error
            raise

    def follow_move(self) -> Path | None:
        """Return where the directory is now, if `check` has found that it was moved.

        It is checked there from now on.
        """
        if self._lost is None or (folder := self._lost.moved_to) is None:
            return None
        self._lock.move_to(folder)
        self._folder, self._lost = folder, None
        return folder

    def _check(self) -> None:
        try:
            if not os.path.samestat(os.stat(self._folder), os.fstat(self._fd)):
                raise self._lost_error(f"another directory is at {self._folder} now")
            if not self._lock.is_intact():
                self._restore()
            status = os.stat(self._folder / OWNER_FILE, follow_symlinks=False)
            if (seen := (status.st_ino, status.st_mtime_ns)) == self._seen_owner_file:
                return
            owner = read_json_object(self._folder / OWNER_FILE)
            if owner and self._owner and not ownership.is_same_process(owner, self._owner):
                raise LostRunDirError(
                    f"{self._folder} is being trained by process {owner.get('pid')} on {owner.get('host')} now; this process has stopped writing"
                )
            self._seen_owner_file = seen
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self._folder.is_dir():
                raise self._lost_error(f"{self._folder} is gone") from error
        except OSError:
            return

    def _restore(self) -> None:
        try:
            self._lock.restore()
        except BlockingIOError as error:
            raise LostRunDirError(
                f"the lock of {self._folder} was deleted, and another launch holds it now; this process has stopped writing"
            ) from error
        print_note(f"warning: the lock of {self._folder} was deleted or replaced; it is locked again")

    def _lost_error(self, message: str) -> LostRunDirError:
        """Return the error that says where the directory has gone."""
        where = "moved or deleted"
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{self._fd}"))
            if os.fstat(self._fd).st_nlink and not path.name.endswith(" (deleted)"):
                message += f": the run directory was moved to {path}; resume={path} continues"
                return LostRunDirError(message, path)
            where = "deleted, or moved to another file system"
        return LostRunDirError(f"{message}: the run directory was {where}; this process has stopped writing")


BUSY = {  # kind of a directory: message, and what to do
    "run": (
        "this run is being trained by",
        "wait for it to end; hydra.run.dir=DIR places a new run in another directory",
    ),
    "sweep": ("this sweep is being run by", "wait for it to end, or stop it"),
}


def acquire_dir(folder: Path, kind: str = "run") -> RunLock:
    """Lock `folder`, which is created if needed. Raises UserError, which names the owner, if it is locked."""
    try:
        create_dirs(folder)
        lock = retry_disk(partial(FileLock.acquire, folder / LOCK_FILE))
    except BlockingIOError as error:
        raise busy_error(folder, kind) from error
    except OSError as error:
        if claim(folder):
            remove_dir(folder)
        raise unusable_error(folder, error, kind) from error
    if _has_living_owner(read_json_object(folder / OWNER_FILE)):  # the lock file that it holds was deleted
        lock.release()
        raise busy_error(folder, kind)
    return RunLock(folder, lock, ownership.process_id())


def acquire_rank(folder: Path, rank: int) -> RunLock:
    """Lock the byte of `rank`, of the launch that holds the lock of `folder`."""
    try:
        return RunLock(
            folder,
            FileLock.acquire(folder / LOCK_FILE, start=rank + 1, length=1),
            read_json_object(folder / OWNER_FILE),
        )
    except BlockingIOError as error:
        raise busy_error(folder) from error
    except OSError as error:
        raise unusable_error(folder, error) from error


def _has_living_owner(owner: Mapping[str, Any]) -> bool:
    """Return whether another process of this host, which `owner` names, is alive."""
    with suppress(AttributeError, TypeError):  # a damaged file
        return any(
            ownership.is_alive_here(one) and not ownership.is_same_process(one, ownership.process_id())
            for one in (owner, *owner.get("ranks", []))
            if one
        )
    return False


def busy_error(folder: Path, kind: str = "run") -> UserError:
    message, fix = BUSY[kind]
    return UserError(f"{message} {describe_holder(folder)}", folder, fix)


def unusable_error(folder: Path, error: OSError, kind: str = "run") -> UserError:
    fix = f"place the {kind} in another directory with hydra.{kind}.dir=DIR"
    if (folder / "checkpoints").exists():  # it is resumed, and stays in its directory
        fix = f"copy it to another disk: cp -r {shlex.quote(str(folder))} DIR, and continue there: resume=DIR"
    return UserError(f"the {kind} directory cannot be used: {describe_disk_error(error, folder)}", folder, fix)


@contextmanager
def refusing_disk_errors(folder: Path) -> Iterator[None]:
    """Raise UserError for errors of the disk before anything is trained in `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise unusable_error(folder, error) from error


def write_owner(folder: Path, **fields: Any) -> None:
    """Record this process as the owner of `folder`, for the error message of a second launch."""
    write_json(folder / OWNER_FILE, {**ownership.process_id(), "since": timestamp(), **fields})


def is_locked(folder: Path) -> bool:
    """Return whether a process trains in `folder`."""
    return is_file_locked(folder / LOCK_FILE)


def describe_holder(folder: Path) -> str:
    owner = read_json_object(folder / OWNER_FILE)
    since = f"on {owner.get('host')} since {owner.get('since')}"
    try:
        if owner and ownership.is_alive(owner):
            return f"process {owner.get('pid')} {since}"
        ranks = [str(rank["pid"]) for rank in owner.get("ranks", []) if ownership.is_alive(rank)]
    except (AttributeError, TypeError, KeyError):
        ranks = []
    return (
        f"process {', '.join(ranks)} {since}, ranks whose launcher has died; they save and exit"
        if ranks
        else "another process"
    )
