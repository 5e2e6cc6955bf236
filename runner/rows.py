"""Print rows as the model sees them, with any settings of train.py: `python runner/rows.py stage=sft n=3`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.subcommand import run_subcommand
from runner.inference.inspect_rows import RowsConfig, inspect_rows

if __name__ == "__main__":
    run_subcommand("rows", RowsConfig, inspect_rows, with_train_config=True)
