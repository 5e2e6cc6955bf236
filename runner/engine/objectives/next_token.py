"""Next-token prediction: pretraining, SFT and LoRA differ in which tokens have a label and which weights are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.engine.objectives.config import StageConfig, register_objective
from runner.engine.objectives.objective import Objective

if TYPE_CHECKING:
    from torch import nn

    from data.batching.batch import Batch
    from models.language_model import LanguageModel
    from runner.engine.objectives.objective import LossSums


@register_objective("next_token")
@dataclass
class NextTokenConfig(StageConfig):
    data_formats = ("text", "chat")

    def build_objective(self, model: LanguageModel) -> Objective:
        return NextToken()


class NextToken(Objective):
    """Cross-entropy, summed over the tokens with a label times their weight; the count is the sum of the weights."""

    def count(self, batch: Batch) -> float:
        return batch.num_supervised_tokens if batch.loss_weights is None else batch.loss_weights.double().sum().item()

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        from data.batching.batch import IGNORE_INDEX

        weights = batch.loss_weights
        out = model(**batch.inputs, reduction="sum" if weights is None else "none")
        loss = out.nll if weights is None else (out.nll * weights).sum()
        if out.aux_loss is None:
            return {"loss": loss}
        # Weighted with its number of labels, so that dividing by all labels gives the mean over tokens of both losses.
        aux = (
            out.aux_loss
            * batch.sum_per_document((batch.labels != IGNORE_INDEX).float() if weights is None else weights)
        ).sum()
        return {"loss": loss + aux, "aux_loss": aux}

    def eval_metrics(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(means["loss"], 700.0))}  # e^710 overflows

    def uniform_loss(self, vocab_size: int) -> float | None:
        return math.log(vocab_size)
