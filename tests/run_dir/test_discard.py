"""What a refused launch removes: its own directory with the empty parents it created, and nothing that holds a result
or belongs to others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import Outcome, UserError
from runner.run_dir import contents
from runner.run_dir.metadata import RunMetadata
from runner.sweep.state import SweepState


def refuse(folder: Path, during: Callable[[RunMetadata], object] = lambda metadata: None) -> None:
    with pytest.raises(UserError), RunMetadata.open(folder) as metadata:
        metadata.record_created()
        during(metadata)
        raise UserError("a", "b", "c")


def write(*names: str) -> Callable[[RunMetadata], None]:
    def write(metadata: RunMetadata) -> None:
        for name in names:
            (metadata.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (metadata.folder / name).write_text("x")

    return write


@pytest.mark.parametrize(
    "during",
    [lambda metadata: None, write(".hydra/config.yaml", "logs/rank1.log", "train.log", "tokenizer/tokenizer.json")],
)
def test_discard_removes_the_new_directory_and_its_empty_parents(tmp_path, during):
    refuse(tmp_path / "outputs" / "2026-01-01" / "10-00-00", during)
    assert list(tmp_path.iterdir()) == []


def test_discard_keeps_parents_that_hold_something(tmp_path):
    first = contents.create_unique(tmp_path / "outputs" / "2026-01-01" / "10-00-00")
    refuse(contents.create_unique(first))
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_discard_removes_the_date_folder_of_a_refused_launch(tmp_path, monkeypatch):
    monkeypatch.setattr("common.paths.REPO_ROOT", tmp_path)
    (tmp_path / "outputs" / "2026-01-01").mkdir(parents=True)
    refuse(tmp_path / "outputs" / "2026-01-01" / "10-00-00")
    assert [path.name for path in tmp_path.rglob("*")] == ["outputs"]


def begin(metadata: RunMetadata) -> None:
    metadata.mark_running()
    metadata.finish(Outcome.FAILED, "out of memory")


@pytest.mark.parametrize(
    "during",
    [begin, write("checkpoints/step-00000002/state.json"), write("metrics.jsonl")],
    ids=["failed", "checkpoint", "metrics"],
)
def test_discard_keeps_a_run_with_a_result(tmp_path, during):
    refuse(tmp_path / "run", during)
    assert (tmp_path / "run" / "run.json").is_file()


def test_discard_keeps_files_of_others_in_the_new_directory(tmp_path):
    refuse(tmp_path / "run", write(".hydra/config.yaml", "notes.txt"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_discard_leaves_a_directory_that_existed_as_it_was(tmp_path):
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / "train.log").write_text("mine")
    refuse(tmp_path / "run", write("tokenizer/tokenizer.json"))
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == [".hydra", "train.log"]


def test_refused_launch_in_the_directory_of_a_run_removes_nothing(tmp_path):
    """This process has created the directory, but for the run that is in it now."""
    with RunMetadata.open(tmp_path / "run") as metadata:
        begin(metadata)
    with pytest.raises(UserError, match="already holds a run"):
        RunMetadata.open(tmp_path / "run")
    with pytest.raises(UserError), RunMetadata.open(tmp_path / "run", resume=True):
        raise UserError("a", "b", "c")
    assert RunMetadata.read(tmp_path / "run")["status"] == "failed"


def test_discard_removes_a_sweep_that_never_ran(tmp_path):
    for has_begun in (False, True):
        with pytest.raises(UserError), SweepState.create(tmp_path / "multirun" / "sweep") as state:
            state.write()
            if has_begun:
                state.set_status("running")
            raise UserError("a", "b", "c")
        assert (
            (tmp_path / "multirun" / "sweep" / "sweep.json").is_file() == has_begun == (tmp_path / "multirun").exists()
        )
