"""One finding about a file of a run directory: shared by the resume of damaged runs and by doctor.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """What a finding means for the run, mildest first."""

    SOUND = "ok"
    NOTE = "note"  # nothing is lost
    DAMAGED = "damaged"  # something is lost, a resume continues
    BLOCKING = "blocks"  # a resume refuses


@dataclass(frozen=True)
class Problem:
    """`state` says what is wrong with `file`, `consequence` what is lost or what resume= does about it, `repair` what
    doctor.py repair=true does.
    """

    file: str  # relative to the run directory
    severity: Severity
    state: str  # e.g. "sound", "missing", "model.safetensors: wrong checksum"
    consequence: str = ""
    repair: str | None = None  # None: nothing to repair, or not without the user


@dataclass(frozen=True)
class Repair:
    """A finding, and what repairs the file; `apply` does nothing where there is nothing to repair."""

    finding: Problem
    apply: Callable[[], None] = lambda: None
