"""Stop requests as the engine sees them: polled between batches, or raised within work that may be abandoned anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from common.errors import StopRequested
from runner.engine.device.distributed import DistributedContext

T = TypeVar("T")


class StopRequests:
    """Called, it returns whether this process has been asked to stop.

    `launch/signals.py` has the one that signals set.
    """

    def __init__(self, is_requested: Callable[[], bool] = lambda: False) -> None:
        self._is_requested = is_requested
        self.started = time.monotonic()
        self.pending_work = "at the start"  # what a request waits for, in its acknowledgement: "stopping ..."

    def __call__(self) -> bool:
        return self._is_requested()

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


def as_stop_requests(stop_requested: Callable[[], bool]) -> StopRequests:
    return stop_requested if isinstance(stop_requested, StopRequests) else StopRequests(stop_requested)


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
