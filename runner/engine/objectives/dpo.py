"""FIXME runner.engine.objectives.dpo."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.batching.batch import Batch
from models.decoder import Decoder
from runner.engine.objectives.objective import LossSums


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

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        with torch.no_grad(), self.as_reference():
            anchor = _sequence_log_probs(batch, self.reference(**batch.inputs).nll)
        out = model(**batch.inputs)
        chosen, rejected = self.beta * (_sequence_log_probs(batch, out.nll) - anchor).float()  # (B,) implicit rewards
        loss = -F.logsigmoid(chosen - rejected).sum()
        sums = {"loss": loss, "reward_margin": (chosen - rejected).detach().sum(), "reward_accuracy": (chosen > rejected).sum().float()}
        if out.aux_loss is not None:
            aux = out.aux_loss.sum() / 2  # a pair is one item and has two sequences
            sums |= {"loss": loss + aux, "aux_loss": aux}
        return sums


def _sequence_log_probs(batch: Batch, nll: Tensor) -> Tensor:
    """(R, T) -> (2, B) fp64: log-probability of each chosen and each rejected side. What counts is a small difference of these large sums."""
    return -batch.sum_per_document(nll.double()).view(2, -1)
