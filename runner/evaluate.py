"""Evaluate a trained model on data files: `python runner/evaluate.py run=last data.path=data/samples/sft_val.jsonl metric=exact_match`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hydra
from omegaconf import DictConfig

from runner.cli.subcommand import reporting_user_errors, resolve_model_run, run_subcommand, to_schema
from runner.config.compose import HYDRA_VERSION_BASE
from runner.inference.evaluate import EvaluateConfig, evaluate


@hydra.main(**HYDRA_VERSION_BASE, config_path="../conf", config_name="evaluate")
def main(tree: DictConfig) -> None:
    with reporting_user_errors():
        cfg = to_schema(tree, EvaluateConfig)
        evaluate(cfg, resolve_model_run(cfg.run))


if __name__ == "__main__":
    run_subcommand(main, EvaluateConfig, free=("run", "data.path", "reference"))
