"""Power cut after every system call: committed folders are there and complete, and no incomplete folder has a step
name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from powerloss import Recorder, Tree, disk_states, survival_cases, write_tree

from common import filesystem
from runner.checkpoint import atomic_dir

KEEP = 2


def contents(step: int) -> dict[str, bytes]:
    return {"model": bytes([step]) * 20_000, "state": b"%d" % step * 700}


def record_run(
    root: Path,
    saves: int,
    monkeypatch: pytest.MonkeyPatch,
    skips: Callable[[Path, list[tuple]], bool] = lambda path, log: False,
) -> tuple[list[tuple], list[tuple[int, int, int]]]:
    """Return the system calls of a run that saves `saves` times, and what it has committed: (number of calls, newest
    step, attempt in run.json).
    """
    root.mkdir()
    recorder = Recorder(root, skips)
    monkeypatch.setattr(filesystem, "fs", recorder)
    monkeypatch.setattr(filesystem, "CHUNK_BYTES", 8_000)
    folder, committed = root / "checkpoints", []
    for step in range(1, saves + 1):
        atomic_dir.write_atomic_dir(folder, f"step-{step:08d}", contents(step), {"step": step})
        committed.append((len(recorder.log), step, step - 1))
        atomic_dir.write_pointer(folder, "latest", f"step-{step:08d}")
        atomic_dir.prune_dirs(folder, KEEP, protect=set())
        filesystem.write_json(root / "run.json", {"attempt": step, "padding": "x" * 9_000})
        committed.append((len(recorder.log), step, step))
    monkeypatch.undo()
    return recorder.log, committed


def find_violation(tree: Tree, folder: Path, newest_step: int, attempt: int) -> str | None:
    """Return the first guarantee that this disk content violates, or None."""
    shutil.rmtree(folder, ignore_errors=True)
    write_tree(tree, folder)
    newest, skipped = atomic_dir.newest_valid(folder / "checkpoints")
    step = int(newest.name[5:]) if newest else 0
    if step < newest_step:
        return f"step {newest_step} was committed, the newest is {step}"
    names = list((folder / "checkpoints").glob("step-*"))
    valid = [name for name in names if atomic_dir.verify_dir(name) is None]
    if skipped or len(valid) < len(names):
        return f"an incomplete folder has a step name: {skipped}"
    if len(valid) < min(newest_step, KEEP):
        return f"only {len(valid)} valid folders remain"
    if newest and any((newest / name).read_bytes() != data for name, data in contents(step).items()):
        return "the content differs from what was committed"
    try:
        saved_attempt = json.loads((folder / "run.json").read_text())["attempt"]
    except FileNotFoundError:
        saved_attempt = 0
    except ValueError:
        return "run.json is incomplete"
    return f"attempt {attempt} was committed, run.json has {saved_attempt}" if saved_attempt < attempt else None


def violations(
    log: list[tuple], committed: list[tuple[int, int, int]], folder: Path, num_random: int
) -> Iterator[str | None]:
    for done, _, tree in disk_states(log, survival_cases(num_random)):
        before = [guarantee[1:] for guarantee in committed if guarantee[0] <= done]
        yield find_violation(tree, folder, *(before[-1] if before else (0, 0)))


@pytest.mark.parametrize(
    "saves, num_random, least",
    [(3, 2, 350), pytest.param(4, 8, 900, marks=pytest.mark.slow)],
    ids=["some states", "all states"],
)
def test_power_cut_violates_no_guarantee(
    saves: int, num_random: int, least: int, memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, committed = record_run(memory_dir / "run", saves, monkeypatch)
    results = list(violations(log, committed, memory_dir / "disk", num_random))
    assert len(results) >= least
    assert not any(results), next(filter(None, results))


SKIPPED_SYNCS: dict[str, Callable[[Path, list[tuple]], bool]] = {
    "folders": lambda path, log: path.is_dir(),
    "files": lambda path, log: not path.is_dir(),
    "one file": lambda path, log: path.name == "state",
    "the manifest": lambda path, log: path.name == atomic_dir.MANIFEST_FILE,
    "the temporary folder": lambda path, log: path.is_dir() and path.name.startswith(".tmp-"),
    "the parent": lambda path, log: path.name == "checkpoints",
    "the parent before deleting": lambda path, log: (
        path.name == "checkpoints" and log[-1][0] == "rename" and log[-1][2][-1].startswith(".del-")
    ),
    "the new parent's entry": lambda path, log: path.is_dir() and log[-1] == ("mkdir", ("checkpoints",)),
    "run.json": lambda path, log: path.name.startswith(".tmp-run.json"),
}


@pytest.mark.parametrize("skips", SKIPPED_SYNCS.values(), ids=SKIPPED_SYNCS)
def test_power_cut_violates_a_guarantee_without_the_fsync_of(
    skips: Callable[[Path, list[tuple]], bool], memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, committed = record_run(memory_dir / "run", 3, monkeypatch, skips)
    assert any(violations(log, committed, memory_dir / "disk", num_random=4))
