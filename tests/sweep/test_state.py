"""sweep.json: which files are read, which are refused, and what it learns from run.json of its jobs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.ownership import process_id, start_ticks
from runner.sweep.state import SweepState

POINTS = [{"optimizer.lr": lr, "seed": seed} for lr in ("0.1", "0.2") for seed in ("1", "2")]
FIRST = "optimizer.lr=0.1,seed=1"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    with SweepState.create(tmp_path / "sweep", swept={"optimizer.lr": ["0.1", "0.2"], "seed": ["1", "2"]}) as state:
        for point in POINTS:
            state.add_job(point)
        state.write()
    return tmp_path / "sweep"


def write_run(folder: Path, **fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(fields))


def test_state_finds_a_job_by_its_overrides_in_any_order_and_spelling(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        names = [job.name for job in state.jobs]
        for point in reversed(POINTS):
            state.add_job(dict(reversed(point.items())))
            state.add_job({"optimizer.lr": point["optimizer.lr"] + "0", "seed": f"0{point['seed']}"})
        assert [job.name for job in state.jobs] == names and names[1] == "optimizer.lr=0.1,seed=2"


def test_state_whose_lock_was_deleted_is_refused_while_its_process_lives(sweep: Path) -> None:
    parent = {**process_id(), "pid": os.getppid(), "start_ticks": start_ticks(os.getppid())}
    (sweep / ".owner.json").write_text(json.dumps(parent))
    (sweep / ".lock").unlink()
    with pytest.raises(UserError, match=f"this sweep is being run by process {os.getppid()} on "):
        SweepState.open(sweep)


def test_state_learns_from_run_json_what_a_killed_sweep_could_not_write(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        for job in state.jobs[:3]:
            state.update_job(job, status="running")
        names = [job.name for job in state.jobs]
    write_run(sweep / names[0], status="completed", attempt=1, metrics={"loss": 2.0, "val_loss": 1.5})
    write_run(sweep / names[1], status="running", attempt=1)
    write_run(sweep / names[2], status="new", attempt=0)
    with SweepState.open(sweep) as state:
        assert [(job.status, job.loss) for job in state.jobs] == [
            ("completed", 1.5),
            ("interrupted", None),
            ("new", None),
            ("new", None),
        ]
        assert state.is_stale


def test_state_job_without_its_run_directory_is_new_again(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        state.update_job(state.jobs[0], status="completed", loss=1.0)
    with SweepState.open(sweep) as state:
        assert state.jobs[0].status == "new"


def test_state_loss_of_a_completed_job_without_a_finite_loss_is_infinite(sweep: Path) -> None:
    write_run(sweep / FIRST, status="completed", attempt=1, metrics={"loss": None, "val_loss": None})
    with SweepState.open(sweep) as state:
        assert state.jobs[0].loss == "inf"


def test_state_completed_job_that_refused_further_overrides_stays_failed(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        state.update_job(state.jobs[0], status="failed", pending_overrides=["data.path=other.jsonl"])
    write_run(sweep / FIRST, status="completed", attempt=1, metrics={"loss": 2.0})
    with SweepState.open(sweep) as state:
        assert state.jobs[0].status == "failed" and state.jobs[0].needs_run


def test_state_diverged_job_is_not_run_again(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        state.update_job(
            state.jobs[0], status="failed", outcome="diverged", loss="inf", pending_overrides=["train.max_steps=8"]
        )
        state.update_job(state.jobs[1], status="failed", outcome="failed")
        assert [job.needs_run for job in state.jobs[:2]] == [False, True]


def test_state_outcome_of_a_failed_job_comes_from_its_run_json(sweep: Path) -> None:
    write_run(sweep / FIRST, status="failed", outcome="diverged", attempt=1, error="the loss is not finite")
    with SweepState.open(sweep) as state:
        assert (
            state.jobs[0].is_diverged
            and state.jobs[0].loss == "inf"
            and state.jobs[0].error == "the loss is not finite"
        )


def test_state_is_opened_by_one_process_at_a_time_and_names_it(sweep: Path) -> None:
    with SweepState.open(sweep):
        if (child := os.fork()) == 0:
            message = ""
            try:
                SweepState.open(sweep)
            except UserError as error:
                message = error.message
            os._exit(0 if re.search(rf"run by process {os.getppid()} on \S+ since 20", message) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(SweepState.open_readonly(sweep).jobs) == 4
    assert sorted(path.name for path in sweep.iterdir()) == [".lock", "sweep.json"]


def test_state_refuses_a_directory_that_holds_or_is_inside_a_sweep_or_run(sweep: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", status="completed")
    for folder, message in (
        (sweep, "already holds a sweep"),
        (tmp_path / "run", "already holds a run"),
        (tmp_path / "run" / "deep" / "inner", "is inside a run"),
        (sweep / "seed=3", "is inside a sweep"),
    ):
        with pytest.raises(UserError, match=message):
            SweepState.create(folder)
    assert not (tmp_path / "run" / "deep").exists() and not (sweep / "seed=3").exists()


INVALID: dict[str, Callable[[dict[str, Any]], Any]] = {
    "job outside": lambda fields: fields["jobs"][0].update(name="../../outside"),
    "value no string": lambda fields: fields["jobs"][0].update(overrides={"seed": 1}),
    "unknown status": lambda fields: fields["jobs"][0].update(status="done"),
    "unknown field": lambda fields: fields["jobs"][0].update(command="rm"),
    "field missing": lambda fields: fields.pop("swept"),
    "overrides no list": lambda fields: fields.update(overrides="seed=1"),
    "older version": lambda fields: fields.pop("overrides"),
}


@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID)
def test_state_refuses_an_invalid_sweep_json(sweep: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    fields = json.loads((sweep / "sweep.json").read_text())
    change(fields)
    (sweep / "sweep.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="sweep.json cannot be read"):
        SweepState.open(sweep)


@pytest.mark.parametrize("link", [FIRST, f"{FIRST}/console.log", "optuna.jsonl"])
def test_sweep_with_a_link_to_the_outside_is_refused(link: str, sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (sweep / link).parent.mkdir(exist_ok=True)
    (sweep / link).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="this is a link"):
        SweepState.open(sweep)
    (sweep / link).unlink()
    SweepState.open(sweep).lock.release()  # type: ignore[union-attr]  # the refusal has released the lock
