"""One thread that commits saves while the training goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SaveResult:
    """How a job of the Writer ended, and the seconds it took beside the training."""

    name: str
    seconds: float
    error: BaseException | None
    result: Any = None


class AsyncWriter:
    """Commits in the background, one job at a time. Its thread is no daemon: leaving the program waits for the last save."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ended: deque[SaveResult] = deque()  # filled by the thread, emptied by the caller

    def submit(self, name: str, job: Callable[[], Any]) -> float:
        """Start `job`; returns the seconds the caller was held up by the one before, still in flight."""
        start = time.perf_counter()
        self._join()
        waited = time.perf_counter() - start
        self._thread = threading.Thread(target=self._work, args=(name, job), name=f"save {name}", daemon=False)
        self._thread.start()
        return waited

    def poll(self) -> list[SaveResult]:
        """The jobs that ended since the last call; never waits. An error is handed over, not raised: training may go on."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def wait(self) -> list[SaveResult]:
        """As `poll`, once nothing is in flight any more."""
        self._join()
        return self.poll()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self, name: str, job: Callable[[], Any]) -> None:
        start, error, result = time.perf_counter(), None, None
        try:
            result = job()
        except BaseException as caught:  # noqa: BLE001  whatever it is, the training thread must hear of it
            error = caught
        self._ended.append(SaveResult(name, time.perf_counter() - start, error, result))
