"""Being asked to stop: a signal only raises a flag, the loop acts on it between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # asked to leave, Ctrl-C, Slurm before the time is up
DUPLICATE_SIGNAL_WINDOW = 0.2  # seconds; timeout(1) and torchrun pass one signal on twice, which is not two requests


class StopFlag:
    """`with StopFlag() as stop:` then `stop()` says whether a signal came. Whoever sends a second one wants out at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._when = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> Self:
        assert threading.current_thread() is threading.main_thread(), "Python hands signals to the main thread only"
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._when = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._when > DUPLICATE_SIGNAL_WINDOW:
            os._exit(128 + number)  # nothing is saved now: the checkpoint before stands, and the lock is free
