"""Say whether runs differ by more than chance, over their seeds: `python runner/compare.py a=outputs/RUN,outputs/RUN2 b=outputs/SWEEP`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.subcommand import run_subcommand
from runner.reporting.arms import CompareConfig, print_comparison

if __name__ == "__main__":
    run_subcommand("compare", CompareConfig, print_comparison)
