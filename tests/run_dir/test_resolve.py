"""Which directory `resume=` and `run=` mean, and where a new run may be placed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from runner.checkpoint.atomic_dir import write_atomic_dir
from runner.config.resolve import check_not_inside_run, resolve_run
from runner.run_dir.contents import NAME_LENGTH, create_unique, is_sweep_dir, job_dirname
from runner.run_dir.metadata import RunMetadata


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    return folder


def test_run_is_found_by_any_path_inside_it(run: Path) -> None:
    inside = run / "model" / "config.json"
    inside.parent.mkdir()
    inside.touch()
    assert resolve_run(str(run)) == resolve_run(str(inside)) == resolve_run(str(run / "run.json")) == run


def test_missing_path_inside_a_run_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        resolve_run(str(run / "typo" / "nothing.here"))


def test_checkpoint_must_be_valid_and_the_newest(run: Path) -> None:
    older, newest = (run / "checkpoints" / f"step-{step:08d}" for step in (10, 20))
    for folder in (older, newest):
        write_atomic_dir(folder.parent, folder.name, {"state.json": b"{}"}, {})
    assert resolve_run(str(newest)) == run
    with pytest.raises(UserError, match="newer ones: step-00000020") as refused:
        resolve_run(str(older))
    assert resolve_run(str(older), "run") == run  # report.py shows the run
    assert refused.value.fix.endswith(f"branch from it: init_from={older} keep=optimizer")
    (newest / "state.json").write_bytes(b"[]")
    with pytest.raises(UserError, match="damaged"):
        resolve_run(str(newest))


def test_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not in a run directory"):
        resolve_run(str(tmp_path))


def test_file_in_a_sweep_means_its_job_or_the_sweep(run: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "report.html").touch()
    assert resolve_run(str(run / "run.json")) == run
    assert resolve_run(str(tmp_path)) == resolve_run(str(tmp_path / "report.html")) == tmp_path and is_sweep_dir(
        tmp_path
    )


def write_run(folder: Path, **fields: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "completed", "attempt": 1} | fields))
    return folder


def test_last_is_the_run_or_sweep_that_was_started_last(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep is resumed as a whole, not only the job that began last."""
    sweep = workspace / "outputs" / "multirun" / "day" / "time"
    write_run(sweep / "seed=1", started="2026-01-02T00:00:00+00:00")
    # the older one is written last
    single = write_run(workspace / "outputs" / "day" / "time", started="2026-01-01T00:00:00+00:00")
    (sweep / "sweep.json").write_text("{}")
    assert resolve_run("last") == sweep and f"resume=last: sweep {sweep}" in capsys.readouterr().err
    write_run(workspace / "outputs" / "day" / "later", started="2026-01-03T00:00:00+00:00")
    assert resolve_run("last") == single.with_name("later")


def test_last_skips_runs_that_never_began(workspace: Path) -> None:
    """As left behind by a launch that was refused: 13 of 88 refusals took the place of the last run."""
    begun = write_run(
        workspace / "outputs" / "day" / "10-00-00", started="2026-01-01T00:00:00+00:00", status="interrupted"
    )
    refused = write_run(workspace / "outputs" / "day" / "10-05-00", status="new", attempt=0)
    assert resolve_run("last") == begun
    for file in begun.iterdir():
        file.unlink()
    with pytest.raises(UserError, match="no run in .* has begun to train"):
        resolve_run("last")
    with pytest.raises(UserError) as failed:
        resolve_run("last", "run")  # as doctor.py spells it
    assert failed.value.setting == "run=last"
    assert refused.exists()


def test_new_run_is_not_placed_inside_a_run_or_sweep(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="inside a run"):
        check_not_inside_run(run / "checkpoints" / "new")
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match="holds a sweep"):
        check_not_inside_run(tmp_path)
    with pytest.raises(UserError, match="inside a sweep"):
        check_not_inside_run(tmp_path / "seed=3")  # a job of the sweep may be placed there


def test_folders_above_a_new_run_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may belong to others, who have folders named checkpoints that cannot be read."""

    def refuse(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(folder))

    (tmp_path / "checkpoints" / "step-00000100").mkdir(parents=True)
    monkeypatch.setattr(os, "listdir", refuse)
    check_not_inside_run(tmp_path / "alice" / "run")


def test_launches_in_one_second_get_directories_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "2026-01-01" / "10-00-00"
    assert [create_unique(folder).name for _ in range(3)] == ["10-00-00", "10-00-00-2", "10-00-00-3"]
    assert len(list(folder.parent.iterdir())) == 3


def test_launch_without_a_directory_of_its_own_takes_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, mkdir = create_unique(tmp_path / "10-00-00"), Path.mkdir

    def full_disk(folder: Path, **options: Any) -> None:
        if folder.name.endswith("-2"):
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(folder, **options)

    monkeypatch.setattr(Path, "mkdir", full_disk)
    assert create_unique(first) == tmp_path / "10-00-00-2"


def test_launch_where_outputs_cannot_be_created_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file in place of a directory that is not writable")
    with pytest.raises(UserError, match="cannot be used") as error:
        RunMetadata.open(create_unique(tmp_path / "outputs" / "2026-01-01" / "10-00-00"))
    assert "hydra.run.dir=DIR" in error.value.fix


def test_job_directory_is_named_by_its_swept_values_in_any_order() -> None:
    values = {"optimizer.lr": "0.1", "seed": "3"}
    assert job_dirname(values) == job_dirname(dict(reversed(values.items()))) == "optimizer.lr=0.1,seed=3"
    first, second = (job_dirname({"optimizer.lr": "0.1", "data.path": f"/a/{'long/' * 60}{end}.jsonl"}) for end in "xy")
    assert first != second and max(len(first), len(second)) <= NAME_LENGTH and "/" not in first
