"""One thread that commits saves while the training goes on."""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a save ended: `error` is None once it is on disk. `seconds`: what it took, beside the training."""

    name: str
    seconds: float
    error: BaseException | None


class Writer:
    """Commits in the background, one save at a time. Its thread is not a daemon: leaving the program waits for the last save."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._done: deque[Outcome] = deque()  # appended to by the thread, emptied by the caller

    def submit(self, name: str, job: Callable[[], object]) -> float:
        """Start `job`; the seconds the caller was held up because the save before was still being written."""
        start = time.perf_counter()
        self._join()
        waited = time.perf_counter() - start
        self._thread = threading.Thread(target=self._work, args=(name, job), name=f"save {name}", daemon=False)
        self._thread.start()
        return waited

    def poll(self) -> list[Outcome]:
        """The saves that ended since the last call; never waits. An error is handed over, not raised: training may go on."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self) -> list[Outcome]:
        """As `poll`, after the save in flight."""
        self._join()
        return self.poll()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self, name: str, job: Callable[[], object]) -> None:
        start, error = time.perf_counter(), None
        try:
            job()
        except BaseException as caught:  # noqa: BLE001  whatever it is, the training thread must hear of it
            error = caught
        self._done.append(Outcome(name, time.perf_counter() - start, error))
