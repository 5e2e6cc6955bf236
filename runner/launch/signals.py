"""Stop requests: SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag that the training loop reads between batches, or are forwarded to the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # SIGUSR1: Slurm, before the time limit; SIGHUP: the terminal was closed
DUPLICATE_SIGNAL_WINDOW = 0.2  # seconds; timeout(1) and torchrun send the same request twice


STDERR = 2


def handled_signals() -> list[signal.Signals]:
    """Return STOP_SIGNALS, without SIGHUP where it is ignored: under nohup the run survives its terminal."""
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _announce(number: int) -> None:
    """Acknowledge a stop request on stderr, past its buffer: the signal may have interrupted a write to it."""
    with suppress(OSError):  # e.g. the terminal was closed
        os.write(STDERR, f"\n{signal.Signals(number).name}: stopping after this batch, then saving; again to stop now\n".encode())


class _SignalHandler:
    """Install `_handle` for `handled_signals()` and restore the previous handlers on exit."""

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        assert threading.current_thread() is threading.main_thread(), "Python delivers signals to the main thread only"
        for number in handled_signals():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class StopFlag(_SignalHandler):
    """`with StopFlag() as stop:` then `stop()` is true once a stop signal has arrived. A second signal ends the process at once, without saving.

    `announces`: the first signal is acknowledged on stderr.
    """

    def __init__(self, announces: bool = False) -> None:
        super().__init__()
        self._announces = announces
        self.signal: signal.Signals | None = None
        self._time = 0.0

    def __call__(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._time = signal.Signals(number), time.monotonic()
            if self._announces:
                _announce(number)
        elif time.monotonic() - self._time > DUPLICATE_SIGNAL_WINDOW:
            os._exit(128 + number)  # the last checkpoint is intact, and the kernel releases the lock


class SignalForwarder(_SignalHandler):
    """`with SignalForwarder() as forwarder:` then `forwarder.forward_to(processes)`: every stop signal reaches all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0  # number of the newest signal
        self._times: list[float] = []
        self._processes: list[subprocess.Popen] = []

    def is_stopping(self) -> bool:
        return bool(self._times)

    def is_forced(self) -> bool:
        """Return whether a second request followed the first."""
        return len(self._times) > 1

    def forward_to(self, processes: list[subprocess.Popen]) -> None:
        """Send signals to `processes` from now on, including one that arrived before."""
        self._processes = processes
        if self.is_stopping():
            self._send(self.last)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._times and now - self._times[-1] <= DUPLICATE_SIGNAL_WINDOW:
            return
        self._times.append(now)
        self.last = number
        if len(self._times) == 1:
            _announce(number)
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)
