"""Compare the jobs of a sweep, and draw its report.html and leaderboard.csv anew: `python runner/report.py sweep=last`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hydra
from omegaconf import DictConfig

from runner.launch import compare
from runner.launch.compose import AS_OF
from runner.launch.small import refusing, start, typed


@hydra.main(**AS_OF, config_path="../conf", config_name="report")
def main(tree: DictConfig) -> None:
    with refusing():
        folder = compare.find(typed(tree, compare.ReportConfig).sweep)
        compare.update(folder)
        print(f"{compare.terminal(folder)}\n\npage: {folder / compare.PAGE}\ntable: {folder / compare.LEADERBOARD}")


if __name__ == "__main__":
    start(main, compare.ReportConfig, free=("sweep",))
