"""Compare the jobs of a sweep; write its report.html and leaderboard.csv: `python runner/report.py sweep=last`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from runner.cli.subcommand import run_subcommand
from runner.reporting.leaderboard import ReportConfig, print_report

if __name__ == "__main__":
    run_subcommand("report", ReportConfig, print_report)
