"""Batched text generation with a key/value cache.

Shapes: B rows, T tokens of a forward pass, C tokens with the cached ones, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from models.language_model import LanguageModel
from models.layers.ops import compute_dtype

FILLER_ID = 0  # token id of masked positions: padding left of short prompts, and rows that have ended
MIN_DIVISOR = 1e-5  # of logits: a smaller one gives infinite logits


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
    generator: torch.Generator | None = None,
    before_token: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Return the continuation of each prompt, without the stop token that ended it.

    temperature 0: greedy; top_k 0 and top_p 1 (https://arxiv.org/abs/1904.09751): no truncation; repetition_penalty
    (https://arxiv.org/abs/1909.05858) above 1 makes every token of the row so far less likely. Samples come from
    `generator` (default: a new one with seed 0), never from torch's global generator. See `generate_rows`.
    """
    sampler = Sampler(temperature, top_k, top_p, repetition_penalty, generator)
    rows = [Row(prompt, max_new_tokens, sampler, stop_ids) for prompt in prompts]
    generate_rows(model, rows, before_token)
    return [row.ids for row in rows]


@dataclass(eq=False)
class Row:
    """A prompt and its continuation.

    It ends at a stop token, which is not part of `ids`, where `is_complete` returns True, after `limit` tokens, or at
    the model's max_position_embeddings.
    """

    prompt: list[int]
    limit: int  # new tokens
    sampler: Callable[[Tensor, Sequence[Row]], Tensor]  # a Sampler; rows that share one are sampled together
    stop_ids: Collection[int]
    ids: list[int] = field(default_factory=list)  # new tokens
    has_ended: bool = False

    def constrained(self, logits: Tensor) -> Tensor:
        """Return the logits (1, V) of the token after `ids`, without tokens that may not follow."""
        return logits

    def is_complete(self) -> bool:
        """Return whether the row ends with its newest token; called once for each token."""
        return False

    def add(self, token: int) -> None:
        if token in self.stop_ids:
            self.end(token)
            return
        self.ids.append(token)
        if self.is_complete() or len(self.ids) == self.limit:
            self.end()

    def end(self, stop_token: int | None = None) -> None:
        """`stop_token`: the one at which it ends; None: it does not end at one."""
        self.has_ended = True


def generate_rows(
    model: LanguageModel,
    rows: Sequence[Row],
    before_token: Callable[[], object] = lambda: None,
    join: Callable[[int], Sequence[Row]] = lambda count: [],
) -> None:
    """Continue each row.

    `before_token()` is called before each forward pass: it may raise to stop. `join(number of rows that have not
    ended)` returns further rows between two tokens, where the model can add rows to a batch. Rows of different lengths
    are generated one by one where a batch would not give the logits that they get alone. Raises UserError if a prompt
    is empty or too long for the model.
    """
    rows = _begin(model, rows)
    longest = max((len(row.prompt) + row.limit for row in rows), default=0)
    has_one_batch = len({len(row.prompt) for row in rows}) <= 1 or model.generates_in_batches(longest)
    training = model.training
    model.eval()
    try:
        # Inference mode takes less time; a model that is trained may keep tensors that are made here.
        with torch.inference_mode(not training), torch.no_grad():
            for started in [rows] if has_one_batch and rows else [[row] for row in rows]:
                batch = RowBatch(model, started)
                while count := sum(not row.has_ended for row in batch.rows):
                    before_token()
                    batch.step()
                    if hasattr(batch.cache, "join") and (new := _begin(model, join(count))):
                        before_token()
                        batch.join(RowBatch(model, new))
    finally:
        model.train(training)


