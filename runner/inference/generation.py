"""Answers that grow token by token, and log-probabilities of texts, each computed in batches.

Every command that lets a model generate or score uses these two classes. Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.errors import UserError
from models.generate import Row, generate_rows

if TYPE_CHECKING:
    from data.tokenize.tokenizer import Tokenizer
    from runner.inference.load import LoadedModel

MAX_BEFORE = 16  # tokens of an answer that are decoded again before new ones
MAX_LOGITS = 1 << 28  # of a batch that is scored: fewer rows where the vocabulary is large
SCORED_POSITIONS = 256  # whose log-probabilities are in memory at once


@dataclass(eq=False)
class Work:
    """`done` ends in the thread of the model; any thread may cancel it."""

    done: Future[None] = field(default_factory=Future)

    def finish(self, error: Exception | None = None) -> None:
        with suppress(InvalidStateError):  # it was cancelled, or is done
            self.done.set_result(None) if error is None else self.done.set_exception(error)


@dataclass(eq=False, kw_only=True)
class Answer(Work, Row):
    """One continuation of a prompt, and its text."""

    tokenizer: Tokenizer
    # changes logits (1, V) after `ids`; may raise UserError, which ends it alone
    constrain: Callable[[Tensor, list[int]], Tensor] | None = None
    stops: tuple[str, ...] = ()  # texts that end it; they are not part of it
    on_text: Callable[[str], object] = lambda text: None  # called for each new piece of text with whole characters
    text: str = ""
    finish_reason: str | None = None  # stop or length
    stop_token: int | None = None  # that ended it, which is not in `ids`
    _sent: int = 0  # characters
    _begun: dict[str, int] = field(default_factory=dict)  # stop text -> its first characters that `text` ends with
    # decoded again with new tokens: a tokenizer may drop the space of the first; at first those that a text continues
    before: list[int] = field(default_factory=list)
    _end: int = 0  # tokens in `text`

    def constrained(self, logits: Tensor) -> Tensor:
        if self.constrain is None or self.has_ended:
            return logits
        try:
            return self.constrain(logits, self.ids)
        except UserError as error:
            self.finish(error)
            return logits

    def is_complete(self) -> bool:
        if not self.done.done():
            self._decode()
            if self.stops:  # may be texts of control tokens, which `text` does not have
                longest = max(len(stop.encode()) for stop in self.stops) + 1  # tokens; one is at least a byte
                tail = self.tokenizer.decode(self.ids[-longest:], skip_special=False)
                if any(stop in tail for stop in self.stops):
                    self.finish_reason = "stop"
        return self.done.done() or self.finish_reason is not None

    def end(self, stop_token: int | None = None) -> None:
        """Send what is left of the text, unless the answer is done."""
        super().end(stop_token)
        if self.done.done():
            return
        self._decode(is_last=True)
        if self.finish_reason is None:
            self.stop_token = stop_token
            self.finish_reason = "length" if stop_token is None else "stop"
        self._send(len(self.text))
        self.finish()

    def add_text(self, text: str) -> None:
        """Append text; hold back what may be the beginning of a stop text."""
        start = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += text
        held = 0
        if found := [at for stop in self.stops if (at := self.text.find(stop, start)) >= 0]:
            self.text, self.finish_reason = self.text[: min(found)], "stop"
        else:
            for stop in self.stops:  # its beginning at the end of the text grows by the new characters at most
                longest = min(self._begun.get(stop, 0) + len(text), len(stop) - 1)
                self._begun[stop] = next(n for n in range(longest, -1, -1) if self.text.endswith(stop[:n]))
                held = max(held, self._begun[stop])
        self._send(len(self.text) - held)

    def _decode(self, is_last: bool = False) -> None:
        """Add the text of new tokens, unless its last character is incomplete: its bytes may be in several tokens."""
        new = self.ids[self._end :]
        text = self.tokenizer.decode(self.before + new)
        if text.endswith("\ufffd") and not is_last:
            return
        text = text[len(self.tokenizer.decode(self.before)) :]
        # a token may have no text
        self.before, self._end = (new if text else self.before[:MAX_BEFORE] + new), len(self.ids)
        self.add_text(text)

    def _send(self, end: int) -> None:
        if end > self._sent:
            self.on_text(self.text[self._sent : end])
            self._sent = end


@dataclass(eq=False)
class Score(Work):
    """Log-probabilities of the tokens of a text from number `first` on, each given those before it."""

    ids: list[int] = field(default_factory=list)  # (T,)
    first: int = 1  # at least 1: nothing predicts the first token
    top: int = 1  # how many of the likeliest tokens are listed for each position
    own: list[float] = field(default_factory=list)  # (T - first,)
    # (T - first, top) of (token, log-probability), the likeliest first
    best: list[list[tuple[int, float]]] = field(default_factory=list)

    def read(self, logits: Tensor) -> None:
        """logits: (T, V)"""
        for start in range(self.first, len(self.ids), SCORED_POSITIONS):
            targets = torch.tensor(self.ids[start : start + SCORED_POSITIONS], device=logits.device)
            log_probs = logits[start - 1 : start - 1 + len(targets)].float().log_softmax(-1)
            self.own += log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).tolist()
            best = log_probs.topk(min(self.top, log_probs.shape[-1]))
            self.best += [
                list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        self.finish()


@torch.inference_mode()
def score_texts(trained: LoadedModel, scores: Sequence[Score], max_rows: int, before_batch: Callable[[], None]) -> None:
    """Compute `scores`, the longest first. `before_batch` may raise to stop."""
    rest = sorted(scores, key=lambda score: -len(score.ids))
    while rest:
        before_batch()
        most = MAX_LOGITS // (trained.model.cfg.vocab_size * len(rest[0].ids))
        batch = rest[: max(1, min(max_rows, most))]
        rest = rest[len(batch) :]
        rows = [torch.tensor(score.ids[:-1] or score.ids) for score in batch]  # nothing is read behind the last token
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(trained.device)
        logits = trained.model(ids).logits  # (B, T, V)
        assert logits is not None
        for score, row in zip(batch, logits, strict=True):
            score.read(row)


def compute_batch(
    trained: LoadedModel,
    works: Sequence[Work],
    max_rows: int,
    check_stop: Callable[[], None],
    join: Callable[[int], Sequence[Answer]] = lambda count: [],
) -> None:
    """Compute works of one kind."""
    if answers := [work for work in works if isinstance(work, Answer)]:
        generate_rows(trained.model, answers, check_stop, join)
    else:
        score_texts(trained, [work for work in works if isinstance(work, Score)], max_rows, check_stop)
