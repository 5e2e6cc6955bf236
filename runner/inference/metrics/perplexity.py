"""Perplexity and bits per byte."""

from __future__ import annotations

import math

from common.errors import UserError
from runner.inference.evaluate import EvaluateConfig, MetricResults, register_metric
from runner.inference.evaluation_data import EvaluationSet
from runner.inference.load import LoadedModel
from runner.inference.token_bytes import TokenBytes


@register_metric("perplexity", reads=("text", "chat"))
def perplexity(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Mean loss per token with a label, in nats, exp(loss), and the loss in bits per byte of these tokens, which does
    not depend on the tokenizer.

    A row or message with a weight counts as in training, in the loss and in the bytes. Special tokens with a label (the
    end of a text) have no bytes.
    """
    loss, weight, tokens, num_bytes = 0.0, 0.0, 0, 0.0
    bytes_of = TokenBytes(trained.tokenizer)
    for batch in examples.batches(trained, cfg.batch_size):
        weights = (batch.labels >= 0 if batch.loss_weights is None else batch.loss_weights).double()
        loss += (trained.model(**batch.inputs).nll.double() * weights).sum().item()
        weight += weights.sum().item()
        tokens += int((batch.labels >= 0).sum())
        num_bytes += bytes_of.count(batch)
    if not tokens:
        raise UserError(
            "no token of the data has a label, so there is no loss",
            f"data.path={examples.cfg.path}",
            "choose a file with texts or answers",
        )
    results: MetricResults = {
        "loss": loss / weight,
        "perplexity": math.exp(min(loss / weight, 700.0)),
        "loss_tokens": tokens,
    }
    return results | ({"bits_per_byte": loss / math.log(2) / num_bytes} if num_bytes else {})
