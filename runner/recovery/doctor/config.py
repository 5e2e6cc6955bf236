"""Settings of doctor.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from common.errors import UserError
from common.settings import check_choice


@dataclass
class DoctorConfig:
    run: Optional[str]  # run directory, any path in it, a sweep (all of its jobs), or last
    all: bool  # every run in outputs/ instead of one
    repair: str  # false: report only; true: repair what can be repaired; ask: after a question on the terminal

    def __post_init__(self) -> None:
        check_choice("repair", self.repair, ("false", "true", "ask"))
        if self.all == (self.run is not None):
            raise UserError("give a run, or all=true", f"run={self.run} all={str(self.all).lower()}", "e.g. run=last")
