"""One thread that owns the model: answers wait in a queue, those with equal settings are generated as one batch."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from common.errors import UserError, print_safely
from models.generate import generate
from runner.inference.chat import TokenStreamer
from runner.serving.answers import Answer, Score, Work

if TYPE_CHECKING:
    from runner.inference.load import LoadedModel

MAX_SCORED_LOGITS = 1 << 28  # of a batch that is scored: fewer rows where the vocabulary is large


class QueueFullError(Exception):
    """More answers wait than `max_waiting`."""


class StoppingError(Exception):
    """The server is stopped by its user."""


class _AllEnded(Exception):
    """No answer of the batch needs another token."""


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
                self._waiting = deque(work for work in self._waiting if not work.is_cancelled)
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
        while (batch := self._next_batch()) is not None:
            try:
                self._compute(batch)
            except _AllEnded:
                pass
            except Exception as error:  # the clients get it; the thread computes the next batch
                if not isinstance(error, UserError | StoppingError):
                    print_safely(traceback.format_exc(), file=sys.stderr)
                for work in batch:
                    if not isinstance(work, Answer) or work.is_wanted:
                        work.error = error
            for work in batch:
                self._end(work)
        for work in self._waiting:
            work.error = StoppingError()
            self._end(work)

    def _end(self, work: Work) -> None:
        on_end, work.on_end = work.on_end, lambda: None
        on_end()

    def _next_batch(self) -> list[Work] | None:
        """Return the oldest work and others that can be computed with it; None: stop."""
        with self._changed:
            while not self.is_stopping:
                waiting = [work for work in self._waiting if not work.is_cancelled]
                if waiting:
                    batch = [work for work in waiting if _can_share(waiting[0], work)][: self._max_batch]
                    chosen = set(map(id, batch))
                    self._waiting = deque(work for work in waiting if id(work) not in chosen)
                    return batch
                self._waiting.clear()
                self._changed.wait(timeout=1)  # a signal handler does not notify
        return None

    def _compute(self, batch: list[Work]) -> None:
        if isinstance(batch[0], Score):
            self._score([work for work in batch if isinstance(work, Score)])
        else:
            self._generate([work for work in batch if isinstance(work, Answer)])

    def _generate(self, answers: list[Answer]) -> None:
        sampling = answers[0].sampling
        streamers = [TokenStreamer(self.trained.tokenizer, answer.add, is_raw=True) for answer in answers]

        def on_token(row: int, token: int) -> None:
            if answers[row].is_wanted:
                answers[row].ids.append(token)
                streamers[row].add(token)
                if answers[row].finish_reason is not None:  # a stop text
                    self._end(answers[row])

        def on_end(row: int, has_stop_token: bool) -> None:
            answer = answers[row]
            if answer.is_wanted:
                streamers[row].finish()
                answer.has_stop_token = has_stop_token and answer.finish_reason is None
                answer.end("stop" if has_stop_token else "length")
                self._end(answer)

        def before_token() -> None:
            if self.is_stopping:
                raise StoppingError
            if not any(answer.is_wanted for answer in answers):
                raise _AllEnded

        generate(
            self.trained.model,
            [answer.prompt for answer in answers],
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            stop_ids=list(sampling.stop_ids),
            generator=[torch.Generator(self.trained.device).manual_seed(answer.seed) for answer in answers],
            on_token=on_token,
            on_end=on_end,
            before_token=before_token,
        )

    @torch.inference_mode()
    def _score(self, scores: list[Score]) -> None:
        vocabulary = self.trained.model.cfg.vocab_size
        while scores:
            rows = max(1, min(len(scores), MAX_SCORED_LOGITS // (vocabulary * max(len(score.ids) for score in scores))))
            batch, scores = scores[:rows], scores[rows:]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(score.ids) for score in batch], batch_first=True)
            logits = self.trained.model(ids.to(self.trained.device)).logits  # (B, T, V)
            assert logits is not None
            for score, row in zip(batch, logits, strict=True):
                score.read(row)


def _can_share(first: Work, other: Work) -> bool:
    if isinstance(first, Answer) and isinstance(other, Answer):
        return first.sampling == other.sampling
    return isinstance(first, Score) and isinstance(other, Score)
