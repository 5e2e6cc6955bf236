"""Kill, stop and damage a training command at random moments, and check that it continues to the same bits: `python runner/faults.py kills=20 stage=sft train.max_steps=12`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.subcommand import run_subcommand
from runner.fault_injection.harness import FaultsConfig, run_faults

if __name__ == "__main__":
    run_subcommand("faults", FaultsConfig, run_faults, with_train_config=True, passes_overrides=True)
