"""The interface between the training loop and an objective: sums over countable items, so that micro-batches and ranks
add up exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data.batching.batch import Batch
    from models.config import LoraConfig
    from models.language_model import LanguageModel

    LossSums = dict[str, Tensor]  # scalars; "loss" is differentiated, the others are logged


@dataclass
class Reference:
    """The model as it was before this training, and the context in which to call it."""

    model: LanguageModel
    entered: Callable[[], AbstractContextManager] = nullcontext

    @classmethod
    def of(cls, model: LanguageModel, lora: LoraConfig | None) -> Reference:
        """Return a frozen copy of `model`; with adapters, the model itself while they are disabled, which needs no
        memory.
        """
        import copy

        from models.lora import disable_adapters

        if lora is not None:
            return cls(model, lambda: disable_adapters(model))
        return cls(copy.deepcopy(model).requires_grad_(False).eval())


class Objective:
    """What a stage minimizes.

    The loss of a step is the sum of `loss()` over its micro-batches, divided by the sum of `count()`.
    """

    reference: Reference | None = None

    def count(self, batch: Batch) -> float:
        """Return the number of items in the batch (e.g. pairs, or tokens with a label, each counted as its weight),
        before the forward pass.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        """Return the loss, and metrics to log with it, each summed over the items."""
        raise NotImplementedError

    def eval_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return further metrics of an evaluation, from the sums of `loss()` divided by their count."""
        return {}

    def uniform_loss(self, vocab_size: int) -> float | None:
        """Return the loss of a model that gives every token the same probability, or None if it is no measure of
        divergence.
        """
        return None

    @property
    def extra_models(self) -> list[LanguageModel]:
        """Models beside the trained one that the objective calls."""
        if self.reference is None or any(p.requires_grad for p in self.reference.model.parameters()):
            return []
        return [self.reference.model]

    @property
    def frozen_parameters(self) -> dict[str, Tensor]:
        """Parameters and buffers that the objective reads and the training does not change: no checkpoint has them."""
        from models.language_model import stored_tensors

        stored = stored_tensors(self.reference.model) if self.reference is not None else {}
        return {name: tensor for name, tensor in stored.items() if not tensor.requires_grad}


def mask_dummy_batch(batch: Batch, sums: LossSums) -> LossSums:
    """Return zeros for a dummy batch: it is computed because collectives need every rank, and does not count."""
    return sums if batch.names else {name: part * 0 for name, part in sums.items()}
