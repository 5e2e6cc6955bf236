"""Compare the jobs of a sweep; write its report.html and leaderboard.csv: `python runner/report.py sweep=last`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hydra
from omegaconf import DictConfig

from runner.cli.subcommand import reporting_user_errors, run_subcommand, to_schema
from runner.config.compose import HYDRA_VERSION_BASE
from runner.reporting import leaderboard


@hydra.main(**HYDRA_VERSION_BASE, config_path="../conf", config_name="report")
def main(tree: DictConfig) -> None:
    with reporting_user_errors():
        folder = leaderboard.resolve_sweep(to_schema(tree, leaderboard.ReportConfig).sweep)
        leaderboard.update_report(folder)
        print(f"{leaderboard.leaderboard_text(folder)}\n\npage: {folder / leaderboard.REPORT_FILE}\ntable: {folder / leaderboard.LEADERBOARD_FILE}")


if __name__ == "__main__":
    run_subcommand(main, leaderboard.ReportConfig, free=("sweep",))
