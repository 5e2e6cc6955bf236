"""A checkpoint holds the values of its step, whatever training does while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runner.checkpoint import atomic_dir
from runner.checkpoint.best import find_best_weights
from runner.checkpoint.format import read_checkpoint_tensors
from runner.checkpoint.manager import CheckpointManager, newest_checkpoint
from runner.checkpoint.retention import RetentionPolicy


class OneWeight:
    """A run whose only weight changes in place, as in an optimizer step."""

    def __init__(self) -> None:
        self.weight = torch.full((2, 3), 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"progress": {"step": 2, "best_step": None}, "compatibility": {}}

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...

    def best_step_so_far(self) -> None: ...

    def load_tensors(self, files: dict[str, dict[str, Tensor]], source: Path) -> None:
        self.weight = files["model"]["weight"]

    def tensor_sources(self) -> dict[str, dict[str, Callable[[], Tensor]]]:
        return {"model": {"weight": lambda: self.weight}, "optimizer": {"weight/exp_avg": lambda: self.weight}}


def make_manager(run_dir: Path) -> CheckpointManager:
    messages = SimpleNamespace(info=lambda message: None, warning=lambda message: None)
    return CheckpointManager(run_dir, RetentionPolicy(3, 0), 1, messages, lambda **fields: None)


def test_saved_weights_are_those_of_the_step_although_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_changed, write = threading.Event(), atomic_dir.write_atomic_dir

    def write_later(*args: Any, **options: Any) -> None:
        assert has_changed.wait(60)
        write(*args, **options)

    monkeypatch.setattr(atomic_dir, "write_atomic_dir", write_later)
    run, manager = OneWeight(), make_manager(tmp_path)
    manager.save_async(2, run)
    run.weight.add_(1)
    has_changed.set()
    manager.wait_for_save()
    assert torch.equal(read_checkpoint_tensors(newest_checkpoint(tmp_path))["model"]["weight"], torch.full((2, 3), 1.0))


def test_best_weights_of_a_step_that_is_trained_again_are_those_of_the_second_time(tmp_path: Path) -> None:
    """Killed after the best evaluation at step 4, the newest checkpoint is of step 2."""
    run, manager = OneWeight(), make_manager(tmp_path)
    manager.save_blocking(2, run)
    manager.save_best(4, 1.0, run)
    manager.wait_for_save()
    again = make_manager(tmp_path)
    assert again.load_newest(run, {}, {}, 10)
    run.weight = run.weight + 1
    again.save_best(4, 0.5, run)
    again.wait_for_save()
    best = find_best_weights(tmp_path / "checkpoints", 4)
    assert best is not None and torch.equal(load_file(best / "model.safetensors")["weight"], torch.full((2, 3), 2.0))
