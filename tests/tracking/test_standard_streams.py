"""Standard streams that the caller has closed: their descriptors never become those of a file of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from common.errors import ignore_broken_pipe
ignore_broken_pipe()
print("out"), print("err", file=sys.stderr)
file = open(sys.argv[1], "w")
sys.exit(file.fileno() if file.fileno() > 2 else 1)
"""


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2), (2,)])
def test_closed_streams_are_opened_before_a_file_gets_their_descriptors(closed, tmp_path):
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "file")], preexec_fn=lambda: [os.close(fd) for fd in closed]
    )
    assert child.returncode > 2 and (tmp_path / "file").read_text() == ""
