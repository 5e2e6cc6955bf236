"""A part of the hostile suite, whose cases are commands on harmful files; `python tests/hostile/suite.py` runs all of
it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("suite.py")


def run_suite(*arguments: str) -> None:
    """Run the suite; show its table if a case fails, its counts otherwise."""
    ended = subprocess.run([sys.executable, str(SUITE), *arguments], capture_output=True, text=True, timeout=550)
    assert ended.returncode == 0, "\n".join(
        line for line in (ended.stdout + ended.stderr).splitlines() if not line.startswith("ok ")
    )
    print(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_hostile_folders_without_weights_are_refused() -> None:
    run_suite("--light", "--brief")


@pytest.mark.slow(long=True)
def test_hostile_files_execute_nothing_and_change_nothing_outside() -> None:
    run_suite("--heavy", "--brief", "--part=1/12", "--template-seconds=0.3")
