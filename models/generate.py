"""Batched text generation with a key/value cache.

Shapes: B rows, T tokens, C capacity of the cache (tokens), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UserError
from models.language_model import LanguageModel
from models.layers.ops import compute_dtype

FILLER_ID = 0  # token id of masked positions: padding left of short prompts, and rows that have ended


def generate(
    model: LanguageModel,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    stop_ids: list[int],
    generator: torch.Generator | list[torch.Generator] | None = None,
    on_token: Callable[[int, int], object] = lambda row, token: None,
    on_end: Callable[[int, bool], object] = lambda row, has_stop_token: None,
    before_token: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Return the continuation of each prompt, without the stop token that ended it.

    temperature 0: greedy; top_k 0 and top_p 1 (https://arxiv.org/abs/1904.09751): no truncation; repetition_penalty
    (https://arxiv.org/abs/1909.05858) above 1 makes every token of the row so far less likely. Samples come from
    `generator` (default: a new one with seed 0), never from torch's global generator; with a list of them each row has
    its own, and does not depend on the others. `on_token(row, token)` is called for each new token, `on_end(row,
    has_stop_token)` when a row ends, `before_token()` before each forward pass: it may raise to stop. A row ends at a
    stop token, where `on_token` returns True, after `max_new_tokens`, or at the model's max_position_embeddings. Rows
    of different lengths are generated one by one where a batch would not give the logits that they get alone. Raises
    UserError if a prompt is empty or too long for the model.
    """
    limits = _new_token_limits(prompts, max_new_tokens, model.cfg.max_position_embeddings)
    longest = max((len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)), default=0)
    rows = list(range(len(prompts)))
    has_one_batch = len({len(prompt) for prompt in prompts}) <= 1 or model.generates_in_batches(longest)
    answers: list[list[int]] = [[] for _ in prompts]

    def add(row: int, token: int) -> object:
        answers[row].append(token)
        return on_token(row, token)

    training = model.training
    model.eval()
    try:
        for batch in [rows] if has_one_batch else [[row] for row in rows]:
            own = [generator[row] for row in batch] if isinstance(generator, list) else generator
            sampler = Sampler(temperature, top_k, top_p, repetition_penalty, own)
            _generate(model, prompts, limits, batch, sampler, set(stop_ids), add, on_end, before_token)
        return answers
    finally:
        model.train(training)


@torch.no_grad()
def _generate(
    model: LanguageModel,
    prompts: list[list[int]],
    limits: list[int],
    rows: list[int],
    sampler: Sampler,
    stop_ids: set[int],
    on_token: Callable[[int, int], object],
    on_end: Callable[[int, bool], object],
    before_token: Callable[[], object],
) -> None:
    """Generate the `rows` of `prompts` as one batch."""
    left = {row: limits[row] for row in rows}  # tokens that a row may still get; without the rows that have ended

    def end(row: int, has_stop_token: bool) -> None:
        del left[row]
        on_end(row, has_stop_token)

    for row in [row for row in rows if not left[row]]:
        end(row, has_stop_token=False)
    if not left:
        return
    embedding = next(model.parameters())
    device = embedding.device
    ids, is_token = _pad_left([prompts[row] for row in rows], max(left.values()), device)
    T = ids.shape[1]
    seen = torch.zeros(len(rows), model.cfg.vocab_size, dtype=torch.bool, device=device)
    for i, row in enumerate(rows):
        seen[i, prompts[row]] = True
    cache = model.new_cache(len(rows), is_token.shape[1], compute_dtype(embedding))
    positions = (is_token[:, :T].cumsum(-1) - 1).clamp(min=0)  # (B, T)
    # (B, 1, T, T), True where attention is allowed. A filler attends to itself: a softmax row without any key is NaN,
    # and NaN spreads.
    mask = (
        (torch.ones(T, T, device=device).tril() * is_token[:, None, :T]).bool()
        | torch.eye(T, dtype=torch.bool, device=device)
    ).unsqueeze(1)
    while True:
        before_token()
        logits = model(ids, position_ids=positions, mask=mask, cache=cache).logits[:, -1]  # (B, V)
        ids = sampler(logits.float(), seen).unsqueeze(1)  # (B, 1)
        for row, token in zip(rows, ids[:, 0].tolist(), strict=True):
            if row not in left:
                continue
            if token in stop_ids:
                end(row, has_stop_token=True)
                continue
            left[row] -= 1
            if on_token(row, token) is True or not left[row]:
                end(row, has_stop_token=False)
        if not left:
            return
        seen.scatter_(1, ids, True)
        positions = positions[:, -1:] + 1
        mask = is_token[:, None, None, : cache.length + 1]


@dataclass
class Sampler:
    """logits: (B, V), seen: (B, V) tokens that a row already has -> one token per row (B,)."""

    temperature: float
    top_k: int
    top_p: float
    penalty: float
    generator: torch.Generator | list[torch.Generator] | None  # of all rows, or of each; None: a new one with seed 0

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        if self.penalty != 1:
            logits = torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.generator is None:
            self.generator = torch.Generator(logits.device).manual_seed(0)
        logits = self._top_p(self._top_k(logits / self.temperature))
        if isinstance(self.generator, list):
            rows = logits.softmax(-1).split(1)
            return torch.cat(
                [torch.multinomial(row, 1, generator=own) for row, own in zip(rows, self.generator, strict=True)]
            ).squeeze(1)
        return torch.multinomial(logits.softmax(-1), 1, generator=self.generator).squeeze(1)

    def _top_k(self, logits: Tensor) -> Tensor:
        if not 0 < self.top_k < logits.shape[-1]:
            return logits
        return logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -torch.inf)

    def _top_p(self, logits: Tensor) -> Tensor:
        """Keep the smallest set of most likely tokens with a probability of at least top_p together; always keep the
        most likely one.
        """
        if self.top_p >= 1:
            return logits
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        removed = probs.cumsum(-1) - probs >= self.top_p  # by the probability of all more likely tokens
        removed[:, 0] = False
        return logits.masked_fill(torch.zeros_like(removed).scatter(1, order, removed), -torch.inf)


def _new_token_limits(prompts: list[list[int]], max_new_tokens: int, max_positions: int) -> list[int]:
    """Return the number of tokens that each row may get."""
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(
                "the prompt is empty: it needs at least one token",
                f"prompt {row}",
                "start it with the tokenizer's bos_id",
            )
        if len(prompt) > max_positions:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, model.max_position_embeddings={max_positions} allows fewer",
                f"prompt {row}",
                "shorten the prompt",
            )
    return [min(max_new_tokens, max_positions - len(prompt)) for prompt in prompts]


def _pad_left(prompts: list[list[int]], max_new_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids (B, T), all prompts ending at T, and which of C = T + max_new_tokens cache positions hold a token (B,
    C).
    """
    T = max(map(len, prompts))
    ids = torch.tensor([[FILLER_ID] * (T - len(prompt)) + prompt for prompt in prompts], device=device)
    is_token = torch.arange(T + max_new_tokens, device=device) >= torch.tensor(
        [T - len(prompt) for prompt in prompts], device=device
    ).unsqueeze(1)
    return ids, is_token
