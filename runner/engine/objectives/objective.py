"""What a stage asks of the model, as sums over countable items, so that micro-batches and ranks add up exactly.

Shapes: R lines, T positions, B pairs.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from data.batching.batch import Batch
from models.decoder import Decoder

LossSums = dict[str, Tensor]  # "loss" is what is differentiated; the others are for the log


class Objective(Protocol):
    def count(self, batch: Batch) -> int:
        """How many items this batch holds; known before the forward pass."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        """The loss, and what goes with it, summed over these items."""

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Weights beside the model's own that it reads and nothing changes."""

    @property
    def beside(self) -> list[Decoder]:
        """Models it calls beside the one that learns."""


def mask_dummy_batch(batch: Batch, parts: LossSums) -> LossSums:
    """A stand-in is computed, because all ranks meet in it, and counts as nothing."""
    return parts if batch.names else {name: part * 0 for name, part in parts.items()}
