"""Perplexity, and bits per byte of texts."""

from __future__ import annotations

import math

from data.schemas.registry import TextExample
from runner.inference.evaluate import EvaluateConfig, MetricResults, register_metric
from runner.inference.evaluation_data import EvaluationSet
from runner.inference.load import LoadedModel


@register_metric("perplexity", reads=("text", "chat"))
def perplexity(trained: LoadedModel, examples: EvaluationSet, cfg: EvaluateConfig) -> MetricResults:
    """Mean loss per token with a label, in nats; for texts also bits per byte, which do not depend on the tokenizer."""
    loss, tokens = 0.0, 0
    for batch in examples.batches(trained, cfg.batch_size):
        loss += trained.model(**batch.inputs).nll.sum().item()
        tokens += batch.num_supervised_tokens
    results: MetricResults = {"loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700.0)), "loss_tokens": tokens}
    if examples.data_format == "text":  # every token of a text is predicted exactly once
        num_bytes = sum(len(example.text.encode()) for _, example in examples.examples() if isinstance(example, TextExample))
        results["bits_per_byte"] = loss / math.log(2) / num_bytes
    return results
