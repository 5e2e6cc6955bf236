"""How a model of transformers generates: with its cache and in batches where a probe with the weights at hand finds
that exact, else more slowly.

The reference is the whole text of one row, computed at once without a cache. Shapes: B rows, T tokens, C tokens with
the cached ones, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from models.families.transformers import length_dependence
from models.generate import Row, RowBatch
from models.transformers_adapter.kernels import UNSUPPORTED, Probe

CACHE_ARGUMENTS = ("past_key_values", "cache_params")  # names of the cache, the second one in state-space models
PROBED_STEPS = 3  # forward passes of a text with a cache: its beginning, then single tokens


class GenerationMethod(NamedTuple):
    has_cache: bool  # False: the whole text is computed again for each token
    in_batches: bool  # False: rows of different lengths are generated one by one


class TransformersCache:
    """Keys, values and recurrent states of the tokens computed so far, as transformers stores them."""

    def __init__(self, hf: Any, has_cache: bool = True) -> None:
        self.hf, self.has_cache = hf, has_cache
        self.states = DynamicCache(config=hf.config)
        self.length = 0  # cached tokens per row
        self.ids: Tensor | None = None  # (B, length)

    def step(self, ids: Tensor, position_ids: Tensor | None, mask: Tensor | None, accepted: frozenset[str]) -> Tensor:
        """Return the logits (B, 1, V) of the last token. `accepted`: arguments of the model's class.

        The last row of `mask` (B, 1, T, C) tells which of all tokens are no padding; None: all.
        """
        total = self.length + ids.shape[1]
        is_token = ids.new_ones(len(ids), total) if mask is None else mask[:, 0, -1].long()
        arguments: dict[str, Any] = {"attention_mask": is_token, "logits_to_keep": 1, "use_cache": self.has_cache}
        dependence = length_dependence(self.hf.config)
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], dim=1)
        if not self.has_cache or (
            self.length and dependence is not None and dependence.invalidates_cache(self.length, total)
        ):
            ids, position_ids, self.states = self.ids, None, DynamicCache(config=self.hf.config)  # no row is padded
        if self.has_cache:
            arguments |= dict.fromkeys(CACHE_ARGUMENTS, self.states) | {"position_ids": position_ids}
        logits: Tensor = self.hf(ids, **{name: value for name, value in arguments.items() if name in accepted}).logits
        self.length = total
        return logits[:, -1:]


@torch.no_grad()
def choose_generation(model: Any, accepted: frozenset[str]) -> GenerationMethod:
    """Return the fastest method that gives the log-probabilities of single rows without a cache.

    `model`: a TransformersModel, which may be sharded: it is called as a whole. `accepted`: arguments of its class.
    """
    probe = GenerationProbe(model)
    if accepted.isdisjoint(CACHE_ARGUMENTS) or not probe.has_exact_cache():
        return GenerationMethod(has_cache=False, in_batches=False)
    return GenerationMethod(has_cache=True, in_batches=probe.has_exact_batches())


class GenerationProbe(Probe):
    """Rows of random tokens, generated as far as their last PROBED_STEPS tokens and compared with the log-probabilities
    of the whole rows.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        super().__init__(model.hf)
        ends = torch.tensor([len(row) for row in self.rows]).cumsum(0).tolist()
        # (B, PROBED_STEPS, V)
        self.reference = torch.stack([self.reference[end - PROBED_STEPS : end] for end in ends])

    def _log_probs(self, ids: Tensor, **arguments: Any) -> Tensor:
        logits: Tensor = self.model(ids, lengths=ids.new_full((len(ids),), ids.shape[1])).logits
        return logits.float().log_softmax(-1)

    def has_exact_cache(self) -> bool:
        try:
            found = torch.cat([self._steps([row]) for row in self.rows])
        # a model with a cache of another class
        except UNSUPPORTED:
            return False
        return self._agrees(found)

    def has_exact_batches(self) -> bool:
        return self._agrees(self._steps(self.rows))

    def _steps(self, rows: list[Tensor]) -> Tensor:
        """Return the log-probabilities (B, PROBED_STEPS, V) after the last tokens of `rows`, generated with a cache."""
        found: list[Tensor] = []

        def next_tokens(logits: Tensor, _: object) -> Tensor:  # (B, V) -> (B,)
            found.append(logits.log_softmax(-1))
            return torch.stack([row[len(found) - PROBED_STEPS] for row in rows])  # the last ones are not read

        begun = [Row(row[: 1 - PROBED_STEPS].tolist(), PROBED_STEPS, next_tokens, ()) for row in rows]
        batch = RowBatch(self.model, begun, TransformersCache(self.hf))
        for _ in range(PROBED_STEPS):
            batch.step()
        return torch.stack(found, dim=1)
