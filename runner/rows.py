"""See rows as the model will see them, with any words of train.py: `python runner/rows.py stage=sft n=3`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from runner.launch.beside import start
from runner.trained.show import ShowConfig, show

if __name__ == "__main__":
    start("rows", __doc__, ShowConfig, show)
