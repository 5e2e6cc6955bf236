"""sweep.json: what is believed, what is refused, and what it learns from the jobs themselves; and the points of a sweep."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from common.paths import REPO_ROOT
from runner.config.compose import compose_config
from runner.run_dir.lock import is_locked
from runner.run_dir.metadata import RunMetadata, has_diverged
from runner.sweep import grid
from runner.sweep.session import needs_run
from runner.sweep.state import SweepState

POINTS = [{"optimizer.lr": lr, "seed": seed} for lr in ("0.1", "0.2") for seed in ("1", "2")]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    with SweepState.create(tmp_path / "sweep", overrides=[], swept={"optimizer.lr": ["0.1", "0.2"], "seed": ["1", "2"]}) as state:
        for point in POINTS:
            state.add(point)
        state.write()
    return tmp_path / "sweep"


def says(folder: Path, **fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(fields))


def test_a_job_is_known_by_its_words_in_whatever_order(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        before = [job["name"] for job in state.jobs]
        for point in reversed(POINTS):
            state.add(dict(reversed(point.items())))
            state.add({"optimizer.lr": point["optimizer.lr"] + "0", "seed": f"0{point['seed']}"})  # as Hydra's own sweeper may hand it on
        assert [job["name"] for job in state.jobs] == before and before[1] == "optimizer.lr=0.1,seed=2"


def test_what_a_killed_driver_could_not_write_is_learnt_from_the_jobs(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        for job in state.jobs[:3]:
            state.update_job(job, status="running")
        names = [job["name"] for job in state.jobs]
    says(sweep / names[0], status="completed", attempt=1, metrics={"loss": 2.0, "val_loss": 1.5})
    says(sweep / names[1], status="running", attempt=1)
    says(sweep / names[2], status="new", attempt=0)
    with SweepState.open(sweep) as state:
        assert [(job["status"], job["loss"]) for job in state.jobs] == [("completed", 1.5), ("interrupted", None), ("new", None), ("new", None)]


def test_a_job_whose_folder_is_gone_is_new_again(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        state.update_job(state.jobs[0], status="completed", loss=1.0)
    with SweepState.open(sweep) as state:
        assert state.jobs[0]["status"] == "new"


def test_a_completed_job_without_a_finite_loss_has_an_infinite_one(sweep: Path) -> None:
    says(sweep / "optimizer.lr=0.1,seed=1", status="completed", attempt=1, metrics={"loss": None, "val_loss": None})
    with SweepState.open(sweep) as state:
        assert state.jobs[0]["loss"] == "inf"


def test_a_completed_job_that_refused_more_words_stays_failed(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        state.update_job(state.jobs[0], status="failed", pending_overrides=["data.path=other.jsonl"])
    says(sweep / "optimizer.lr=0.1,seed=1", status="completed", attempt=1, metrics={"loss": 2.0})
    with SweepState.open(sweep) as state:
        assert state.jobs[0]["status"] == "failed" and needs_run(state.jobs[0])


def test_a_job_that_diverged_is_left_alone_whatever_words_it_waits_for(sweep: Path) -> None:
    with SweepState.open(sweep) as state:
        state.update_job(state.jobs[0], status="failed", loss="inf", pending_overrides=["train.max_steps=8"])
        assert not needs_run(state.jobs[0])


def test_every_end_that_asks_for_a_smaller_lr_counts_as_diverged() -> None:
    """lr=5 ends at a loss that is finite, and worse than knowing nothing: to train it again would change nothing."""
    engine = "".join(file.read_text() for file in sorted((REPO_ROOT / "runner" / "engine").glob("*.py")))
    said = re.findall(r'RunFailed\(f"(.*smaller optimizer.lr.*)"\)', engine)
    assert len(said) == 3 and all(has_diverged({"status": "failed", "error": error}) for error in said)


def test_one_process_at_a_time_drives_a_sweep(sweep: Path) -> None:
    with SweepState.open(sweep):
        if (child := os.fork()) == 0:
            code = 1
            try:
                SweepState.open(sweep)
            except ValueError as error:
                code = 0 if "is being run by process" in error.args[0] else 1
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_who_comes_second_to_a_sweep_is_told_who_drives_it(sweep: Path) -> None:
    with SweepState.open(sweep):
        if (child := os.fork()) == 0:
            said = ""
            try:
                SweepState.open(sweep)
            except ValueError as error:
                said = error.args[0]
            os._exit(0 if re.search(rf"run by process {os.getppid()} on \S+ since 20", said) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(path.name for path in sweep.iterdir()) == [".lock", "sweep.json"]


def test_a_job_that_still_trains_is_seen(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with RunMetadata.open(tmp_path):
        if (child := os.fork()) == 0:
            os._exit(0 if is_locked(tmp_path) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not is_locked(tmp_path)


def test_a_folder_with_a_sweep_or_a_run_takes_no_other(sweep: Path, tmp_path: Path) -> None:
    says(tmp_path / "run", status="completed")
    for folder in (sweep, tmp_path / "run"):
        with pytest.raises(ValueError, match="already holds"):
            SweepState.create(folder)
    with pytest.raises(ValueError, match="inside a run"):
        SweepState.create(tmp_path / "run" / "deep" / "inner")
    with pytest.raises(ValueError, match="inside a sweep"):
        SweepState.create(sweep / "seed=3")
    assert not (tmp_path / "run" / "deep").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields["jobs"][0].update(name="../../outside"),
        lambda fields: fields["jobs"][0].update(overrides={"seed": 1}),
        lambda fields: fields["jobs"][0].update(status="done"),
        lambda fields: fields.pop("swept"),
        lambda fields: fields.update(overrides="seed=1"),
    ],
)
def test_a_sweep_json_that_is_none_of_ours_is_refused(sweep: Path, change) -> None:
    fields = json.loads((sweep / "sweep.json").read_text())
    change(fields)
    (sweep / "sweep.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="no sweep.json of ours"):
        SweepState.open(sweep)


def test_points_are_every_combination_each_once() -> None:
    shared, swept, counted = grid.split_swept(["stage=sft", "optimizer.lr=1e-4,0.0001,5e-4", "seed=range(1,3)"])
    assert shared == ["stage=sft"] and counted
    assert grid.cartesian_points(swept) == [{"optimizer.lr": lr, "seed": seed} for lr in ("0.0001", "0.0005") for seed in ("1", "2")]


@pytest.mark.parametrize("values", [("1e-3", "2e-3"), ("a.jsonl", "'b, c.jsonl'"), ("null", "true"), ("[1,2]", "[0.9,0.95]"), ("hub:some/name@main", "x")])
def test_one_value_is_the_same_point_as_among_several(values: tuple[str, str]) -> None:
    assert [grid.split_override(f"optimizer.lr={value}")[1] for value in values] == grid.split_swept([f"optimizer.lr={','.join(values)}"])[1]["optimizer.lr"]


def test_a_value_is_one_point_however_it_is_written_where_its_word_takes_a_number() -> None:
    swept = grid.split_swept(["optimizer.weight_decay=0,0.0,0.1", "optimizer.lr=5,5.0,05", "seed=1,01,2", "tracker.project=1,01"])[1]
    assert list(swept.values()) == [["0", "0", "0.1"], ["5", "5", "5"], ["1", "1", "2"], ["1", "01"]]
    assert len(grid.cartesian_points(swept)) == 2 * 1 * 2 * 2
    assert grid.canonicalize("optimizer.lr", ["5.0", "1e-3"], known=["0.001", "5"]) == ["5", "0.001"]


def test_an_interval_cannot_be_counted() -> None:
    assert grid.split_swept(["optimizer.lr=interval(1e-5,1e-3)"])[1:] == ({"optimizer.lr": ["interval(1e-5,1e-3)"]}, False)


def test_a_pattern_means_the_files_of_a_group() -> None:
    assert grid.split_swept(["precision=glob(*16)"])[1] == {"precision": ["bf16", "fp16"]}


def test_a_value_may_stand_in_several_pairs() -> None:
    swept = grid.split_swept(["seed=1,2,3", "optimizer.lr=0.1,0.2,0.2"])[1]
    assert grid.cartesian_points(swept, ["seed", "optimizer.lr"]) == [{"seed": s, "optimizer.lr": lr} for s, lr in (("1", "0.1"), ("2", "0.2"), ("3", "0.2"))]


def test_zipped_words_go_in_pairs_and_the_others_with_each_pair() -> None:
    swept = {"optimizer.lr": ["0.1", "0.2"], "seed": ["1", "2", "3"], "train.batch_size": ["8", "16"]}
    found = grid.cartesian_points(swept, ["optimizer.lr", "train.batch_size"])
    assert len(found) == 6 and {(point["optimizer.lr"], point["train.batch_size"]) for point in found} == {("0.1", "8"), ("0.2", "16")}


@pytest.mark.parametrize("zipped", [["optimizer.lr", "seed"], ["optimizer.lr", "train.epochs"]])
def test_pairs_that_do_not_go_up_are_refused(zipped: list[str]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        grid.cartesian_points({"optimizer.lr": ["0.1", "0.2"], "seed": ["1", "2", "3"]}, zipped)


@pytest.mark.parametrize(
    "point", [{"optimizer.lr": "0.1", "train.max_steps": "1e3"}, {"precision": "bf16", "data.path": "'a b.jsonl'"}, {"stage": "lora", "stage.lora.rank": "4"}]
)
def test_a_point_is_composed_as_hydra_composes_it(point: dict[str, str]) -> None:
    composer = grid.PointComposer(["train.epochs=2"])
    composer.config({"optimizer.lr": "0.7"})  # must leave nothing behind
    assert composer.config(point) == compose_config(["train.epochs=2", *(f"{key}={value}" for key, value in point.items())])


def test_a_wrong_value_of_a_point_is_refused_in_its_own_words() -> None:
    for point, what in (({"optimizer.lr": "x"}, "a number"), ({"optimizer.lrr": "1"}, "no such word"), ({"stage": "sfft"}, "no such stage")):
        with pytest.raises(ValueError, match=what):
            grid.PointComposer([]).config(point)
