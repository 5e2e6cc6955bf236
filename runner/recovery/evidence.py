"""What the checkpoints of a run prove by their checksums.

Read when asked for: a sound run is resumed without verifying a checkpoint twice.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from runner.checkpoint import atomic_dir
from runner.checkpoint.format import CHECKPOINTS_DIR, read_proven_state, read_state
from runner.recovery.run_record import recorded


class CheckpointState:
    """The checkpoints of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def names(self) -> list[str]:
        """Names of the checkpoints, whole or not, newest first."""
        return atomic_dir.step_names(self.folder / CHECKPOINTS_DIR)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Record of the run directory in the newest state.json that has its checksum."""
        return recorded(read_proven_state(self.folder))

    @cached_property
    def newest_whole(self) -> tuple[str, dict[str, Any]] | None:
        """Name and state.json of the newest checkpoint all of whose files have their checksums; None if there is none."""
        checkpoint, _ = atomic_dir.newest_valid(self.folder / CHECKPOINTS_DIR)
        return None if checkpoint is None else (checkpoint.name, read_state(checkpoint))
