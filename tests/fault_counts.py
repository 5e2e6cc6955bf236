"""What CI leaves out of the slow tests: FAULT_TESTS=full injects the numbers of faults of docs/reliability.md, and runs
the tests that are marked `only_full`.
"""

from __future__ import annotations

import os

import pytest

IS_FULL = os.environ.get("FAULT_TESTS") == "full"
# A variant that takes long and differs little from one that CI runs.
only_full = pytest.mark.skipif(
    not IS_FULL, reason="takes long and differs little from a test that CI runs: FAULT_TESTS=full runs it"
)


def faults(in_ci: int, full: int) -> int:
    return full if IS_FULL else in_ci
