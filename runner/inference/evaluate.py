"""Evaluate a trained model on data files: settings, and the record that is written. The metrics are in metrics.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from common.checks import check_at_least
from runner.inference.evaluation_data import EvaluationData, open_evaluation_set
from runner.inference.load import load_trained
from runner.inference.metrics import METRICS, MetricResults


@dataclass
class EvaluateConfig:
    run: str  # run directory, Hugging Face or PEFT folder, or last: the newest finished run
    metric: str  # perplexity (text, chat data), exact_match (chat), preference, or a metric of a plugin
    data: EvaluationData
    batch_size: int  # examples per batch
    max_new_tokens: int  # exact_match: length limit of an answer (tokens)
    show: int  # exact_match: number of wrong answers to print
    reference: Optional[str]  # preference: the model before DPO; null: the one that the run started from
    device: str  # auto (a GPU if there is one), cpu, cuda or cuda:<number>

    def __post_init__(self) -> None:
        METRICS.get(self.metric)
        check_at_least("batch_size", self.batch_size, 1, 16)
        check_at_least("max_new_tokens", self.max_new_tokens, 1, 128)
        check_at_least("show", self.show, 0, 5)


def evaluate(cfg: EvaluateConfig, folder: Path) -> MetricResults:
    """Evaluate the model in `folder`; print the result as JSON and append it to `folder/evaluations.jsonl`."""
    import torch

    metric = METRICS.get(cfg.metric)
    examples = open_evaluation_set(cfg.data, cfg.metric)  # before the weights are read, which takes longer
    trained = load_trained(folder, cfg.device)
    with torch.inference_mode():
        results = metric.compute(trained, examples, cfg)
    line = json.dumps({"metric": cfg.metric, "data": cfg.data.path, **results}, ensure_ascii=False)
    print(line)
    with open(folder / "evaluations.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    return results
