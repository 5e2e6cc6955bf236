"""Waits for a thread or a process that end: by a stop request, or because nothing moves."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from common.errors import StopRequested, TrainingError

T = TypeVar("T")
WATCH_POLL_SECONDS = 0.1
GRACE_SECONDS = 0.5  # for a thread to end by itself after a stop request or at the end; then it is abandoned
PROCESS_STATES = {
    "T": "it was stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "D": "it waits for a disk or a network file system",
}
_END = object()  # in place of an item: there are no more


def never() -> bool:
    """Return False: no stop request."""
    return False


class Watch:
    """Ends a wait: by StopRequested, or after `timeout` seconds without progress (0: no limit).

    `progress` returns a value that changes while the other side works. Time in which this process itself does not run
    (Ctrl-Z, a suspended machine) does not count.
    """

    def __init__(
        self, stop_requested: Callable[[], bool] = never, timeout: float = 0.0, progress: Callable[[], object] = never
    ) -> None:
        self.stop_requested, self.timeout, self._progress = stop_requested, timeout, progress

    def wait_for(
        self, poll: Callable[[float], bool], stuck: Callable[[float], Exception], at_least: float = 0.0
    ) -> None:
        """Return once `poll(seconds)` is true.

        Raises StopRequested, or `stuck(seconds waited)` after `timeout` and `at_least` seconds.
        """
        limit = max(self.timeout, at_least) if self.timeout else math.inf
        waited, seen, last = 0.0, self._progress(), time.monotonic()
        while not poll(WATCH_POLL_SECONDS):
            if self.stop_requested():
                raise StopRequested
            now = time.monotonic()
            waited, last = waited + min(now - last, 2 * WATCH_POLL_SECONDS), now
            if (current := self._progress()) != seen:
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


def prefetch(
    items: Generator[T], watch: Watch | None = None, describe: Callable[[], str] = lambda: "the next item"
) -> Generator[T]:
    """Yield the same items; a thread computes the next one while the caller uses the current one.

    `describe()`: what the thread does now.

    Raises StopRequested or TrainingError as `watch` says. At the end a thread that is blocked, e.g. in a read, is
    abandoned.
    """
    watch = watch or Watch()
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
    with suppress(OSError, IndexError):
        state = PROCESS_STATES.get(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        return f": {state}" if state else ""
    return ""
