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

from common.errors import UserError
from runner.checkpoint import atomic_dir
from runner.checkpoint.format import read_checkpoint_tensors, safetensors_chunks
from runner.checkpoint.manager import CheckpointManager, newest_checkpoint
from runner.checkpoint.saving import RetentionPolicy, find_best_weights
from runner.engine.state import load_strict, saved_tensors
from runner.run_dir.metadata import RunMetadata


class OneWeight:
    """A run whose only weight changes in place, as in an optimizer step."""

    progress = SimpleNamespace(best_step=None)

    def __init__(self) -> None:
        self.weight = torch.full((2, 3), 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"progress": {"step": 2, "best_step": None}, "compatibility": {}}

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...

    def load_tensors(self, files: dict[str, dict[str, Tensor]], source: Path) -> None:
        self.weight = files["model"]["weight"]

    def tensor_sources(self) -> dict[str, dict[str, Callable[[], Tensor]]]:
        return {"model": {"weight": lambda: self.weight}, "optimizer": {"weight/exp_avg": lambda: self.weight}}


def make_manager(run_dir: Path) -> CheckpointManager:
    messages = SimpleNamespace(info=lambda message: None, warning=lambda message: None)
    return CheckpointManager(RunMetadata.detached(run_dir, 1), RetentionPolicy(3, 0), 1, messages)


def test_saved_weights_are_those_of_the_step_although_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_best_weights_of_a_step_trained_again_are_of_the_second_time(tmp_path: Path) -> None:
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


class Routed(torch.nn.Module):
    """A model with everything that `state_dict()` may hold: a tied weight, a frozen parameter, buffers of several
    types, one of them not persistent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        for name, buffer in {
            "bias": torch.randn(3),
            "table": torch.tensor([2**40 + 1, 3]),
            "mask": torch.tensor([True, False]),
            "none": torch.empty(0),
        }.items():
            self.register_buffer(name, buffer)
        self.register_buffer("computed", torch.randn(3), persistent=False)


def test_saved_tensors_are_those_of_the_state_dict_and_are_restored(tmp_path: Path) -> None:
    first, second = Routed(), Routed()
    second.table.zero_()
    assert saved_tensors(first).keys() == first.state_dict().keys() - {"head.weight"}
    (tmp_path / "model.safetensors").write_bytes(
        b"".join(safetensors_chunks({name: tensor.detach() for name, tensor in saved_tensors(first).items()}))
    )
    load_strict(saved_tensors(second), load_file(tmp_path / "model.safetensors"), tmp_path)
    restored = second.state_dict()
    assert all(
        torch.equal(restored[name], tensor) and restored[name].dtype == tensor.dtype
        for name, tensor in first.state_dict().items()
    )


def test_saved_tensors_without_frozen_ones_are_refused(tmp_path: Path) -> None:
    """Such a checkpoint was resumed with a router bias of zero."""
    model = Routed()
    trained = {name: tensor for name, tensor in saved_tensors(model).items() if tensor.requires_grad}
    with pytest.raises(UserError, match="bias: 3 in the model, absent in the checkpoint"):
        load_strict(saved_tensors(model), trained, tmp_path)
    with pytest.raises(UserError, match="embedding.weight: 4x2 in the model, absent"):
        load_strict(saved_tensors(model), {}, tmp_path)
