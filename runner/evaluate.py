"""Evaluate a trained model on a data file: `python runner/evaluate.py run=last data.path=data/samples/sft_val.jsonl metric=exact_match`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from runner.cli.subcommand import run_subcommand
from runner.inference.evaluate import EvaluateConfig, evaluate
from runner.inference.harness.tasks import evaluate_tasks
from runner.run_dir.resolve import resolve_model_run

if __name__ == "__main__":
    run_subcommand("evaluate", EvaluateConfig, lambda cfg: (evaluate_tasks if cfg.tasks else evaluate)(cfg, resolve_model_run(cfg.run)))
