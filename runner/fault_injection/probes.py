"""What a forked launch reports to its parent through shared memory: file calls, phases, data workers; and the faults
that are injected there.

`install` is called in the fork: it replaces functions, and there is no way back.
"""

from __future__ import annotations

import _pyio
import builtins
import ctypes
import errno
import io
import multiprocessing.process
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path
from typing import Any

from common import filesystem
from common.ownership import start_ticks
from data.background import DATA_WORKER

FREEING_CALLS = ("unlink", "remove", "rmdir", "truncate", "ftruncate")  # a full disk does not refuse them
# the first argument is a path
PATH_CALLS = "mkdir rename replace unlink remove rmdir truncate link symlink".split()
FD_CALLS = ("write", "pwrite", "writev", "fsync", "fdatasync", "ftruncate")
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class DiskFault:
    first: int  # number of the first call that fails, from 1 on; 0: none
    times: int  # calls that fail
    error: int  # errno.ENOSPC, errno.EIO


class DiskHook:
    """Counts the file calls of Python that change something below `folder`, and lets some of them fail.

    `open()` is replaced by the pure Python one of `_pyio`, whose reads and writes are calls of `os`, too. What a
    library writes in C or Rust is not counted.
    """

    def __init__(self, folder: Path, fault: DiskFault | None = None) -> None:
        self._root, self._fault = str(folder), fault or DiskFault(0, 0, 0)
        self._calls = RawValue(ctypes.c_longlong)

    @property
    def calls(self) -> int:
        return self._calls.value

    def install(self) -> None:
        """Replace the functions of `os`, `open` and the file system of this program."""
        for name in PATH_CALLS:
            self._replace(name, lambda path, *_: self._is_inside(path))
        for name in FD_CALLS:
            self._replace(name, lambda fd, *_: self._is_inside(_path_of(fd)))
        self._replace("open", lambda path, flags=0, *_: bool(flags & WRITING_FLAGS) and self._is_inside(path))
        builtins.open = io.open = self._checked_open(builtins.open)
        for name in ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"):
            setattr(filesystem.fs, name, getattr(os, name))

    def _checked_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def checked_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            path = _path_of(file) if isinstance(file, int) else file
            opens = _pyio.open if set(mode) & set("wax+") and self._is_inside(path) else original
            return opens(file, mode, *args, **options)

        return checked_open

    def _replace(self, name: str, is_counted: Callable[..., bool]) -> None:
        """Replace a function of `os` by one that counts its calls."""
        original, is_freeing = getattr(os, name), name in FREEING_CALLS

        def checked(*args: Any, **options: Any) -> Any:
            if is_counted(*args) and not (is_freeing and self._fault.error == errno.ENOSPC):
                self._count(args[0])
            return original(*args, **options)

        setattr(os, name, checked)

    def _count(self, target: Any) -> None:
        self._calls.value += 1
        first, error = self._fault.first, self._fault.error
        if first and first <= self.calls < first + self._fault.times:
            raise OSError(error, os.strerror(error), None if isinstance(target, int) else os.fspath(target))

    def _is_inside(self, path: Any) -> bool:
        try:
            text = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return False
        return text == self._root or text.startswith(f"{self._root}/")


def _path_of(fd: Any) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


# start: everything before the first of the others
PHASES = ("start", "tokenizing", "step", "save", "evaluation", "sampling", "end")


class PhaseProbe:
    """Counts how often each phase was entered, and for how long."""

    def __init__(self) -> None:
        self._counts, self._seconds = RawArray(ctypes.c_longlong, len(PHASES)), RawArray("d", len(PHASES))
        self._began = time.monotonic()

    def install(self) -> None:
        """Wrap the function of each phase."""
        from runner.checkpoint.manager import CheckpointManager
        from runner.engine import data_pipeline, evaluation, loop

        self._began = time.monotonic()
        functions: dict[str, tuple[Any, str]] = {
            "tokenizing": (data_pipeline, "tokenize_source"),
            "step": (loop, "train_step"),
            "save": (CheckpointManager, "save_async"),
            "evaluation": (evaluation, "evaluate_loss"),
            "sampling": (evaluation, "generate_samples"),
            "end": (loop, "finish"),
        }
        for phase, (owner, name) in functions.items():
            setattr(owner, name, self._reporting(PHASES.index(phase), getattr(owner, name)))

    def read(self, phase: str) -> tuple[int, float]:
        """Return how often the phase was entered, and the seconds spent in it."""
        return self._counts[PHASES.index(phase)], self._seconds[PHASES.index(phase)]

    def _reporting(self, phase: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def reporting(*args: Any, **options: Any) -> Any:
            entered = time.monotonic()
            if not self._counts[0]:
                self._counts[0], self._seconds[0] = 1, entered - self._began
            self._counts[phase] += 1
            try:
                return function(*args, **options)
            finally:
                self._seconds[phase] += time.monotonic() - entered

        return reporting


MAX_WORKERS = 500


class WorkerProbe:
    """The data workers that a launch has started."""

    def __init__(self) -> None:
        self._count, self._pids = RawValue("i"), RawArray("i", MAX_WORKERS)

    def install(self, victim: int = 0, number: int = 0) -> None:
        """Record every data worker that starts, and send the signal `number` to the one that starts as the `victim`-th."""
        start = multiprocessing.process.BaseProcess.start

        def recording_start(process: multiprocessing.process.BaseProcess) -> None:
            start(process)
            if process.name.startswith(DATA_WORKER) and process.pid:
                self._pids[min(self._count.value, MAX_WORKERS - 1)] = process.pid
                self._count.value += 1
                if self._count.value == victim:
                    os.kill(process.pid, number)

        setattr(multiprocessing.process.BaseProcess, "start", recording_start)  # noqa: B010  an assignment is no valid type

    def alive(self) -> list[int]:
        return [pid for pid in self._pids if pid and start_ticks(pid) is not None]
