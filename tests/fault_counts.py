"""How many random faults the slow tests inject: FAULT_TESTS=full gives the counts of docs/reliability.md, CI injects fewer of each kind."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("FAULT_TESTS") == "full"


def faults(in_ci: int, full: int) -> int:
    return full if IS_FULL else in_ci
