"""Promises held through a power cut at every moment: what was committed is there, whole; what is there under its name is whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from powerloss import Recorder, disks, fates, lay_out

from common import filesystem
from runner.checkpoint import atomic_dir

KEEP = 2


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where the system offers that: thousands of fsyncs take minutes on a disk."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def contents(step: int) -> dict[str, bytes]:
    return {"model": bytes([step]) * 20_000, "state": b"%d" % step * 700}


def record(root: Path, saves: int, monkeypatch, skips=lambda path, log: False) -> tuple[list[tuple], list[tuple[int, int, int]]]:
    """The calls of a run that saves `saves` times, and what it promised: (after so many calls, newest step, attempt in run.json)."""
    recorder = Recorder(root, skips)
    monkeypatch.setattr(filesystem, "fs", recorder)
    monkeypatch.setattr(filesystem, "CHUNK_BYTES", 8_000)
    folder, promises = root / "checkpoints", []
    for step in range(1, saves + 1):
        atomic_dir.write_atomic_dir(folder, f"step-{step:08d}", contents(step), {"step": step})
        promises.append((len(recorder.log), step, step - 1))
        atomic_dir.write_pointer(folder, "latest", f"step-{step:08d}")
        atomic_dir.prune_dirs(folder, KEEP, protect=set())
        filesystem.write_json(root / "run.json", {"attempt": step, "padding": "x" * 9_000})
        promises.append((len(recorder.log), step, step))
    monkeypatch.undo()
    return recorder.log, promises


def broken(tree, folder: Path, newest_step: int, attempt: int) -> str | None:
    """The first promise this disk does not keep."""
    shutil.rmtree(folder, ignore_errors=True)
    lay_out(tree, folder)
    found, passed = atomic_dir.newest_valid(folder / "checkpoints")
    step = int(found.name[5:]) if found else 0
    if step < newest_step:
        return f"step {newest_step} was promised, {step} is there"
    good = [name for name in (folder / "checkpoints").glob("step-*") if atomic_dir.verify_dir(name) is None] if step else []
    if passed or len(good) < len(list((folder / "checkpoints").glob("step-*"))):
        return f"a folder that is not whole bears its name: {passed}"
    if len(good) < min(newest_step, KEEP):
        return f"only {len(good)} good folders are left"
    if found and any((found / name).read_bytes() != data for name, data in contents(step).items()):
        return "other bytes than were committed"
    try:
        written = json.loads((folder / "run.json").read_text())["attempt"]
    except FileNotFoundError:
        written = 0
    except ValueError:
        return "run.json is torn"
    return f"attempt {attempt} was promised, run.json says {written}" if written < attempt else None


def failures(log, promises, folder: Path, chances: int):
    for done, _, tree in disks(log, fates(chances)):
        kept = [promise[1:] for promise in promises if promise[0] <= done]
        yield broken(tree, folder, *(kept[-1] if kept else (0, 0)))


def test_no_power_cut_breaks_a_promise(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    log, promises = record(tmp_path / "run", 4, monkeypatch)
    results = list(failures(log, promises, tmp_path / "found", chances=6))
    assert len(results) >= 900, "too few states to mean something"
    assert not any(results), next(filter(None, results))


def of_a_folder(path: Path, log: list[tuple]) -> bool:
    return path.is_dir()


def of_a_file(path: Path, log: list[tuple]) -> bool:
    return not path.is_dir()


def of_one_file(path: Path, log: list[tuple]) -> bool:
    return path.name == "state"


def of_the_manifest(path: Path, log: list[tuple]) -> bool:
    return path.name == atomic_dir.MANIFEST_FILE


def of_the_temporary_folder(path: Path, log: list[tuple]) -> bool:
    return path.is_dir() and path.name.startswith(".tmp-")


def of_the_parent(path: Path, log: list[tuple]) -> bool:
    return path.name == "checkpoints"


def of_the_parent_before_deleting(path: Path, log: list[tuple]) -> bool:
    return path.name == "checkpoints" and log[-1][0] == "rename" and log[-1][2][-1].startswith(".del-")


def of_the_new_checkpoints_folder(path: Path, log: list[tuple]) -> bool:
    return path.is_dir() and log[-1] == ("mkdir", ("checkpoints",))


def of_run_json(path: Path, log: list[tuple]) -> bool:
    return path.name.startswith(".tmp-run.json")


@pytest.mark.parametrize(
    "left_out",
    [
        of_a_folder,
        of_a_file,
        of_one_file,
        of_the_manifest,
        of_the_temporary_folder,
        of_the_parent,
        of_the_parent_before_deleting,
        of_the_new_checkpoints_folder,
        of_run_json,
    ],
)
def test_leaving_out_the_fsync(left_out, tmp_path, monkeypatch):
    """Each fsync is there for a reason: without it the model finds a broken promise."""
    (tmp_path / "run").mkdir()
    log, promises = record(tmp_path / "run", 3, monkeypatch, skips=left_out)
    assert any(failures(log, promises, tmp_path / "found", chances=4))
