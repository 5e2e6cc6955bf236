"""One thread that owns the model: answers wait in a queue, those with equal settings are generated as one batch."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Sequence

from common.errors import UserError, print_safely
from runner.inference.generation import Answer, Score, Work, generate_answers, score_texts
from runner.inference.load import LoadedModel


class QueueFullError(Exception):
    """More answers wait than `max_waiting`."""


class StoppingError(Exception):
    """The server is stopped by its user."""


class GenerationQueue:
    """`submit(works)` returns at once.

    The oldest work is done first, together with those behind it that fit into its batch.
    """

    def __init__(self, trained: LoadedModel, max_batch: int, max_waiting: int) -> None:
        self.trained, self._max_batch, self._max_waiting = trained, max_batch, max_waiting
        self._waiting: deque[Work] = deque()
        self._changed = threading.Condition()
        self.is_stopping = False  # may be set by a signal handler, which takes no lock
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def submit(self, works: Sequence[Work]) -> None:
        """Raises QueueFullError if too many wait; nothing is added then."""
        with self._changed:
            if len(self._waiting) + len(works) > self._max_waiting:
                self._drop_cancelled()
            if self._waiting and len(self._waiting) + len(works) > self._max_waiting:
                raise QueueFullError
            self._waiting.extend(works)
            self._changed.notify()

    def close(self) -> None:
        """Cancel what waits and what is computed, and end the thread."""
        self.is_stopping = True
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._compute(batch)
            except Exception as error:  # the clients get it; the thread computes the next batch
                if not isinstance(error, UserError | StoppingError):
                    print_safely(traceback.format_exc(), file=sys.stderr)
                _fail(batch, error)
        _fail(self._waiting, StoppingError())

    def _next_batch(self) -> list[Work]:
        """Return the oldest work and others that can be computed with it; []: stop."""
        with self._changed:
            while not self.is_stopping:
                self._drop_cancelled()
                if self._waiting:
                    first = self._waiting[0]
                    batch = [work for work in self._waiting if _can_share(first, work)][: self._max_batch]
                    self._waiting = deque(work for work in self._waiting if work not in batch)
                    return batch
                self._changed.wait(timeout=1)  # a signal handler does not notify
        return []

    def _drop_cancelled(self) -> None:
        self._waiting = deque(work for work in self._waiting if not work.done.cancelled())

    def _compute(self, batch: list[Work]) -> None:
        if answers := [work for work in batch if isinstance(work, Answer)]:
            generate_answers(self.trained, answers, self._check_stop)
        else:
            scores = [work for work in batch if isinstance(work, Score)]
            score_texts(self.trained, scores, self._max_batch, self._check_stop)

    def _check_stop(self) -> None:
        if self.is_stopping:
            raise StoppingError


def _fail(works: Iterable[Work], error: Exception) -> None:
    for work in works:
        work.finish(error)


def _can_share(first: Work, other: Work) -> bool:
    if isinstance(first, Answer) and isinstance(other, Answer):
        return first.sampling == other.sampling
    return isinstance(first, Score) and isinstance(other, Score)
