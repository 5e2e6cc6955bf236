"""Check every file of a run, say what resume= would do, and repair by consent: `python runner/doctor.py run=last`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.subcommand import run_subcommand
from runner.launch.doctor import DoctorConfig, doctor

if __name__ == "__main__":
    run_subcommand("doctor", DoctorConfig, doctor)
