"""Background thread that commits saves while training continues."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SaveResult:
    """Result of one job of the AsyncWriter."""

    name: str
    seconds: float  # of the job itself, while training continued
    error: BaseException | None


class AsyncWriter:
    """Runs one job at a time in a thread. The thread is no daemon: the process exits only after the last save."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._results: deque[SaveResult] = deque()  # filled by the thread, emptied by the caller

    def submit(self, name: str, job: Callable[[], Any]) -> None:
        """Start `job`, after waiting for the previous one."""
        self._join()
        self._thread = threading.Thread(target=self._run, args=(name, job), name=f"save {name}", daemon=False)
        self._thread.start()

    def poll(self) -> list[SaveResult]:
        """Return the results since the last call, without waiting. An error is returned, not raised: training may continue."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def wait(self) -> list[SaveResult]:
        """Wait for the job in flight, then return the results since the last call."""
        self._join()
        return self.poll()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, name: str, job: Callable[[], Any]) -> None:
        started, error = time.perf_counter(), None
        try:
            job()
        except BaseException as caught:  # noqa: BLE001  every error is handed to the training thread
            error = caught
        self._results.append(SaveResult(name, time.perf_counter() - started, error))
