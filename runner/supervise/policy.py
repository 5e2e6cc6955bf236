"""Which failures are worth a restart, when, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from runner.supervise.failures import FailureKind

# A restart would fail alike, or was not wanted
PERMANENT = {FailureKind.DIVERGED: "a diverged run diverges again", FailureKind.STOPPED: "the training process was asked to stop"}
MAX_DELAY = 300.0  # seconds between a failure and the restart


@dataclass(frozen=True)
class Decision:
    restarts: bool
    action: str  # one line, for the console and the record
    delay: float = 0.0  # seconds


class RestartPolicy:
    """At most `max_restarts` in a row without a newer checkpoint: a fault that comes back at the same step is permanent.

    `counts_all`: progress does not reset the count. The delay doubles with every restart of a row, from `first_delay` (seconds) to MAX_DELAY.
    """

    def __init__(self, max_restarts: int, first_delay: float = 0.0, counts_all: bool = False) -> None:
        self._max_restarts, self._first_delay, self._counts_all = max_restarts, first_delay, counts_all
        self._step = -1  # of the newest checkpoint at the last failure
        self._count = 0

    def decide(self, kind: FailureKind, step: int) -> Decision:
        """Return what to do about a failure. `step`: of the newest checkpoint, 0 if there is none."""
        if kind in PERMANENT:
            return Decision(False, f"no restart: {PERMANENT[kind]}")
        if step > self._step and not self._counts_all:
            self._count = 0
        self._step = step
        if self._count >= self._max_restarts:
            return Decision(False, f"no restart: {self._count} restarts without a newer checkpoint than step {step}" if self._count else "no restart")
        self._count += 1
        delay = min(MAX_DELAY, self._first_delay * 2.0 ** (self._count - 1))
        origin = f"step {step}" if step else "the start"
        return Decision(True, f"restart {self._count} of {self._max_restarts} from {origin}" + (f" in {delay:g} s" if delay else ""), delay)
