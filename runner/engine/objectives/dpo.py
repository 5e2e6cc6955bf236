"""Direct preference optimization (DPO, https://arxiv.org/abs/2305.18290), sigmoid loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import UserError
from runner.engine.objectives.config import StageConfig, register_objective
from runner.engine.objectives.objective import Objective, Reference

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data.batching.batch import Batch
    from models.language_model import LanguageModel
    from runner.engine.objectives.objective import LossSums


@register_objective("dpo")
@dataclass
class DpoConfig(StageConfig):
    beta: float  # strength of the KL constraint: a larger value keeps the model closer to the reference

    data_formats = ("preference",)
    needs_reference = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < math.inf:
            raise UserError(f"stage.beta must be a positive number, got {self.beta}", f"stage.beta={self.beta}", "e.g. stage.beta=0.1")

    def build_objective(self, model: LanguageModel) -> Objective:
        return Dpo(self.beta, Reference.of(model, self.lora))


class Dpo(Objective):
    """-log sigmoid(beta * (margin of the model - margin of the reference)), summed over pairs.

    A margin is log p(chosen) - log p(rejected), each summed over the tokens with a label. Shapes: R batch rows, T tokens, B pairs.
    """

    def __init__(self, beta: float, reference: Reference) -> None:
        self.beta, self.reference = beta, reference

    def count(self, batch: Batch) -> int:
        return len(batch.names)

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        import torch
        import torch.nn.functional as F

        assert self.reference is not None
        with torch.no_grad(), self.reference.entered():
            reference_log_probs = _sequence_log_probs(batch, self.reference.model(**batch.inputs).nll)
        out = model(**batch.inputs)
        chosen, rejected = self.beta * (_sequence_log_probs(batch, out.nll) - reference_log_probs).float()  # (B,) implicit rewards
        loss = -F.logsigmoid(chosen - rejected).sum()
        sums = {"loss": loss, "reward_margin": (chosen - rejected).detach().sum(), "reward_accuracy": (chosen > rejected).sum().float()}
        if out.aux_loss is not None:
            aux = out.aux_loss.sum() / 2  # a pair is one item and has two sequences
            sums |= {"loss": loss + aux, "aux_loss": aux}
        return sums


def _sequence_log_probs(batch: Batch, nll: Tensor) -> Tensor:
    """(R, T) -> (2, B) log-probabilities of the chosen and the rejected sequences; fp64, because their differences are small."""
    return -batch.sum_per_document(nll.double()).view(2, -1)
