"""Say what a run or a sweep will cost before it trains, with any settings of train.py: `python runner/plan.py stage=sft precision=bf16`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.subcommand import run_subcommand
from runner.planning.command import PlanConfig, plan
from runner.planning.starts import planned_start

if __name__ == "__main__":
    run_subcommand("plan", PlanConfig, plan, with_train_config=True, start_of=planned_start)
