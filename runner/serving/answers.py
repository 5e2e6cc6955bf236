"""Work of the model for one request: an answer that grows token by token, or a text that is scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Answers with equal values can share a batch; the seed of an answer is its own.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()


@dataclass(eq=False)
class Work:
    """`on_end` is called once, from the thread of the model, when the work is done, has failed or was cancelled; other
    threads read the results then.
    """

    on_end: Callable[[], object] = lambda: None
    is_cancelled: bool = False  # set by any thread
    error: Exception | None = None


@dataclass(eq=False)
class Answer(Work):
    """One continuation of a prompt."""

    prompt: list[int] = field(default_factory=list)
    sampling: Sampling = Sampling(0)
    seed: int = 0
    stops: tuple[str, ...] = ()  # texts that end it; they are not part of it
    # called for each new piece of text, from the thread of the model
    on_text: Callable[[str], object] = lambda text: None
    ids: list[int] = field(default_factory=list)  # tokens, without the stop token that ended it
    text: str = ""
    finish_reason: str | None = None  # stop or length
    has_stop_token: bool = False  # ended by a stop token, which is not in `ids`
    _sent: int = 0  # characters

    @property
    def is_wanted(self) -> bool:
        """Whether another token is needed."""
        return self.finish_reason is None and not self.is_cancelled

    def add(self, text: str) -> None:
        """Append text; hold back what may be the beginning of a stop text."""
        start = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += text
        found = [at for stop in self.stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.finish_reason = self.text[: min(found)], "stop"
        held = (
            0
            if found
            else max((n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0)
        )
        self._send(len(self.text) - held)

    def end(self, reason: str) -> None:
        self.finish_reason = self.finish_reason or reason
        self._send(len(self.text))

    def _send(self, end: int) -> None:
        if end > self._sent:
            self.on_text(self.text[self._sent : end])
            self._sent = end


@dataclass(eq=False)
class Score(Work):
    """Log-probabilities of the tokens of a text."""

    ids: list[int] = field(default_factory=list)  # (T,)
    top: int = 0  # how many of the likeliest tokens are listed for each position
    own: list[float] = field(default_factory=list)  # (T - 1,) of each token after the first
    # (T - 1, top) of (token, log-probability), the likeliest first
    best: list[list[tuple[int, float]]] = field(default_factory=list)

    def read(self, logits: Tensor, chunk: int = 256) -> None:
        """logits: (T, V). Log-probabilities of a chunk of positions at a time need little memory."""
        self.own, self.best = [], []
        for start in range(0, len(self.ids) - 1, chunk):
            targets = self.ids[start + 1 : start + 1 + chunk]
            log_probs = logits[start : start + len(targets)].float().log_softmax(-1)
            self.own += (
                log_probs.gather(-1, torch.tensor(targets, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
            )
            best = log_probs.topk(min(self.top, log_probs.shape[-1]))
            self.best += [
                list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
