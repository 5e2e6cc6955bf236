"""Train one model: `python runner/train.py stage=sft precision=bf16`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

import hydra
from omegaconf import DictConfig

from runner.cli.entrypoint import train_command
from runner.config.hydra_errors import HYDRA_VERSION_BASE


@hydra.main(**HYDRA_VERSION_BASE, config_path="../conf", config_name="config")
def train_task(tree: DictConfig) -> float:
    """Hydra's task function; its result is what a sweep compares.

    `train_command` gives Hydra the checked overrides instead of sys.argv (runner/cli/hydra_app.py), with the function that the decorator wraps.
    """
    from runner.cli.hydra_app import train_in_run_dir

    return train_in_run_dir(tree)


if __name__ == "__main__":
    train_command(train_task)
