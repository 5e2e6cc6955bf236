"""Stop requests: SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag that the engine polls between batches, raise within work
that may be abandoned anywhere, or are forwarded to the ranks.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self, TypeVar

from common.errors import INTERRUPTED_BY_USER, INTERRUPTED_MESSAGE, STOP_SIGNALS, StopRequested
from runner.engine.device.distributed import DistributedContext
from runner.engine.device.heartbeat import beat
from runner.tracking.bar import DUMB_TERMINALS

DUPLICATE_SIGNAL_WINDOW = 0.2  # seconds; timeout(1) and torchrun send the same request twice
STDERR = 2
SHOW_CURSOR = "\x1b[?25h\n"
ERASE_LINE = "\r\x1b[2K"  # of a progress bar, which is drawn again below the message
RAISE_AGAIN_SECONDS = 0.01  # after an exception that Python has ignored
C_CODE_SECONDS = 1.0  # after which Ctrl-C ends a command that does not hear it
T = TypeVar("T")
WATCHER_END = 0  # in place of a signal: the end of a _SignalWatcher


def handled_signals() -> list[signal.Signals]:
    """Return STOP_SIGNALS, without SIGHUP where it is ignored: under nohup the run survives its terminal."""
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _acknowledge(number: int, pending_work: str) -> None:
    """Acknowledge a stop request on stderr, past its buffer: the signal may have interrupted a write to it."""
    with suppress(OSError):  # e.g. the terminal was closed
        begin = ERASE_LINE if _is_live_terminal() else "\n"
        os.write(STDERR, f"{begin}{signal.Signals(number).name}: stopping {pending_work}; again to stop now\n".encode())


def _is_live_terminal() -> bool:
    return os.isatty(STDERR) and os.environ.get("TERM", "") not in DUMB_TERMINALS


def _exit_now(code: int) -> None:
    """End the process without clean-up; a progress bar has hidden the cursor of the terminal, and is left above the
    prompt.
    """
    if _is_live_terminal():
        with suppress(OSError):
            os.write(STDERR, SHOW_CURSOR.encode())
    os._exit(code)


def _above_stderr(descriptor: int) -> int:
    """Return a descriptor above 2 in its place: with stdout or stderr closed the system gives out their numbers, and a
    message would be read as signals.
    """
    if descriptor > STDERR:
        return descriptor
    duplicate = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, STDERR + 1)
    os.close(descriptor)
    return duplicate


class _SignalWatcher:
    """A thread that receives stop signals while the main thread is in C code, where Python runs no handler: a
    compilation, a long backward pass.
    """

    def __init__(self, receive: Callable[[int], None]) -> None:
        """`receive(number)` is called in the thread."""
        self._reader, self._writer = (_above_stderr(end) for end in os.pipe())
        os.set_blocking(self._writer, False)  # as set_wakeup_fd wants it
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._is_open = True
        os.register_at_fork(after_in_child=self._detach)
        # a signal goes to the main thread, whose system calls it interrupts
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._thread = threading.Thread(target=self._run, args=(receive,), name="signal watcher", daemon=True)
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _run(self, receive: Callable[[int], None]) -> None:
        while (number := os.read(self._reader, 1)[0]) != WATCHER_END:
            if number in STOP_SIGNALS:  # others have handlers, too, e.g. SIGCHLD
                receive(number)

    def _detach(self) -> None:
        """In a forked data worker: its signals are not those of the run."""
        if self._is_open:
            signal.set_wakeup_fd(-1)

    def close(self) -> None:
        self._is_open = False
        signal.set_wakeup_fd(self._previous)
        os.write(self._writer, bytes([WATCHER_END]))
        self._thread.join()
        for end in (self._reader, self._writer):
            os.close(end)


class _SignalHandler:
    """Install `_handle` for `_signals()` and restore the previous handlers on exit. Meanwhile a thread calls `_receive`,
    also while the main thread is in C code.
    """

    has_watcher = True
    _signals = staticmethod(handled_signals)

    def __enter__(self) -> Self:
        assert threading.current_thread() is threading.main_thread(), "Python delivers signals to the main thread only"
        self._previous = {number: signal.signal(number, self._handle) for number in self._signals()}
        self._watcher = _SignalWatcher(self._receive) if self.has_watcher else None
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._watcher is not None:
            self._watcher.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError

    def _receive(self, number: int) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class StopRequests:
    """Called, it returns whether this process has been asked to stop; `StopFlag` is the one that signals set."""

    is_requested: Callable[[], bool] = lambda: False
    started: float = field(default_factory=time.monotonic)
    pending_work: str = "as soon as possible"  # what a request waits for, in its acknowledgement: "stopping ..."

    def __call__(self) -> bool:
        return self.is_requested()

    def is_out_of_time(self, max_hours: float) -> bool:
        """Return whether this launch has lasted `max_hours`; 0: no limit."""
        return 0 < max_hours <= (time.monotonic() - self.started) / 3600

    @contextmanager
    def interrupting(self, pending_work: str) -> Iterator[None]:
        """Run a block that a request ends at once, wherever it is, with StopRequested.

        Nothing in the block may need to be completed.
        """
        with self.working_on(pending_work):
            if self():
                raise StopRequested
            yield

    @contextmanager
    def working_on(self, pending_work: str) -> Iterator[None]:
        """Name what a request waits for while the block runs."""
        before, self.pending_work = self.pending_work, pending_work
        try:
            yield
        finally:
            self.pending_work = before


@dataclass(eq=False)
class StopFlag(_SignalHandler, StopRequests):
    """`with StopFlag() as stop:` then `stop()` is true once a stop signal has arrived.

    A second signal ends the process at once, without saving.

    `announces`: the first signal is acknowledged on stderr, with what it waits for.
    """

    announces: bool = False
    signal: signal.Signals | None = None
    _time: float = 0.0  # of the first signal
    _interrupts: bool = False
    _repeats: int = 0  # signals that this process has sent to itself

    def __call__(self) -> bool:
        beat()
        return self.signal is not None

    @contextmanager
    def interrupting(self, pending_work: str) -> Iterator[None]:
        with super().interrupting(pending_work), self._raising_again():
            self._interrupts = True
            try:
                yield
            finally:
                self._interrupts = False

    @contextmanager
    def _raising_again(self) -> Iterator[None]:
        """Raise StopRequested once more where Python has ignored it: the signal came in a destructor or a callback of a
        weak reference.
        """
        timers: list[threading.Timer] = []
        previous = sys.unraisablehook

        def on_ignored(ignored: Any) -> None:
            if ignored.exc_type is not StopRequested or self.signal is None:
                return previous(ignored)
            self._interrupts = True
            timers.append(threading.Timer(RAISE_AGAIN_SECONDS, self._repeat))
            timers[-1].start()

        sys.unraisablehook = on_ignored
        try:
            yield
        finally:
            sys.unraisablehook = previous
            for timer in timers:
                timer.cancel()

    def _repeat(self) -> None:
        """Send the signal to the main thread again, whose system call it interrupts.

        The watcher does not take it for a second request.
        """
        assert self.signal is not None
        self._repeats += 1
        signal.pthread_kill(threading.main_thread().ident or 0, self.signal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, as soon as it executes Python code. The watcher counts the signals."""
        if self.signal is None:
            self.signal = signal.Signals(number)
        if self._interrupts:
            self._interrupts = False
            raise StopRequested

    def _receive(self, number: int) -> None:
        """Runs in the watcher thread, within milliseconds."""
        now = time.monotonic()
        if self._repeats:
            self._repeats -= 1
        elif not self._time:
            self._time = now
            self.signal = self.signal or signal.Signals(number)
            if self.announces:
                _acknowledge(number, self.pending_work)
        elif now - self._time > DUPLICATE_SIGNAL_WINDOW:
            _exit_now(128 + number)  # the last checkpoint is intact, and the kernel releases the lock


