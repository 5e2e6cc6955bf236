"""FIXME runner.engine.objectives.next_token."""

from __future__ import annotations

from torch import Tensor, nn

from data.batching.batch import IGNORE_INDEX, Batch
from models.decoder import Decoder
from runner.engine.objectives.objective import LossSums


class NextToken:
    """Cross-entropy of every label: pretrain, sft and lora differ only in which tokens carry one."""

    frozen: dict[str, Tensor] = {}
    beside: list[Decoder] = []

    def count(self, batch: Batch) -> int:
        return batch.num_supervised_tokens

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        out = model(**batch.inputs, reduction="sum")
        loss = out.nll
        if out.aux_loss is None:
            return {"loss": loss}
        # Weighted by its labels, a sequence's balance loss is divided by the same count as its cross-entropy.
        aux = (out.aux_loss * batch.sum_per_document((batch.labels != IGNORE_INDEX).float())).sum()
        return {"loss": loss + aux, "aux_loss": aux}
