"""A checkpoint holds the values of its step, whatever training does while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.checkpoint import atomic_dir
from runner.checkpoint.format import read_checkpoint_tensors
from runner.checkpoint.manager import CheckpointManager, RetentionPolicy, newest_checkpoint


class OneWeight:
    """A run whose only weight changes in place, as in an optimizer step."""

    def __init__(self) -> None:
        self.weight = torch.full((2, 3), 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"progress": {"step": 1, "best_step": None}, "compatibility": {}}

    def tensor_sources(self) -> dict[str, dict[str, Callable[[], Tensor]]]:
        return {"model": {"weight": lambda: self.weight}, "optimizer": {"weight/exp_avg": lambda: self.weight}}


def test_saved_weights_are_those_of_the_step_although_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_changed, write = threading.Event(), atomic_dir.write_atomic_dir

    def write_later(*args: Any, **options: Any) -> None:
        assert has_changed.wait(60)
        write(*args, **options)

    monkeypatch.setattr(atomic_dir, "write_atomic_dir", write_later)
    messages = SimpleNamespace(info=lambda message: None, warning=lambda message: None)
    run = OneWeight()
    manager = CheckpointManager(tmp_path, RetentionPolicy(3, 0), 1, messages, lambda **fields: None)
    manager.save_async(1, run)  # type: ignore[arg-type]  # it is not loaded
    run.weight.add_(1)
    has_changed.set()
    manager.wait_for_save()
    assert torch.equal(read_checkpoint_tensors(newest_checkpoint(tmp_path))["model"]["weight"], torch.full((2, 3), 1.0))
