"""A run directory that is moved, deleted or taken while a process trains in it: noticed by identity, never written
twice.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import filesystem
from common.errors import LostRunDirError, UserError
from common.filesystem import NO_FOLDER_SYNC, NO_FOLDER_SYNC_PROMISE
from common.ownership import process_id
from runner.run_dir import metadata
from runner.run_dir.metadata import RunMetadata
from runner.tracking.config import TrackerConfig
from runner.tracking.logger import RunLogger


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunMetadata]:
    with RunMetadata.open(tmp_path / "run") as metadata:
        metadata.record_created()
        metadata.mark_running()
        yield metadata


def open_logger(run: RunMetadata) -> RunLogger:
    config = TrackerConfig(name="none", page=False, console="quiet")
    logger = RunLogger(run.folder, config, check_run_dir=run.check_owned)
    logger.start({}, total_steps=9, attempt=1, run_config={}, saved=None, tracker_id=None)
    return logger


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".lock")
    }


def move(run: RunMetadata) -> str:
    shutil.move(run.folder, run.folder.with_name("moved"))
    return f"the run directory was moved to {run.folder.with_name('moved')}; resume="


def delete(run: RunMetadata) -> str:
    shutil.rmtree(run.folder)
    return "the run directory was deleted"


def replace(run: RunMetadata) -> str:
    move(run)
    run.folder.mkdir()
    return "another directory is at "


@pytest.mark.parametrize("change", [move, delete, replace], ids=lambda change: change.__name__)
def test_directory_that_is_gone_ends_the_run_and_is_not_created_again(change, run: RunMetadata) -> None:
    logger = open_logger(run)
    run.check_owned()
    expected = change(run)
    for write in (
        run.check_owned,
        lambda: run.update(step=5),
        *([lambda: logger.log("train", 5, loss=1.0)] if change is delete else []),
    ):
        with pytest.raises(LostRunDirError, match=expected):
            write()
    logger.info("only on the console")
    assert not run.folder.exists() if change is not replace else os.listdir(run.folder) == []
    assert (run.follow_move() is None) == (change is delete)
    logger.finish("failed")


def test_run_that_follows_its_moved_directory_holds_its_lock_there(run: RunMetadata) -> None:
    logger, old = open_logger(run), run.folder
    move(run)
    with pytest.raises(LostRunDirError):
        run.check_owned()
    logger.log("train", 5, loss=1.0)  # to the open file, which has moved
    assert (folder := run.follow_move()) == old.with_name("moved")
    logger.move_to(folder)
    run.update(step=5)
    logger.log("train", 6, loss=1.0)
    assert RunMetadata.read(folder)["step"] == 5 and not old.exists()
    assert logger.position()["metrics"] == (folder / "metrics.jsonl").stat().st_size
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [5, 6]
    with pytest.raises(UserError, match="is being trained"):
        RunMetadata.open(folder, resume=True)


def test_lock_file_that_is_deleted_is_locked_again(run: RunMetadata, capsys: pytest.CaptureFixture) -> None:
    (run.folder / ".lock").unlink()
    run.check_owned()
    assert "was deleted or replaced; it is locked again" in capsys.readouterr().err and (run.folder / ".lock").exists()
    run.check_owned()
    assert capsys.readouterr().err == ""


def test_second_launch_after_the_lock_file_was_deleted_is_refused(run: RunMetadata) -> None:
    """On this host .owner.json names a process that is alive."""
    (run.folder / ".lock").unlink()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            RunMetadata.open(run.folder, resume=True)
        except UserError as error:
            os.write(write, error.message.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 1000).decode().startswith(f"this run is being trained by process {os.getpid()} on ")
    os.close(read)


@pytest.mark.parametrize("has_locks", [True, False], ids=["lockf", "owner files"])
def test_launch_on_another_host_that_takes_the_directory_stops_this_one(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E.g. on NFS mounted with local locks, or after somebody removed the owner file: the process that wrote
    .owner.json last trains.
    """
    monkeypatch.setattr(filesystem, "WEAKER_PROMISES", [])
    if not has_locks:
        monkeypatch.setattr(fcntl, "lockf", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    with RunMetadata.open(tmp_path / "run") as run:
        run.record_created()
        run.mark_running()
        logger = open_logger(run)
        logger.log("train", 1, loss=1.0)
        other = process_id() | {"host": "another", "pid": 7}
        (run.folder / ".owner.json").write_text(json.dumps(other))
        before = contents(run.folder)
        for write in (lambda: logger.log("train", 2, loss=1.0), lambda: run.update(step=2), run.check_owned):
            with pytest.raises(LostRunDirError, match="is being trained by process 7 on another now"):
                write()
        logger.finish("failed")
    assert contents(run.folder).items() >= before.items()  # .owner.json included: the other launch keeps it


@pytest.mark.parametrize("name", ["metrics", "samples"])
def test_log_that_is_deleted_or_replaced_is_written_again_at_the_next_save(name: str, run: RunMetadata) -> None:
    logger, path = open_logger(run), run.folder / f"{name}.jsonl"

    def log(step: int) -> None:
        logger.log("train", step, loss=1.0)
        logger.samples(step, [{"prompt": "a", "answer": "b"}])

    log(1)
    path.unlink()
    log(2)
    position = logger.position()[name]
    assert [json.loads(line)["step"] for line in path.read_bytes()[:position].splitlines()] == [1, 2]
    path.rename(run.folder / "moved")
    path.write_text("edited\n")
    log(3)
    assert logger.position()[name] == path.stat().st_size
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert (run.folder / "damaged" / path.name).read_text() == "edited\n"
    assert "replaced by another file" in (run.folder / "train.log").read_text()


@pytest.mark.parametrize("number", sorted(NO_FOLDER_SYNC), ids=errno.errorcode.get)
def test_file_system_that_does_not_sync_folders_is_used_and_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoFolderSync(filesystem.FileSystem):
        @staticmethod
        def fsync(fd: int) -> None:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filesystem, "fs", NoFolderSync())
    promises: list[str] = []
    for module in (filesystem, metadata):
        monkeypatch.setattr(module, "WEAKER_PROMISES", promises)
    with RunMetadata.open(tmp_path / "run") as run:
        run.record_created()
        run.update(step=3)
    assert RunMetadata.read(tmp_path / "run")["weaker_promises"] == [NO_FOLDER_SYNC_PROMISE]
