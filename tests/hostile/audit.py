"""Audit hook of a hostile case: reports code that runs and files that change outside of the folder of the case."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PATH_EVENTS = {  # event -> positions of the paths that it changes, and of their folder descriptors
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.truncate": ((0, None),),
    "os.utime": ((0, 3),),
}
STARTS = {"os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.startfile", "pty.spawn"}
CONNECTS = {"socket.connect", "socket.sendto", "urllib.Request"}
OWN_PICKLES = ("data.", "numpy.", "builtins.")  # replies of this program's own workers, read from a pipe
# arguments of this program's own processes, after the interpreter
OWN_CHILDREN = (("-P", "-m", "data."), ("-P", "-m", "runner."))


class Audit:
    """`report(kind, text)` is called with kind `executed` or `wrote`.

    Code of files in `folder`, and changes outside of it, are hostile.
    """

    def __init__(self, folder: Path, report: Callable[[str, str], None]) -> None:
        self.folder, self.report = os.path.realpath(folder), report
        self.is_active = True

    def install(self) -> None:
        sys.dont_write_bytecode = True  # of installed modules that nothing has imported before
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_active:
            return
        self.is_active = False  # what the hook itself does raises events, too
        try:
            self._inspect(event, args)
        finally:
            self.is_active = True

    def _inspect(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & WRITING and not isinstance(path, int):
                self._check_write(event, path, None, follows=not flags & os.O_NOFOLLOW)
        elif positions := PATH_EVENTS.get(event):
            for path, descriptor in positions:
                self._check_write(
                    event,
                    args[path],
                    args[descriptor] if descriptor is not None and len(args) > descriptor else None,
                    follows=False,
                )
        elif event in STARTS or event in CONNECTS:
            self.report("executed", f"{event} {args[:2]!r}")
        elif event == "subprocess.Popen":
            if not _is_own_child([os.fsdecode(arg) for arg in args[1]]):
                self.report("executed", f"{event} {args[1]!r}")
        elif event == "pickle.find_class":
            if not f"{args[0]}.".startswith(OWN_PICKLES) or args[0] == "builtins":
                self.report("executed", f"{event} {args!r}")
        elif event in ("exec", "compile", "import", "ctypes.dlopen"):
            name = _file_of(event, args)  # "<string>" is code without a file: of dataclasses, jinja2, ...
            if name and not name.startswith("<") and os.path.realpath(name).startswith(f"{self.folder}{os.sep}"):
                self.report("executed", f"{event} {name}")

    def _check_write(self, event: str, path: Any, descriptor: Any, follows: bool) -> None:
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        if isinstance(descriptor, int) and descriptor >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), name)
        real = (
            os.path.realpath(name)
            if follows
            else os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))
        )
        if not f"{real}{os.sep}".startswith((f"{self.folder}{os.sep}", "/dev/null/", "/dev/shm/", "/proc/self/")):
            self.report("wrote", f"{event} {real}")


def _is_own_child(arguments: list[str]) -> bool:
    is_python = arguments[:1] == [sys.executable] and any(
        " ".join(arguments[1:]).startswith(" ".join(start)) for start in OWN_CHILDREN
    )
    return is_python or os.path.basename(arguments[0]) == "git"


def _file_of(event: str, args: tuple[Any, ...]) -> str | None:
    if event == "exec":
        return args[0].co_filename if isinstance(args[0], CodeType) else None
    name = args[0] if event == "ctypes.dlopen" else args[1]
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else None
