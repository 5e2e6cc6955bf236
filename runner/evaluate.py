"""Score a trained model on a file: `python runner/evaluate.py run=last data.path=data/samples/sft_val.jsonl metric=exact_match`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hydra
from omegaconf import DictConfig

from runner.launch.compose import AS_OF
from runner.launch.small import find, refusing, start, typed
from runner.trained.score import EvaluateConfig, evaluate


@hydra.main(**AS_OF, config_path="../conf", config_name="evaluate")
def main(tree: DictConfig) -> None:
    with refusing():
        cfg = typed(tree, EvaluateConfig)
        evaluate(cfg, find(cfg.run))


if __name__ == "__main__":
    start(main, EvaluateConfig, free=("run", "data.path", "reference"))
