"""Settings of plan.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PlanConfig:
    # run a few steps, an evaluation, a sample and a save in a child process; false: estimates without times
    timing: bool
    json: bool  # print one JSON object instead of text
