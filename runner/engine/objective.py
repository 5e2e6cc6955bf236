"""What a stage asks of the model, as sums over countable items, so that micro-batches and ranks add up exactly.

Shapes: R lines, T positions, B pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import IGNORE, Batch
from models.decoder import Decoder

Sums = dict[str, Tensor]  # "loss" is what is differentiated; the others are for the log


class Objective(Protocol):
    def count(self, batch: Batch) -> int:
        """How many items this batch holds; known before the forward pass."""

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """The loss, and what goes with it, summed over these items."""

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Weights beside the model's own that it reads and nothing changes."""

    @property
    def beside(self) -> list[Decoder]:
        """Models it calls beside the one that learns."""


def weighed(batch: Batch, parts: Sums) -> Sums:
    """A stand-in is computed, because all ranks meet in it, and counts as nothing."""
    return parts if batch.names else {name: part * 0 for name, part in parts.items()}


class NextToken:
    """Cross-entropy of every label: pretrain, sft and lora differ only in which tokens carry one."""

    frozen: dict[str, Tensor] = {}
    beside: list[Decoder] = []

    def count(self, batch: Batch) -> int:
        return batch.supervised

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        out = model(**batch.inputs, summed=True)
        loss = out.nll
        if out.aux is None:
            return {"loss": loss}
        # Weighted by its labels, a sequence's balance loss is divided by the same count as its cross-entropy.
        aux = (out.aux * batch.of_sequences((batch.labels != IGNORE).float())).sum()
        return {"loss": loss + aux, "aux_loss": aux}


@dataclass
class Dpo:
    """Direct preference optimization, sigmoid loss (https://arxiv.org/abs/2305.18290), summed over pairs:

    -log sigmoid(beta * (margin of the policy - margin of the reference)), where a margin is
    log p(chosen) - log p(rejected), each summed over the labels of its side.
    """

    beta: float
    reference: Decoder  # the model the policy must not stray from ...
    as_reference: Callable[[], AbstractContextManager]  # ... and how to enter it: adapters off, or nothing to do

    @property
    def frozen(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.reference.named_parameters() if not p.requires_grad}

    @property
    def beside(self) -> list[Decoder]:
        learns = any(p.requires_grad for p in self.reference.parameters())  # with its adapters off the model itself is the reference
        return [] if learns else [self.reference]

    def count(self, batch: Batch) -> int:
        return len(batch.names)

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        with torch.no_grad(), self.as_reference():
            anchor = _log_probs(batch, self.reference(**batch.inputs).nll)
        out = model(**batch.inputs)
        chosen, rejected = self.beta * (_log_probs(batch, out.nll) - anchor).float()  # (B,) implicit rewards
        loss = -F.logsigmoid(chosen - rejected).sum()
        sums = {"loss": loss, "reward_margin": (chosen - rejected).detach().sum(), "reward_accuracy": (chosen > rejected).sum().float()}
        if out.aux is not None:
            aux = out.aux.sum() / 2  # a pair is one item and has two sequences
            sums |= {"loss": loss + aux, "aux_loss": aux}
        return sums


def _log_probs(batch: Batch, nll: Tensor) -> Tensor:
    """(R, T) -> (2, B) fp64: log-probability of each chosen and each rejected side. What counts is a small difference of these large sums."""
    return -batch.of_sequences(nll.double()).view(2, -1)
