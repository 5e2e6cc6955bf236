"""Train one model: `python runner/train.py stage=sft precision=bf16`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hydra
from omegaconf import DictConfig

from runner.cli import entrypoint
from runner.config.compose import HYDRA_VERSION_BASE, to_config


@hydra.main(**HYDRA_VERSION_BASE, config_path="../conf", config_name="config")
def app(cfg: DictConfig) -> float:
    """What Hydra calls for a run, and for each job of a sweep; the loss it returns is what a sweep compares."""
    from runner.launch.run import run

    config = to_config(cfg)
    with entrypoint.exiting_with_code(), entrypoint.open_run_metadata(cfg) as record:
        return run(config, record)


if __name__ == "__main__":
    entrypoint.main(app)