class CtrlC(_SignalHandler):
    """`with CtrlC():` for a command that saves nothing: Ctrl-C raises KeyboardInterrupt, and where the main thread does
    not leave C code, e.g. that of the training of a tokenizer, it ends the process after a second.
    """

    _handled = 0.0  # when the main thread last ran the handler

    _signals = staticmethod(lambda: [signal.SIGINT])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled = time.monotonic()
        raise KeyboardInterrupt

    def _receive(self, number: int) -> None:
        """Runs in the watcher thread."""
        arrived = time.monotonic() - DUPLICATE_SIGNAL_WINDOW
        deadline = arrived + C_CODE_SECONDS
        while self._handled < arrived and number == signal.SIGINT:
            if time.monotonic() > deadline:
                with suppress(OSError):
                    os.write(STDERR, f"\n{INTERRUPTED_MESSAGE}\n".encode())
                _exit_now(INTERRUPTED_BY_USER)
            time.sleep(0.05)


class SignalForwarder(_SignalHandler):
    """`with SignalForwarder() as forwarder:` then `forwarder.forward_to(processes)`: every stop signal reaches all of
    them.
    """

    has_watcher = False

    def __init__(self) -> None:
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
            is_training = any(process.poll() is None for process in self._processes)
            _acknowledge(number, "after this micro-batch, then saving" if is_training else "before the training starts")
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


def do_unless_stopped(dist: DistributedContext, stop: StopRequests, work: Callable[[], T]) -> T:
    """Return what `work`, a preparation without any collective, returns.

    Raises StopRequested on every rank if some rank is asked to stop meanwhile. No context manager: a signal within one
    would leave the others in the collective.
    """
    results: list[T] = []
    with suppress(StopRequested), stop.interrupting("before the first step"):
        results.append(work())
    if dist.any(stop()) or not results:
        raise StopRequested
    return results[0]
