"""Signals for a process whose ranks do the work: each is passed on to all of them."""

from __future__ import annotations

import signal
import subprocess
import time
from types import FrameType
from typing import Any, Self

from runner.launch.signals import DUPLICATE_SIGNAL_WINDOW, STOP_SIGNALS


class SignalForwarder:
    """`with PassedOn() as asked:` then `asked.to(processes)`; `asked()` says whether a signal came, `asked.twice()` whether another followed."""

    def __init__(self) -> None:
        self.last = 0
        self._times: list[float] = []
        self._processes: list[subprocess.Popen] = []
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        return bool(self._times)

    def twice(self) -> bool:
        return len(self._times) > 1

    def to(self, processes: list[subprocess.Popen]) -> None:
        """From here on these hear of it, also of what came before them."""
        self._processes = processes
        if self():
            self._send(self.last)

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._times and now - self._times[-1] <= DUPLICATE_SIGNAL_WINDOW:
            return  # the same request: timeout(1) and others send it twice
        self._times.append(now)
        self.last = number
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)
