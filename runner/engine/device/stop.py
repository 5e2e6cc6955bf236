"""Stop requests as the engine sees them: polled between batches, or raised within work that may be abandoned anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from common.errors import StopRequested
from runner.engine.device.distributed import DistributedContext


class StopRequests:
    """Called, it returns whether this process has been asked to stop.

    `launch/signals.py` has the one that signals set.
    """

    def __init__(self, is_requested: Callable[[], bool] = lambda: False) -> None:
        self._is_requested = is_requested
        self.pending_work = "at the start"  # what a request waits for, in its acknowledgement: "stopping ..."

    def __call__(self) -> bool:
        return self._is_requested()

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


@contextmanager
def stopping_together(dist: DistributedContext, stop: StopRequests) -> Iterator[None]:
    """Run the preparation of a run, without any collective in it.

    Raises StopRequested on every rank if some rank is asked to stop meanwhile.
    """
    is_done = False
    with suppress(StopRequested), stop.interrupting("before the first step"):
        yield
        is_done = True
    if dist.any(stop()) or not is_done:
        raise StopRequested
