"""Train one model: `python runner/train.py stage=sft precision=bf16`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.entrypoint import train_command

if __name__ == "__main__":
    train_command()  # Hydra's completion script completes programs whose text has `@hydra.main`
