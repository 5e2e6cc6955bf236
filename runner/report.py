"""Write report.html of a run or sweep, compare runs, list all of them; serve it on this machine: `python runner/report.py run=last serve=true`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.subcommand import run_subcommand
from runner.reporting.command import ReportConfig, print_report

if __name__ == "__main__":
    run_subcommand("report", ReportConfig, print_report)
