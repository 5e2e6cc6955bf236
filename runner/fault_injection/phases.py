"""The phase that a forked launch is in, in memory that its parent reads."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from typing import Any

# start: everything before the first of the others
PHASES = ("start", "tokenizing", "step", "save", "evaluation", "sampling", "end")
SLOT = struct.Struct("qd")  # how often a phase was entered; seconds spent in it


class PhaseProbe:
    """Counts in shared memory how often each phase was entered, and for how long."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, SLOT.size * len(PHASES))
        self._began = time.monotonic()

    def install(self) -> None:
        """Wrap the function of each phase; call it in a fork."""
        from runner.checkpoint.manager import CheckpointManager
        from runner.engine import data_pipeline, evaluation, loop

        self._began = time.monotonic()
        functions: dict[str, tuple[Any, str]] = {
            "tokenizing": (data_pipeline, "tokenize_source"),
            "step": (loop, "train_step"),
            "save": (CheckpointManager, "save_async"),
            "evaluation": (evaluation, "evaluate_loss"),
            "sampling": (evaluation, "generate_samples"),
            "end": (loop, "finish"),
        }
        for phase, (owner, name) in functions.items():
            setattr(owner, name, self._reporting(phase, getattr(owner, name)))

    def read(self, phase: str) -> tuple[int, float]:
        """Return how often the phase was entered, and the seconds spent in it."""
        return SLOT.unpack_from(self._shared, SLOT.size * PHASES.index(phase))

    def _write(self, phase: str, count: int, seconds: float) -> None:
        SLOT.pack_into(self._shared, SLOT.size * PHASES.index(phase), count, seconds)

    def _reporting(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def reporting(*args: Any, **options: Any) -> Any:
            count, seconds = self.read(phase)
            entered = time.monotonic()
            if not self.read("start")[0]:
                self._write("start", 1, entered - self._began)
            self._write(phase, count + 1, seconds)
            try:
                return function(*args, **options)
            finally:
                self._write(phase, count + 1, seconds + time.monotonic() - entered)

        return reporting
