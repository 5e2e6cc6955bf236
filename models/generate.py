"""Continue prompts token by token. Shapes: B rows, T positions, S positions in the cache, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import UserError
from models.decoder import Decoder
from models.layers.attention_block import KVCache

FILLER_ID = 0  # stands where no token is: left of short prompts, and in rows that have ended; attention never sees it


def generate(
    model: Decoder,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    stop_ids: list[int],
    generator: torch.Generator | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The continuation of each prompt, without the stop token that ended it.

    temperature 0 takes the likeliest token; top_k 0 and top_p 1 (https://arxiv.org/abs/1904.09751) cut nothing off;
    repetition_penalty (https://arxiv.org/abs/1909.05858) above 1 makes every token of the row so far less likely.
    Draws come from `generator` (a fresh one of seed 0 without it), never from the global one. Each new token is told to
    `on_token(row, token)`. A row ends at a stop token, after `max_new_tokens`, or where the model has no positions left.
    Raises ValueError(what, where, fix) for a prompt that is empty or longer than the model.
    """
    limits = _limits(prompts, max_new_tokens, model.cfg.max_position_embeddings)
    training = model.training
    model.eval()
    try:
        return _continue(model, prompts, limits, Sampler(temperature, top_k, top_p, repetition_penalty, generator), set(stop_ids), on_token)
    finally:
        model.train(training)


@torch.no_grad()
def _continue(
    model: Decoder, prompts: list[list[int]], limits: list[int], sampler: Sampler, stop_ids: set[int], on_token: Callable[[int, int], None] | None
) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    going = {row for row, limit in enumerate(limits) if limit}
    if not going:
        return answers
    device = model.model.embed_tokens.weight.device
    ids, real = _left_padded(prompts, max(limits), device)
    T = ids.shape[1]
    seen = torch.zeros(len(prompts), model.cfg.vocab_size, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    cache = KVCache(model.cfg, len(prompts), real.shape[1], device, _compute_dtype(model))
    positions = (real[:, :T].cumsum(-1) - 1).clamp(min=0)  # (B, T)
    # Where attention may look (B, 1, T, T). A filler looks at itself: looking nowhere is NaN, and NaN spreads.
    mask = ((torch.ones(T, T, device=device).tril() * real[:, None, :T]).bool() | torch.eye(T, dtype=torch.bool, device=device)).unsqueeze(1)
    while True:
        logits = model(ids, position_ids=positions, mask=mask, cache=cache).logits[:, -1]  # (B, V)
        ids = sampler(logits.float(), seen).unsqueeze(1)  # (B, 1)
        for row, token in enumerate(ids[:, 0].tolist()):
            if row not in going:
                continue
            if token in stop_ids:
                going.discard(row)
                continue
            answers[row].append(token)
            if len(answers[row]) == limits[row]:
                going.discard(row)
            if on_token is not None:
                on_token(row, token)
        if not going:
            return answers
        seen.scatter_(1, ids, True)
        positions = positions[:, -1:] + 1
        mask = real[:, None, None, : cache.start + 1]


class Sampler:
    """Logits (B, V) and what each row holds already (B, V) -> a token for each row (B,)."""

    def __init__(self, temperature: float, top_k: int, top_p: float, repetition_penalty: float, generator: torch.Generator | None) -> None:
        self.temperature, self.top_k, self.top_p, self.penalty, self.generator = temperature, top_k, top_p, repetition_penalty, generator

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        if self.penalty != 1:
            logits = torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)
        if self.temperature == 0:
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
        """Keep the fewest tokens that together weigh at least top_p; the likeliest always stays."""
        if self.top_p >= 1:
            return logits
        ordered, order = logits.sort(descending=True)
        weights = ordered.softmax(-1)
        above = weights.cumsum(-1) - weights  # the weight of all likelier tokens
        cut = above >= self.top_p
        cut[:, 0] = False
        return logits.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), -torch.inf)


def _limits(prompts: list[list[int]], max_new_tokens: int, positions: int) -> list[int]:
    """How many tokens each row may get."""
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UserError("there is nothing to continue", f"prompt {row}", "begin it with the tokenizer's bos_id at least")
        if len(prompt) > positions:
            raise UserError(f"{len(prompt)} tokens are more than model.max_position_embeddings={positions}", f"prompt {row}", "shorten the prompt")
    return [min(max_new_tokens, positions - len(prompt)) for prompt in prompts]


def _left_padded(prompts: list[list[int]], more: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids (B, T) that end together, and which positions of the cache (B, T + more) hold a token that counts."""
    T = max(map(len, prompts))
    ids = torch.tensor([[FILLER_ID] * (T - len(prompt)) + prompt for prompt in prompts], device=device)
    real = torch.arange(T + more, device=device) >= torch.tensor([T - len(prompt) for prompt in prompts], device=device).unsqueeze(1)
    return ids, real


def _compute_dtype(model: Decoder) -> torch.dtype:
    """What keys and values are computed in: autocast's type under the caller's autocast, else the weights'."""
    weight = model.model.embed_tokens.weight
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
