"""Settings of faults.py, and the table of its kinds of faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from common.errors import UserError
from common.settings import check_at_least

FAULT_KINDS = ("kills", "disk", "flips", "signals", "workers")


@dataclass
class FaultsConfig:
    kills: int  # SIGKILL at random moments, every second one while a checkpoint is written; start-up included
    disk: int  # ENOSPC or EIO at random file calls in the run directory: once, five times, or from then on
    flips: int  # a file of a checkpoint with a flipped bit, cut short, or deleted
    # SIGTERM, SIGINT, SIGHUP and SIGUSR1 while it starts, tokenizes, steps, saves, evaluates, samples and ends, in turn
    signals: int
    workers: int  # data workers that are stopped (SIGSTOP) or killed
    # number of kills that hit the command as it is typed; the others a fork of this process, which has torch imported
    # already
    cold: int
    fault_seed: int  # of the moments, calls, bits and victims
    only: Optional[str]  # repeat one fault: its name in the output, e.g. kills-7; null: all of them
    folder: Optional[str]  # for the runs; null: a temporary one, which is kept if a promise was broken
    to: Optional[str]  # JSON file for the results; null: none
    acknowledge_within: float  # seconds within which a signal must be acknowledged
    timeout: float  # seconds after which a launch counts as hanging

    def __post_init__(self) -> None:
        for key in (*FAULT_KINDS, "cold", "fault_seed"):
            check_at_least(key, getattr(self, key), 0, 10)
        if self.timeout <= 0 or self.acknowledge_within <= 0:
            raise UserError(
                "timeout and acknowledge_within are seconds above 0",
                f"timeout={self.timeout} acknowledge_within={self.acknowledge_within}",
                "timeout=600 acknowledge_within=1",
            )
        if self.only is not None and not _is_fault_name(self.only):
            raise UserError("only names one fault: KIND-NUMBER", f"only={self.only}", "e.g. only=kills-7")

    def is_cold(self, kind: str, number: int) -> bool:
        """Return whether a fault is injected into a real command instead of a fork."""
        return kind == "kills" and number <= self.cold

    def faults(self) -> list[tuple[str, int]]:
        """Return (kind, number) of the faults to inject."""
        if self.only is not None:
            kind, _, number = self.only.partition("-")
            return [(kind, int(number))]
        return [(kind, number) for kind in FAULT_KINDS for number in range(1, getattr(self, kind) + 1)]


def _is_fault_name(name: str) -> bool:
    kind, _, number = name.partition("-")
    return kind in FAULT_KINDS and number.isdigit() and int(number) > 0
