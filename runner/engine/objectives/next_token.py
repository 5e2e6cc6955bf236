"""Next-token prediction: pretraining, SFT and LoRA differ only in which tokens have a label."""

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
    """Cross-entropy, summed over the tokens with a label."""

    def count(self, batch: Batch) -> int:
        return batch.num_supervised_tokens

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        from data.batching.batch import IGNORE_INDEX

        out = model(**batch.inputs, reduction="sum")
        if out.aux_loss is None:
            return {"loss": out.nll}
        # Weighted with its number of labels, so that dividing by all labels gives the mean over tokens of both losses.
        aux = (out.aux_loss * batch.sum_per_document((batch.labels != IGNORE_INDEX).float())).sum()
        return {"loss": out.nll + aux, "aux_loss": aux}

    def eval_metrics(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(means["loss"], 700.0))}  # e^710 overflows

    def uniform_loss(self, vocab_size: int) -> float | None:
        return math.log(vocab_size)
