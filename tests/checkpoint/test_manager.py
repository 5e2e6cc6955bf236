"""CheckpointManager without an engine: what is saved, kept, loaded and refused."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from common import filesystem
from common.errors import TrainingError, UserError
from runner.checkpoint.atomic_dir import MANIFEST_FILE, write_atomic_dir
from runner.checkpoint.format import read_newest_state
from runner.checkpoint.manager import CheckpointManager, newest_checkpoint
from runner.checkpoint.saving import RetentionPolicy

FACTS = {"model.hidden_size": 32, "optimizer.lr": 1e-3, "train.batch_size": 4}
RULES = {"optimizer": "changes_training", "train.batch_size": "changes_rounding"}


class FakeRun:
    """State of a run: one weight, one moment, and a step."""

    def __init__(self, value: float = 0.0) -> None:
        self.tensors = {
            "model": {"weight": torch.full((2, 3), value)},
            "optimizer": {"weight.exp_avg": torch.full((2, 3), value + 1)},
        }
        self.step, self.best_step, self.messages, self.metadata = 0, None, [], {}

    def state_dict(self) -> dict[str, Any]:
        return {"progress": {"step": self.step, "best_step": self.best_step}, "compatibility": FACTS}

    def tensor_sources(self) -> dict[str, dict[str, Callable[[], Tensor]]]:
        return {
            file: {name: lambda tensor=tensor: tensor for name, tensor in named.items()}
            for file, named in self.tensors.items()
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step, self.best_step = saved["progress"]["step"], saved["progress"]["best_step"]

    @property
    def progress(self) -> SimpleNamespace:
        return SimpleNamespace(best_step=self.best_step)

    def load_tensors(self, files: dict[str, dict[str, Tensor]], source: Path) -> None:
        self.tensors = files

    def info(self, message: str) -> None:
        self.messages.append(message)

    def warning(self, message: str) -> None:
        self.messages.append(f"warning: {message}")

    def update(self, **fields: Any) -> None:
        self.metadata |= fields

    def check_owned(self) -> None: ...


def make_manager(
    run_dir: Path,
    run: FakeRun,
    keep_newest: int = 3,
    keep_every: int = 0,
    max_failed_saves: int = 3,
    is_rank_zero: bool = True,
) -> CheckpointManager:
    run.folder = run_dir
    return CheckpointManager(run, RetentionPolicy(keep_newest, keep_every), max_failed_saves, run, is_rank_zero)


def save_steps(manager: CheckpointManager, run: FakeRun, steps: int) -> None:
    for run.step in range(1, steps + 1):
        manager.save_blocking(run.step, run)


def load(run_dir: Path, run: FakeRun, total_steps: int = 100, **facts: Any) -> bool:
    return make_manager(run_dir, run).load_newest(run, FACTS | facts, RULES, total_steps)


def test_load_restores_exactly_what_was_saved(tmp_path: Path) -> None:
    saved, loaded = FakeRun(1 / 3), FakeRun()
    save_steps(make_manager(tmp_path, saved), saved, 2)
    assert load(tmp_path, loaded) and loaded.step == 2
    assert all(
        torch.equal(loaded.tensors[file][name], tensor)
        for file, named in saved.tensors.items()
        for name, tensor in named.items()
    )
    assert saved.metadata == {"checkpoint": "step-00000002", "step": 2, "degraded": None}


def test_load_returns_false_without_checkpoints(tmp_path: Path) -> None:
    assert load(tmp_path, FakeRun()) is False and read_newest_state(tmp_path) is None


def test_save_async_skips_a_step_that_is_saved_already(tmp_path: Path) -> None:
    run = FakeRun()
    manager = make_manager(tmp_path, run)
    save_steps(manager, run, 1)
    manager.save_async(1, run)
    manager.wait_for_save()
    assert [message for message in run.messages if message.startswith("saved")] == run.messages and len(
        run.messages
    ) == 1


def test_save_keeps_the_newest_the_best_and_every_nth_checkpoint(tmp_path: Path) -> None:
    run = FakeRun()
    run.best_step = 3
    manager = make_manager(tmp_path, run, keep_newest=2, keep_every=5)
    save_steps(manager, run, 3)
    manager.save_best(3, 1.5, run)
    for run.step in range(4, 13):
        manager.save_blocking(run.step, run)
    assert sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*")) == [3, 5, 10, 11, 12]
    assert [(tmp_path / "checkpoints" / name).read_text().strip() for name in ("best", "latest")] == [
        "step-00000003",
        "step-00000012",
    ]


@pytest.mark.parametrize("best_step", [None, 1])
def test_kill_while_resuming_leaves_no_pointer_to_deleted_weights(tmp_path: Path, best_step: int | None) -> None:
    run, pointer = FakeRun(), tmp_path / "checkpoints" / "best"
    manager, run.best_step = make_manager(tmp_path, run), best_step
    save_steps(manager, run, 2)
    manager.save_best(3, 1.5, run)
    manager.wait_for_save()

    class Observer(filesystem.FileSystem):
        pointed: ClassVar[list[str | None]] = []

        @classmethod
        def rename(cls, *paths: Path) -> None:
            os.rename(*paths)
            cls.pointed.append(pointer.read_text().strip() if pointer.exists() else None)
            assert cls.pointed[-1] is None or pointer.with_name(cls.pointed[-1]).is_dir()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem, "fs", Observer())
        assert load(tmp_path, run)
    assert Observer.pointed[-1] == (None if best_step is None else "step-00000001")
    assert not list(pointer.parent.glob("best-*"))


def test_save_on_other_ranks_writes_nothing(tmp_path: Path) -> None:
    run = FakeRun()
    make_manager(tmp_path, run, is_rank_zero=False).save_async(1, run)
    assert not os.listdir(tmp_path)


def test_save_refuses_tensors_that_are_not_finite(tmp_path: Path) -> None:
    run = FakeRun(float("nan"))
    with pytest.raises(TrainingError, match="weight contains values that are not finite"):
        save_steps(make_manager(tmp_path, run), run, 1)
    assert not any(tmp_path.iterdir())


def test_save_fails_after_the_allowed_number_of_consecutive_write_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun()
    manager = make_manager(tmp_path, run, max_failed_saves=3)
    save_steps(manager, run, 1)
    monkeypatch.setattr(
        filesystem.fs, "rename", lambda *paths: (_ for _ in ()).throw(OSError(errno.EIO, "broken disk")), raising=False
    )
    run.step = 2
    for _ in range(2):
        manager.save_async(2, run)
        manager.wait_for_save()
    assert "step-00000002 was not saved: broken disk" in run.metadata["degraded"]
    with pytest.raises(TrainingError, match="3 consecutive saves failed"):
        manager.save_blocking(2, run)
    assert newest_checkpoint(tmp_path).name == "step-00000001"
    monkeypatch.undo()
    manager.save_blocking(2, run)
    assert run.metadata == {"checkpoint": "step-00000002", "step": 2, "degraded": None}


def test_load_skips_invalid_checkpoints_and_names_them(tmp_path: Path) -> None:
    run = FakeRun()
    save_steps(make_manager(tmp_path, run), run, 3)
    (tmp_path / "checkpoints" / "step-00000003" / "optimizer.safetensors").write_bytes(b"")
    again = FakeRun()
    assert load(tmp_path, again) and again.step == 2
    assert [
        message
        for message in again.messages
        if message.startswith("warning: checkpoint step-00000003 skipped: optimizer.safetensors")
    ]


def test_load_refuses_a_run_without_a_valid_checkpoint(tmp_path: Path) -> None:
    run = FakeRun()
    save_steps(make_manager(tmp_path, run), run, 2)
    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        (checkpoint / MANIFEST_FILE).unlink()
    with pytest.raises(UserError, match="no checkpoint of this run is valid"):
        load(tmp_path, run)


def test_load_refuses_fewer_total_steps_than_were_trained(tmp_path: Path) -> None:
    run = FakeRun()
    save_steps(make_manager(tmp_path, run), run, 3)
    with pytest.raises(UserError, match="already at step 3"):
        load(tmp_path, run, total_steps=2)


def test_load_refuses_checkpoints_of_another_format(tmp_path: Path) -> None:
    write_atomic_dir(tmp_path / "checkpoints", "step-00000001", {"state.json": json.dumps({"format": 1}).encode()}, {})
    for read in (lambda: load(tmp_path, FakeRun()), lambda: read_newest_state(tmp_path)):
        with pytest.raises(UserError, match="format 1, this version reads format 3") as caught:
            read()
        assert caught.value.fix.endswith(f"init_from={tmp_path / 'checkpoints' / 'step-00000001'}")


def test_load_refuses_incompatible_facts_and_lists_them(tmp_path: Path) -> None:
    run = FakeRun()
    save_steps(make_manager(tmp_path, run), run, 1)
    with pytest.raises(UserError, match="model.hidden_size: 32 -> 48") as caught:
        load(tmp_path, run, **{"model.hidden_size": 48, "optimizer.lr": 1e-4})
    assert "optimizer.lr" not in caught.value.message and caught.value.setting.endswith("step-00000001")


def test_load_records_changes_of_training_and_of_rounding(tmp_path: Path) -> None:
    run, again = FakeRun(), FakeRun()
    save_steps(make_manager(tmp_path, run), run, 1)
    assert load(tmp_path, again, **{"optimizer.lr": 1e-4, "optimizer.betas": [0.9, 0.95], "train.batch_size": 2})
    assert again.metadata["changed"] == ["optimizer.betas: None -> [0.9, 0.95]", "optimizer.lr: 0.001 -> 0.0001"]
    assert (again.metadata["exact"], again.metadata["inexact_because"]) == (False, ["train.batch_size: 4 -> 2"])
    assert "warning: no longer bitwise reproducible: train.batch_size: 4 -> 2" in again.messages


def test_stall_of_a_save_is_reported_once(tmp_path: Path) -> None:
    run = FakeRun()
    manager = make_manager(tmp_path, run)
    save_steps(manager, run, 1)
    assert manager.take_stall() > 0 and manager.take_stall() == 0
