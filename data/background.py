"""Threads and processes in the background: waits for them that end by a stop request or because nothing moves, and the
worker processes that tokenize rows and prepare batches.

multiprocessing.Pool and torch's DataLoader are not used: their processes survive a killed parent, or a wait for one
that is stuck or dead has no end. A process here dies with its parent, is forked where that is possible, so that it
starts without an import, and talks through a pipe, which needs no shared memory and no file descriptor per message.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from common.errors import STOP_SIGNALS, StopRequested, TrainingError
from common.ownership import process_stat

T = TypeVar("T")
WATCH_POLL_SECONDS = 0.1
GRACE_SECONDS = 0.5  # for a thread to end by itself after a stop request or at the end; then it is abandoned
PROCESS_STATES = {
    "T": "it was stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "D": "it waits for a disk or a network file system",
}
_END = object()  # in place of an item: there are no more
# for a process to be ready, which takes long on a busy machine; a longer data.worker_timeout holds here, too
START_SECONDS = 60.0
DATA_WORKER = "data worker"  # beginning of the names of processes that prepare batches
END_SECONDS = 1.0  # for a process that was killed, or has closed its pipe, to be gone
_PR_SET_PDEATHSIG = 1


def never() -> bool:
    """Return False: no stop request."""
    return False


@dataclass(eq=False)
class Watch:
    """Ends a wait: by StopRequested, or after `timeout` seconds without progress (0: no limit).

    `progress` returns a value that changes while the other side works. Time in which this process itself does not run
    (Ctrl-Z, a suspended machine) does not count.
    """

    stop_requested: Callable[[], bool] = never
    timeout: float = 0.0
    progress: Callable[[], object] = never

    def wait_for(
        self, poll: Callable[[float], bool], stuck: Callable[[float], Exception], at_least: float = 0.0
    ) -> None:
        """Return once `poll(seconds)` is true.

        Raises StopRequested, or `stuck(seconds waited)` after `timeout` and `at_least` seconds.
        """
        limit = max(self.timeout, at_least) if self.timeout else math.inf
        waited, seen, last = 0.0, self.progress(), time.monotonic()
        while not poll(WATCH_POLL_SECONDS):
            if self.stop_requested():
                raise StopRequested
            now = time.monotonic()
            waited, last = waited + min(now - last, 2 * WATCH_POLL_SECONDS), now
            if (current := self.progress()) != seen:
                seen, waited = current, 0.0
            if waited >= limit:
                raise stuck(waited)

    def take(self, items: queue.Queue[T], stuck: Callable[[float], Exception]) -> T:
        """Return the next item of a queue. Raises as `wait_for`."""
        taken: list[T] = []

        def poll(seconds: float) -> bool:
            with suppress(queue.Empty):
                taken.append(items.get(timeout=seconds))
            return bool(taken)

        self.wait_for(poll, stuck)
        return taken[0]


def prefetch(items: Generator[T], watch: Watch, describe: Callable[[], str]) -> Generator[T]:
    """Yield the same items; a thread computes the next one while the caller uses the current one.

    `describe()`: what the thread does now.

    Raises StopRequested or TrainingError as `watch` says. At the end a thread that is blocked, e.g. in a read, is
    abandoned.
    """
    results: queue.Queue[Future] = queue.Queue()
    wanted, closed = threading.Semaphore(1), threading.Event()

    def produce() -> None:
        while wanted.acquire() and not closed.is_set():
            result: Future = Future()
            try:
                result.set_result(next(items, _END))
            except BaseException as error:  # raised where the item is requested
                result.set_exception(error)
            results.put(result)
        items.close()

    def stuck(seconds: float) -> Exception:
        return TrainingError(
            f"no batch for {seconds:g} s (data.worker_timeout) while the training process reads {describe()}; check its disk or file system"
        )

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := watch.take(results, stuck).result()) is not _END:
            wanted.release()
            yield item
    finally:
        closed.set()
        wanted.release()
        thread.join(GRACE_SECONDS)


def describe_state(pid: int) -> str:
    """Return ": ..." if the kernel knows what a process waits for (Linux), otherwise ""."""
    fields = process_stat(pid)
    state = PROCESS_STATES.get(fields[0]) if fields else None
    return f": {state}" if state else ""


class Worker:
    """One process, its end of the pipe, and the thread of this process that exchanges messages with it."""

    def __init__(self, name: str, body: Callable[[Connection], None], exchange: Callable[[Worker], None]) -> None:
        """`body(connection)` runs in the process, `exchange(self)` in the thread; at the end of the pipe both return."""
        self.ready = threading.Event()  # or ended; `exchange` sets it
        self.received: queue.Queue[Any] = queue.Queue(1)  # what `exchange` passes on, if it does so by a queue
        context = multiprocessing.get_context("fork" if sys.platform.startswith("linux") else None)
        self.connection, end = context.Pipe()
        process = context.Process(target=_run_body, args=(body, end, os.getpid()), name=name, daemon=True)
        try:
            with warnings.catch_warnings():
                # a fork beside threads: the child uses none of their locks
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        except OSError:
            self.connection.close()
            raise
        finally:
            end.close()  # the process has the only one, so that its death ends the pipe
        self.process, self.name = process, f"{name} (pid {process.pid})"
        self.thread = threading.Thread(target=exchange, args=(self,), name=name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # the limit of threads
            process.kill()
            process.join(END_SECONDS)
            self.connection.close()
            raise OSError(str(error)) from error

    def describe_end(self) -> str:
        """Return how the process ended, once its end of the pipe is closed."""
        self.process.join(END_SECONDS)
        return describe_exit(self.process.exitcode)


def start_workers(
    name: str, bodies: Sequence[Callable[[Connection], None]], exchange: Callable[[Worker], None]
) -> list[Worker]:
    """Start a worker for each of `bodies`. Raises OSError if one cannot be started; then none is left."""
    workers: list[Worker] = []
    try:
        with _signals_blocked():
            for index, body in enumerate(bodies):
                workers.append(Worker(f"{name} {index} of {len(bodies)}", body, exchange))
    except OSError:
        stop_workers(workers)
        raise
    return workers


def stop_workers(workers: Sequence[Worker]) -> None:
    """Kill the workers, whatever they do, and wait a limited time for their end and that of their threads."""
    deadline = time.monotonic() + END_SECONDS
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.thread.join(max(0.0, deadline - time.monotonic()))
        if not worker.thread.is_alive():
            worker.connection.close()


def _run_body(body: Callable[[Connection], None], connection: Connection, parent: int) -> None:
    kill_with_parent(parent)
    with suppress(BrokenPipeError, EOFError):  # the parent has ended
        body(connection)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block stop signals while workers start: they inherit the mask and keep it.

    Ctrl-C goes to the whole process group; the workers survive it, so that the parent can finish its step.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def kill_with_parent(parent: int) -> None:
    """Make the kernel kill this process when process `parent` dies, even if this one is stuck (Linux; on other systems
    it ends when it is not stuck).
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(128 + signal.SIGKILL)


def describe_exit(code: int | None) -> str:
    """Return how a process ended, from its exit code: negative for a signal, None if it is not known."""
    if code is None:
        return "ended early"
    if code >= 0:
        return f"ended early with exit code {code}"
    reasons = {
        signal.SIGKILL: " (out of memory, or kill -9)",
        signal.SIGBUS: " (a file that it reads became shorter, or its disk failed)",
    }
    return f"was killed by {signal.Signals(-code).name}{reasons.get(signal.Signals(-code), '')}"
