"""Train one model: `python runner/train.py stage=sft precision=bf16`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hydra
from omegaconf import DictConfig

from runner.launch import door
from runner.launch.compose import AS_OF, typed


@hydra.main(**AS_OF, config_path="../conf", config_name="config")
def app(cfg: DictConfig) -> float:
    """What Hydra calls for a run, and for each job of a sweep; the loss it returns is what a sweep compares."""
    from runner.launch.start import start

    config = typed(cfg)
    with door.explained(), door.record_of(cfg) as record:
        return start(config, record)


if __name__ == "__main__":
    door.enter(app)
