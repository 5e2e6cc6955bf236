"""Print training data as the model will see it, with any override of train.py: `python runner/rows.py stage=sft n=3`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from runner.cli.train_subcommand import run_with_train_config
from runner.inference.inspect_rows import RowsConfig, inspect_rows

if __name__ == "__main__":
    run_with_train_config("rows", __doc__, RowsConfig, inspect_rows)
