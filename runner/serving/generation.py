"""One thread that owns the model: requests wait in a queue, those with equal settings are generated as one batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from models.generate import generate
from runner.inference.chat import TokenStreamer

if TYPE_CHECKING:
    from runner.inference.load import LoadedModel


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; requests with equal values can share a batch if no random number decides."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass
class Answer:
    """One continuation that grows while it is generated. Other threads read its fields after `on_end`."""

    prompt: list[int]
    stops: tuple[str, ...]  # texts that end it; they are not part of it
    on_text: Callable[[str], object] = lambda text: None  # called for each new piece of text, from the thread of the model
    ids: list[int] = field(default_factory=list)  # tokens, without the one that ended it
    text: str = ""
    finish_reason: str | None = None  # stop, length or cancelled
    has_stop_token: bool = False  # ended by a token, which is not in `ids`
    _sent: int = 0

    def add(self, text: str) -> None:
        """Append text; hold back what may be the beginning of a stop text."""
        self.text += text
        found = [at for stop in self.stops if (at := self.text.find(stop, max(0, self._sent - len(stop)))) >= 0]
        if found:
            self.text, self.finish_reason = self.text[: min(found)], "stop"
        held = 0 if found else max((n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0)
        self._send(len(self.text) - held)

    def _send(self, end: int) -> None:
        if end > self._sent:
            self.on_text(self.text[self._sent : end])
            self._sent = end

    def end(self, reason: str) -> None:
        self.finish_reason = self.finish_reason or reason
        self._send(len(self.text))


@dataclass
class GenerationRequest:
    """Answers to generate with the same settings, or token ids to score."""

    answers: list[Answer]
    sampling: Sampling
    scored: list[list[int]] | None = None  # instead of generating: ids whose log-probabilities are asked for
    on_end: Callable[[], object] = lambda: None
    is_cancelled: bool = False
    error: Exception | None = None
    scores: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # of each of `scored`: see `score`


class _AllEnded(Exception):
    """No answer of the batch needs another token."""


class GenerationQueue:
    """`submit(request)` returns at once; `request.on_end()` is called from the thread of the model when it is done."""

    def __init__(self, trained: LoadedModel, max_batch: int) -> None:
        self.trained, self._max_batch = trained, max_batch
        self._waiting: queue.Queue[GenerationRequest | None] = queue.Queue()
        self._next: GenerationRequest | None = None  # taken from the queue, but does not fit into the current batch
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        self._waiting.put(request)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (request := self._next or self._waiting.get()) is not None:
            self._next = None
            batch = [request, *self._companions(request)]
            try:
                if request.scored is not None:
                    request.scores = [self.score(ids) for ids in request.scored]
                else:
                    self._generate([each for each in batch if not each.is_cancelled])
            except Exception as error:  # the client gets it; the thread answers the next request
                for each in batch:
                    each.error = error
            for each in batch:
                each.on_end()

    def _companions(self, first: GenerationRequest) -> list[GenerationRequest]:
        """Take the requests from the queue that can be generated together with `first`."""
        found: list[GenerationRequest] = []
        rows = len(first.answers)
        while first.scored is None and first.sampling.is_greedy and rows < self._max_batch:
            try:
                request = self._waiting.get_nowait()
            except queue.Empty:
                break
            if request is None or request.scored is not None or request.sampling != first.sampling:
                self._next = request
                if request is None:
                    self._waiting.put(None)
                break
            found.append(request)
            rows += len(request.answers)
        return found

    def _generate(self, requests: list[GenerationRequest]) -> None:
        answers = [(answer, request) for request in requests for answer in request.answers]
        if not answers:
            return
        sampling = requests[0].sampling
        streamers = [TokenStreamer(self.trained.tokenizer, answer.add, is_raw=True) for answer, _ in answers]

        def on_token(row: int, token: int) -> None:
            answer, request = answers[row]
            if answer.finish_reason is None and not request.is_cancelled:
                answer.ids.append(token)
                streamers[row].add(token)

        def before_token() -> None:
            if all(answer.finish_reason is not None or request.is_cancelled for answer, request in answers):
                raise _AllEnded

        seed = sampling.seed if sampling.seed is not None else int(torch.randint(2**31, ()).item())
        try:
            generate(
                self.trained.model,
                [answer.prompt for answer, _ in answers],
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                repetition_penalty=sampling.repetition_penalty,
                stop_ids=list(sampling.stop_ids),
                generator=torch.Generator(self.trained.device).manual_seed(seed),
                on_token=on_token,
                before_token=before_token,
            )
        except _AllEnded:
            pass
        limit = self.trained.model.cfg.max_position_embeddings
        for (answer, request), streamer in zip(answers, streamers, strict=True):
            if answer.finish_reason is None:
                streamer.finish()
            is_full = len(answer.ids) >= min(sampling.max_new_tokens, limit - len(answer.prompt))
            answer.has_stop_token = answer.finish_reason is None and not is_full and not request.is_cancelled
            answer.end("cancelled" if request.is_cancelled else "length" if is_full else "stop")

    @torch.inference_mode()
    def score(self, ids: list[int], top: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of each token after the first its log-probability (T - 1,), and the `top` likeliest tokens with theirs, (T - 1, top, 2)."""
        logits = self.trained.model(torch.tensor([ids], device=self.trained.device)).logits[0, :-1].float()  # (T - 1, V)
        log_probs = logits.log_softmax(-1)
        best = log_probs.topk(min(top, log_probs.shape[-1]))
        own = log_probs.gather(-1, torch.tensor(ids[1:], device=logits.device).unsqueeze(-1)).squeeze(-1)
        return own.cpu(), torch.stack([best.indices.float(), best.values], dim=-1).cpu()
