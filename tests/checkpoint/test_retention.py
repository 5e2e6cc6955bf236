"""Which checkpoints are deleted when the disk is full, and that best weights and pointers are written in spite of
errors.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from test_manager import FakeRun, make_manager, save_steps

from common import filesystem
from common.errors import TrainingError
from common.filesystem import FileSystem
from runner.checkpoint import atomic_dir
from runner.checkpoint.atomic_dir import RESERVED_BYTES, SaveError
from runner.checkpoint.format import CHECKPOINT_FORMAT
from runner.checkpoint.saving import RetentionPolicy, free_space, prune_checkpoints, save_freeing_space

SIZE = 20_000  # bytes of a checkpoint


def write(folder: Path, step: int, best_step: int | None = None) -> None:
    state = json.dumps({"format": CHECKPOINT_FORMAT, "progress": {"step": step, "best_step": best_step}}).encode()
    files = {"model": bytes(SIZE), "state.json": state}
    atomic_dir.write_atomic_dir(folder, f"step-{step:08d}", files, {})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


class SmallDisk(FileSystem):
    """A disk with space for `checkpoints` folders of SIZE bytes; `stays_full`: writing fails although there is space,
    as with a quota.
    """

    def __init__(self, folder: Path, checkpoints: int, error: int = errno.ENOSPC, stays_full: int = 0) -> None:
        self.folder, self.space, self.error, self.failures = (
            folder,
            RESERVED_BYTES + int(checkpoints * SIZE * 1.1),
            error,
            stays_full,
        )

    def free(self, folder: Path) -> int:
        return self.space - sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def write(self, fd: int, data: bytes) -> int:
        if self.failures and len(data) > SIZE // 2:
            self.failures -= 1
            raise OSError(self.error, os.strerror(self.error))
        return os.write(fd, data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five checkpoints; step 2 has the best weights."""
    for step in range(1, 6):
        write(tmp_path, step, best_step=min(step, 2))
    (tmp_path / "best").write_text("step-00000002\n")
    return tmp_path


def save_step_6(folder: Path, keep_every: int = 0) -> list[str]:
    warnings: list[str] = []
    save_freeing_space(lambda: write(folder, 6, best_step=2), folder, RetentionPolicy(5, keep_every), warnings.append)
    return warnings


def test_full_disk_costs_the_oldest_checkpoints_but_not_the_best_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "fs", SmallDisk(folder, 3))
    warnings = save_step_6(folder)
    assert names(folder) == ["step-00000002", "step-00000005", "step-00000006"]
    assert (
        len(warnings) == 1
        and "deleted step-00000001, step-00000003, step-00000004 to save the newest state" in warnings[0]
    )


def test_full_disk_spares_checkpoints_of_keep_every_as_long_as_others_can_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "fs", SmallDisk(folder, 4))
    save_step_6(folder, keep_every=3)
    assert names(folder) == ["step-00000002", "step-00000003", "step-00000005", "step-00000006"]


def test_no_checkpoint_is_deleted_in_vain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "fs", SmallDisk(folder, 2))
    with pytest.raises(SaveError, match="No space left on device; it needs") as refused:
        save_step_6(folder)
    assert len(names(folder)) == 5
    needed, free = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", str(refused.value)))
    assert needed > free


@pytest.mark.parametrize("failures, deleted", [(1, 0), (2, 0), (3, 1), (5, 3)])
def test_quota_costs_one_checkpoint_after_the_other_once_retries_have_failed(
    failures: int, deleted: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "fs", SmallDisk(folder, 99, errno.EDQUOT, stays_full=failures))
    assert len(save_step_6(folder)) == deleted
    assert names(folder) == [
        f"step-{step:08d}" for step in range(1, 7) if step in (2, 5, 6) or step not in (1, 3, 4)[:deleted]
    ]


def test_quota_that_stays_exceeded_leaves_the_newest_checkpoint_and_best(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "step-00000005" / "model").write_bytes(b"damaged")
    monkeypatch.setattr(filesystem, "fs", SmallDisk(folder, 99, errno.EDQUOT, stays_full=10**6))
    with pytest.raises(SaveError):
        save_step_6(folder)
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000005"]


def test_broken_disk_costs_no_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "fs", SmallDisk(folder, 99, errno.EIO, stays_full=10**6))
    with pytest.raises(SaveError):
        save_step_6(folder)
    assert len(names(folder)) == 5


