"""Errors of the disk at chosen file calls of a process: every call of Python that changes something below a folder is
counted.

`open()` is replaced by the pure Python one of `_pyio`, whose reads and writes are calls of `os`, too. What a library
writes in C or Rust is not counted.
"""

from __future__ import annotations

import _pyio
import builtins
import errno
import io
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import filesystem

FREEING_CALLS = ("unlink", "remove", "rmdir", "truncate", "ftruncate")  # a full disk does not refuse them
# the first argument is a path
PATH_CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "truncate", "link", "symlink")
FD_CALLS = ("write", "pwrite", "writev", "fsync", "fdatasync", "ftruncate")
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
COUNTER = struct.Struct("q")


@dataclass(frozen=True)
class DiskFault:
    first: int  # number of the first call that fails, from 1 on; 0: none
    times: int  # calls that fail
    error: int  # errno.ENOSPC, errno.EIO


class DiskHook:
    """Counts file calls below `folder` in a forked process, and lets some of them fail.

    `calls` can be read by the parent.
    """

    def __init__(self, folder: Path, fault: DiskFault | None = None) -> None:
        self._root, self._fault = str(folder), fault
        self._shared = mmap.mmap(-1, COUNTER.size)

    @property
    def calls(self) -> int:
        return COUNTER.unpack(self._shared[:])[0]

    def install(self) -> None:
        """Replace the functions of `os`, `open` and the file system of this program.

        There is no way back: call it in a fork.
        """
        for name in PATH_CALLS:
            setattr(
                os,
                name,
                self._checked(getattr(os, name), lambda path, *_: self._is_inside(path), name in FREEING_CALLS),
            )
        for name in FD_CALLS:
            setattr(
                os,
                name,
                self._checked(getattr(os, name), lambda fd, *_: self._is_inside(_path_of(fd)), name in FREEING_CALLS),
            )
        os.open = self._checked(
            os.open, lambda path, flags=0, *_: bool(flags & WRITING_FLAGS) and self._is_inside(path)
        )
        builtins.open = io.open = self._checked_open(builtins.open)
        for name in ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"):
            setattr(filesystem.fs, name, getattr(os, name))

    def _checked_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def checked_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            path = _path_of(file) if isinstance(file, int) else file
            opens = _pyio.open if set(mode) & set("wax+") and self._is_inside(path) else original
            return opens(file, mode, *args, **options)

        return checked_open

    def _checked(
        self, original: Callable[..., Any], is_counted: Callable[..., bool], is_freeing: bool = False
    ) -> Callable[..., Any]:
        def checked(*args: Any, **options: Any) -> Any:
            if is_counted(*args) and not (is_freeing and self._fault and self._fault.error == errno.ENOSPC):
                self._count(args[0])
            return original(*args, **options)

        return checked

    def _count(self, target: Any) -> None:
        number = self.calls + 1
        self._shared[:] = COUNTER.pack(number)
        if self._fault and self._fault.first and self._fault.first <= number < self._fault.first + self._fault.times:
            raise OSError(
                self._fault.error,
                os.strerror(self._fault.error),
                None if isinstance(target, int) else os.fspath(target),
            )

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