class RowBatch:
    """Rows whose last tokens have one position in the cache: fillers are left of the shorter ones."""

    def __init__(self, model: LanguageModel, rows: list[Row], cache: Any = None) -> None:
        """`cache`: an empty one; None: that of the model."""
        self.model, self.rows = model, rows
        length, limit = max(len(row.prompt) for row in rows), max(row.limit for row in rows)
        dtype = compute_dtype(next(model.parameters()))
        self.cache: Any = model.new_cache(len(rows), length + limit, dtype) if cache is None else cache
        self._set_ids([[FILLER_ID] * (length - len(row.prompt)) + row.prompt for row in rows], length)

    def _set_ids(self, ids: list[list[int]], length: int) -> None:
        """Set the tokens (B, T) of the next forward pass; `length`: tokens of each row with the cached ones."""
        self.ids = torch.tensor(ids, device=next(self.model.parameters()).device)
        self.fillers = self.ids.new_tensor([[length - len(row.prompt + row.ids)] for row in self.rows])  # (B, 1)
        self.is_padded = bool(self.fillers.any())

    def step(self) -> None:
        """Give each row its next token."""
        keys = torch.arange(self.cache.length + self.ids.shape[1], device=self.ids.device)  # (C,)
        queries, mask = keys[self.cache.length :], None  # (T,)
        if self.is_padded:
            query = queries.unsqueeze(1)  # (T, 1)
            # (B, 1, T, C), True where attention is allowed. A filler attends to itself: a softmax row without any key
            # is NaN, and NaN spreads.
            mask = ((keys >= self.fillers[:, None, None]) & (keys <= query)) | (keys == query)
        positions = (queries - self.fillers).clamp(min=0)  # (B, T)
        logits = self.model(self.ids, position_ids=positions, mask=mask, cache=self.cache).logits[:, -1].float()
        tokens = []
        for sampler, group in groupby(zip(self.rows, logits.split(1), strict=True), lambda pair: pair[0].sampler):
            pairs = list(group)
            constrained = torch.cat([row.constrained(part) for row, part in pairs])
            tokens.append(sampler(constrained, [row for row, _ in pairs]))
        self.ids = torch.cat(tokens).unsqueeze(1)  # (B, 1)
        for row, token in zip(self.rows, self.ids[:, 0].tolist(), strict=True):
            if not row.has_ended:
                row.add(token)

    def join(self, new: RowBatch) -> None:
        """Add the rows of `new`, with a first token for each; those that have ended are dropped."""
        new.step()
        parts = [(part.cache, [i for i, row in enumerate(part.rows) if not row.has_ended]) for part in (self, new)]
        self.rows = [row for row in self.rows + new.rows if not row.has_ended]
        if self.rows:
            length = max(len(row.prompt + row.ids) for row in self.rows)
            capacity = length + max(row.limit - len(row.ids) for row in self.rows)
            self.cache = self.cache.join(parts, length - 1, capacity)
            self._set_ids([row.ids[-1:] for row in self.rows], length)


@dataclass(eq=False)
class Sampler:
    """logits: (B, V), `rows` with their tokens, which are read for the penalty -> one token per row (B,)."""

    temperature: float
    top_k: int
    top_p: float
    penalty: float
    generator: torch.Generator | None = None  # of all rows; None: a new one with seed 0

    def __call__(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        if self.penalty != 1:
            is_seen = torch.zeros_like(logits, dtype=torch.bool)
            for i, row in enumerate(rows):
                is_seen[i, row.prompt + row.ids] = True
            logits = torch.where(is_seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)
        if self.temperature < MIN_DIVISOR:
            return logits.argmax(-1)
        if self.generator is None:
            self.generator = torch.Generator(logits.device).manual_seed(0)
        logits = self._top_p(self._top_k(logits / self.temperature))
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


def _begin(model: LanguageModel, rows: Sequence[Row]) -> list[Row]:
    """Limit each row by the positions of the model; return those that get a token."""
    positions = model.cfg.max_position_embeddings
    for i, row in enumerate(rows):
        if not row.prompt:
            raise UserError(
                "the prompt is empty: it needs at least one token",
                f"prompt {i}",
                "start it with the tokenizer's bos_id",
            )
        if len(row.prompt) > positions:
            raise UserError(
                f"the prompt has {len(row.prompt)} tokens, model.max_position_embeddings={positions} allows fewer",
                f"prompt {i}",
                "shorten the prompt",
            )
        row.limit = min(row.limit, positions - len(row.prompt))
    for row in rows:
        if row.limit == 0:
            row.end()
    return [row for row in rows if row.limit]
