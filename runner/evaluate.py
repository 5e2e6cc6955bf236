"""Evaluate a trained model on a data file: `python runner/evaluate.py run=last data.path=data/samples/sft_val.jsonl metric=exact_match`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from runner.cli.subcommand import run_subcommand
from runner.config.resolve import resolve_model_run
from runner.engine.device.signals import StopFlag
from runner.inference.evaluate import EvaluateConfig, evaluate
from runner.inference.harness.tasks import evaluate_tasks


def run_evaluation(cfg: EvaluateConfig) -> Any:
    action = evaluate_tasks if cfg.tasks else evaluate
    if cfg.reference:
        cfg = replace(cfg, reference=str(resolve_model_run(cfg.reference, "reference")))
    return action(cfg, resolve_model_run(cfg.run), listen_for_stop)


@contextmanager
def listen_for_stop() -> Iterator[StopFlag]:
    with StopFlag(announces=True) as stop:
        stop.pending_work = "after this batch, with the result so far"
        yield stop


if __name__ == "__main__":
    run_subcommand("evaluate", EvaluateConfig, run_evaluation)