def test_files_that_cannot_be_deleted_do_not_fail_the_retention(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps a deleted file that is open in another process as .nfs*: its folder cannot be removed until the reader
    closes it.
    """

    class SillyRename(FileSystem):
        @staticmethod
        def rmdir(path: Path) -> None:
            (path / ".nfs0001").write_bytes(b"")
            os.rmdir(path)

    monkeypatch.setattr(filesystem, "fs", SillyRename())
    prune_checkpoints(folder, RetentionPolicy(2, 0))
    left = [name for name in names(folder) if not name.startswith(".del-")]
    assert left == ["step-00000002", "step-00000004", "step-00000005"] and len(names(folder)) == 5
    monkeypatch.undo()
    prune_checkpoints(folder, RetentionPolicy(2, 0))
    assert names(folder) == left


def test_checkpoint_of_a_lower_layer_of_overlayfs_is_deleted_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LowerLayer(FileSystem):
        @staticmethod
        def rename(source: Path, target: Path) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(filesystem, "fs", LowerLayer())
    assert free_space(folder, 0, RetentionPolicy(2, 0)) == ["step-00000001"] and "step-00000001" not in names(folder)


class FailingDisk(FileSystem):
    """Fails the next `times` creations of files below a temporary folder whose name contains `name`."""

    def __init__(self, name: str, times: int) -> None:
        self.name, self.times = f".tmp-{name}", times

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and self.name in str(path) and self.times:
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.open(path, flags, mode)


@pytest.mark.parametrize("name", ["best-00000002", "best-"], ids=["weights", "pointer"])
@pytest.mark.parametrize(
    "times, ends", [(2, True), (8, True), (9, False)], ids=["retried", "retried with the next saves", "given up"]
)
def test_best_weights_are_on_disk_when_a_blocking_save_returns(
    name: str, times: int, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun()
    manager = make_manager(tmp_path, run, max_failed_saves=3)
    save_steps(manager, run, 1)
    monkeypatch.setattr(filesystem, "fs", FailingDisk(name, times))
    run.step = run.best_step = 2
    manager.save_best(2, 1.5, run)
    manager.wait_for_save()
    if not ends:
        with pytest.raises(TrainingError, match="3 consecutive saves failed"):
            manager.save_blocking(1, run)
        return
    manager.save_blocking(1, run)
    assert (tmp_path / "checkpoints" / "best").read_text() == "best-00000002\n"
    assert atomic_dir.verify_dir(tmp_path / "checkpoints" / "best-00000002") is None


def test_best_weights_are_written_once(tmp_path: Path) -> None:
    run = FakeRun()
    manager = make_manager(tmp_path, run)
    run.step = run.best_step = 1
    manager.save_best(1, 1.5, run)
    run.step = 2
    manager.save_blocking(2, run)
    assert [message.split()[1] for message in run.messages] == ["best-00000001", "step-00000002"]


def test_best_weights_of_a_checkpoint_that_failed_are_saved_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun()
    manager = make_manager(tmp_path, run, max_failed_saves=3)
    monkeypatch.setattr(filesystem, "fs", FailingDisk("step-00000001", 3))
    (tmp_path / "checkpoints").mkdir()
    run.step = run.best_step = 1
    manager.save_async(1, run)
    manager.save_best(1, 1.5, run)
    manager.wait_for_save()
    run.step = 2
    manager.save_blocking(2, run)
    assert (tmp_path / "checkpoints" / "best").read_text() == "best-00000001\n"
    assert names(tmp_path / "checkpoints") == ["best-00000001", "step-00000002"] and run.metadata["degraded"] is None


def test_save_does_not_create_a_run_directory_that_is_gone(tmp_path: Path) -> None:
    run = FakeRun()
    manager = make_manager(tmp_path / "run", run, max_failed_saves=1)
    (tmp_path / "run").mkdir()
    save_steps(manager, run, 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(TrainingError, match="No such file or directory"):
        manager.save_blocking(2, run)
    assert not (tmp_path / "run").exists()


def test_retention_of_one_keeps_two_checkpoints_and_their_best_weights(folder: Path) -> None:
    """The newest may be damaged. The best weights of step 5 are those of step 2."""
    write(folder, 6, best_step=6)
    (folder / "best").write_text("step-00000006\n")
    prune_checkpoints(folder, RetentionPolicy(1, 0))
    assert names(folder) == ["step-00000002", "step-00000005", "step-00000006"]


def test_retention_keeps_as_many_checkpoints_as_asked_for(folder: Path) -> None:
    prune_checkpoints(folder, RetentionPolicy(3, 0))
    assert names(folder) == ["step-00000002", "step-00000003", "step-00000004", "step-00000005"]
