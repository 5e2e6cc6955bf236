"""The values of tracker.console."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from runner.tracking.console.base import Console

CONSOLE_MODES = ("auto", "rich", "plain", "json", "quiet")


def open_console(mode: str, stream: TextIO | None = None) -> Console:
    """Return the console of `tracker.console=mode`, which writes to stdout."""
    from runner.tracking.console.bar import BarConsole, is_live_terminal
    from runner.tracking.console.base import Console
    from runner.tracking.console.plain import JsonConsole, PlainConsole

    stream = stream or sys.stdout
    if mode == "quiet":
        return Console()
    if mode == "json":
        return JsonConsole(stream)
    if mode == "rich" or (mode == "auto" and is_live_terminal(stream)):
        return BarConsole(stream)
    return PlainConsole(stream)
