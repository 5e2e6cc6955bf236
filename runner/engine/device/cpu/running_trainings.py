"""Which trainings this user runs on this machine now, and their threads."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_TRAININGS = 1_000  # files that are read
MAX_NUMBER_BYTES = 16  # of a file: a number of threads


class RunningTrainings:
    """A file per process, named by its id and locked while it lives; the file has the number of threads, or nothing
    while it is not chosen.

    Where the folder cannot be used (no temporary folder, owned by someone else), there are no other trainings.
    """

    _descriptor: int | None = None  # of the file of this process

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or _temporary_folder() / f"lm-runner-{os.getuid()}"

    @contextmanager
    def registered(self) -> Iterator[None]:
        """List this process as a training while the block runs."""
        path = self._folder / str(os.getpid())
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._is_private():
                RunningTrainings._descriptor = os.open(
                    path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                )
                fcntl.flock(RunningTrainings._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            if RunningTrainings._descriptor is not None:
                with suppress(OSError):
                    path.unlink()
                os.close(RunningTrainings._descriptor)
                RunningTrainings._descriptor = None

    def set_threads(self, threads: int) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.pwrite(self._descriptor, f"{threads:{MAX_NUMBER_BYTES}}".encode(), 0)

    def threads_of_others(self) -> list[int]:
        """Return the number of threads of each other training, 0 while it is not chosen.

        Files of processes that died are removed.
        """
        threads = list[int]()
        with suppress(OSError):
            if not self._is_private():
                return []
            for name in sorted(os.listdir(self._folder))[:MAX_TRAININGS]:
                if name.isdigit() and name != str(os.getpid()):
                    with suppress(OSError):
                        threads += self._read(self._folder / name)
        return threads

    def _read(self, path: Path) -> list[int]:
        """Return [the number of threads], [] if its process has ended."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(descriptor, MAX_NUMBER_BYTES).strip()
            return [int(text) if text.isdigit() else 0]
        else:
            path.unlink()
            return []
        finally:
            os.close(descriptor)

    def _is_private(self) -> bool:
        status = os.lstat(self._folder)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # none can be written to
        return Path(os.devnull)
