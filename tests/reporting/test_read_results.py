"""Reading a sweep directory: status, losses, means over seeds, order of rows, damaged files."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import pytest
from sweep_fixtures import job, record, training, write_sweep

from common.ownership import process_id
from runner.reporting import sweep_results
from runner.reporting.leaderboard import leaderboard_text, update_report
from runner.reporting.metrics import read_job_metrics
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.run_list import scan_runs
from runner.reporting.runs import job_folders
from runner.reporting.statistics import MeanStd
from runner.reporting.sweep_results import ResultRow
from runner.run_dir.contents import OWNER_FILE

LR = "optimizer.lr"


def rows_of(folder: Path) -> list[ResultRow]:
    return read_sweep_results(folder).rows


def write_metrics(folder: Path, *records: dict) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder / "metrics.jsonl"


def test_rows_are_ordered_by_best_validation_loss_and_unfinished_ones_last(tmp_path: Path) -> None:
    jobs = [
        job({LR: "1"}, training(1.0), status="failed", error="out of memory"),
        job({LR: "2"}, None, status="new"),
        job({LR: "3"}, training(3.0)),
        job({LR: "4"}, [*training(1.5)[:-1], record(40, None, kind="eval")]),
        job({LR: "5"}, training(1.0)[:20], status="interrupted"),
        job({LR: "6"}, training(2.0)),
        job({LR: "7"}, training(1.0)[:20], status="running"),
    ]
    rows = rows_of(write_sweep(tmp_path, jobs, status="running"))
    assert [row.overrides[LR] for row in rows] == ["6", "3", "4", "7", "5", "1", "2"]
    assert [row.rank for row in rows] == [1, 2, None, None, None, None, None]
    reasons = [row.jobs[0].reason for row in rows]
    assert reasons == [
        "",
        "",
        "diverged: the last loss is not finite",
        "at step 19",
        "stopped at step 19",
        "out of memory",
        "",
    ]


def test_best_loss_is_the_lowest_and_final_loss_the_newest_evaluation(tmp_path: Path) -> None:
    records = [
        record(10, 3.0, kind="eval"),
        record(20, 2.0, kind="eval"),
        record(30, 2.5, kind="eval"),
        record(31, 1.0),
    ]
    (row,) = rows_of(write_sweep(tmp_path, [job({LR: "1"}, records)]))
    assert (
        row.final
        and row.best
        and row.train
        and (row.final.mean, row.best.mean, row.best_step, row.train.mean) == (2.5, 2.0, 20, 1.0)
    )


def test_job_without_evaluation_is_not_ranked_by_its_training_loss(tmp_path: Path) -> None:
    first, second = rows_of(write_sweep(tmp_path, [job({LR: "1"}, [record(1, 0.1)]), job({LR: "2"}, training(2.0))]))
    assert (first.overrides[LR], second.overrides[LR], second.best, second.rank) == ("2", "1", None, None)


def test_seeds_of_a_grid_point_become_mean_deviation_and_count(tmp_path: Path) -> None:
    losses = {"1": 2.0, "2": 2.2, "3": 2.7}
    jobs = [job({"seed": seed, LR: "1e-4"}, training(loss)) for seed, loss in losses.items()] + [
        job({LR: "5e-4", "seed": "1"}, training(2.1))
    ]
    single, several = rows_of(write_sweep(tmp_path, jobs))
    assert (
        (single.overrides, single.seed, single.members) == ({LR: "5e-4"}, "1", [])
        and several.overrides == {LR: "1e-4"}
        and several.best
    )
    assert (
        several.best.mean == pytest.approx(2.3)
        and several.best.deviation == pytest.approx(statistics.stdev(losses.values()))
        and several.best.n == 3
    )
    assert [(member.seed, member.rank) for member in several.members] == [("1", None), ("2", None), ("3", None)]


def test_deviation_of_a_single_job_is_none() -> None:
    single = sweep_results.JobResult("a", {}, "completed", final={"training": 2.0}, best={"training": (2.0, 1.0)})
    assert sweep_results.ResultRow([single], "training").final == MeanStd(2.0, None, 1)


def test_grid_point_with_a_failed_seed_has_a_mean_and_no_rank(tmp_path: Path) -> None:
    jobs = [
        job({LR: "1", "seed": "1"}, training(1.0)),
        job({LR: "1", "seed": "2"}, training(9.0)[:8], status="failed"),
        job({LR: "2", "seed": "1"}, training(4.0)),
    ]
    first, second = rows_of(write_sweep(tmp_path, jobs, status="failed"))
    assert (
        first.overrides == {LR: "2"}
        and second.best
        and (second.best.mean, second.best.n, second.rank) == (1.0, 1, None)
    )


def test_unfinished_seeds_are_averaged_only_at_the_same_step(tmp_path: Path) -> None:
    seeds = [
        job({LR: "1", "seed": seed}, training(2.0, steps=steps), status="interrupted")
        for seed, steps in (("1", 20), ("2", 40))
    ]
    (different,) = rows_of(write_sweep(tmp_path / "different", seeds, status="interrupted"))
    assert (different.final, different.best, different.train) == (None, None, None) and different.loss_tokens
    (same,) = rows_of(
        write_sweep(tmp_path / "same", [{**each, "records": training(2.0)} for each in seeds], status="interrupted")
    )
    assert same.best and same.best.n == 2


def test_order_of_swept_keys_in_a_job_does_not_matter(tmp_path: Path) -> None:
    jobs = [
        job({"a": "1", "b": "2", "seed": "1"}, training(1.0)),
        job({"b": "2", "seed": "2", "a": "1"}, training(2.0)),
    ]
    assert len(rows_of(write_sweep(tmp_path, jobs))) == 1


def test_time_of_attempts_is_added_without_lost_steps(tmp_path: Path) -> None:
    records = [
        record(10, 5.0, time=3.0),
        record(20, 4.0, time=6.0),
        record(30, 3.0, time=2.5, attempt=3),
        record(40, 2.0, time=5.0, attempt=3),
    ]
    curve = read_job_metrics(write_metrics(tmp_path, *records)).train
    assert curve.columns["seconds"] == [3.0, 6.0, 8.5, 11.0]


def test_time_includes_the_last_evaluation(tmp_path: Path) -> None:
    metrics = read_job_metrics(
        write_metrics(tmp_path, record(10, 3.0, time=4.0), record(10, 3.0, time=6.0, kind="eval"))
    )
    assert metrics.last and metrics.last.time == 6.0


def test_tokens_per_second_is_all_tokens_by_the_time_they_took(tmp_path: Path) -> None:
    """10,000 tokens at 1000 and 30,000 at 3000 tokens per second: 40,000 tokens in 20 seconds."""
    speeds = [(10, 10_000, 1000.0), (20, 40_000, 3000.0), (21, 41_000, None)]
    records = [record(step, 5.0) | {"tokens": tokens, "tokens_per_second": speed} for step, tokens, speed in speeds]
    assert read_job_metrics(write_metrics(tmp_path, *records)).tokens_per_second == pytest.approx(2000)


@pytest.mark.parametrize("name", ["x" * 300, "a\ud800b", "..", "a/b", "a\0b"])
def test_name_that_no_folder_can_have_leaves_the_job_without_a_folder(tmp_path: Path, name: str) -> None:
    folder = write_sweep(tmp_path, [job({LR: "1"}, training(1.0))])
    sweep = json.loads((folder / "sweep.json").read_text())
    sweep["jobs"].append({"name": name, "status": "completed", "overrides": {LR: "2"}})
    (folder / "sweep.json").write_text(json.dumps(sweep))
    assert len(rows_of(folder)) == 2


def test_jobs_that_sweep_json_does_not_name_are_last(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [job({LR: value}, training(1.0)) for value in ("1", "3")])
    sweep = json.loads((folder / "sweep.json").read_text())
    first, third = sweep["jobs"]
    sweep["jobs"] = [None, third]
    (folder / "sweep.json").write_text(json.dumps(sweep))
    assert [path.name for path in job_folders(folder)] == [third["name"], first["name"]]


def test_tokens_with_a_label_and_all_tokens_are_read_apart(tmp_path: Path) -> None:
    (row,) = rows_of(write_sweep(tmp_path, [job({LR: "1"}, training(1.0))]))
    assert (row.loss_tokens, row.tokens) == (4000, 6400)


@pytest.mark.parametrize("status", ["completed", "failed"])
@pytest.mark.parametrize(
    ("in_sweep_json", "in_run_json"),
    [({"loss": "inf"}, {}), ({"outcome": "diverged"}, {}), ({}, {"outcome": "diverged"})],
)
def test_diverged_job_is_not_ranked_whatever_its_last_record_is(
    tmp_path: Path, status: str, in_sweep_json: dict, in_run_json: dict
) -> None:
    folder = write_sweep(tmp_path, [job({LR: "5"}, training(2.0), status=status, **in_sweep_json)])
    (folder / f"{LR}=5" / "run.json").write_text(json.dumps({"status": status} | in_run_json))
    (row,) = rows_of(folder)
    assert row.diverged == 1 and row.rank is None and row.final is None


def test_losses_come_from_run_json_where_nothing_is_logged(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [job({LR: "1"}, [])])
    metrics = {"loss": 3.0, "val_loss": 2.5, "best_val_loss": 2.0, "best_step": 7}
    (folder / f"{LR}=1" / "run.json").write_text(json.dumps({"status": "completed", "step": 9, "metrics": metrics}))
    (row,) = rows_of(folder)
    assert row.final and row.best and (row.final.mean, row.best.mean, row.best_step, row.rank) == (2.5, 2.0, 7, 1)


def test_status_of_a_job_whose_sweep_process_was_killed_comes_from_run_json(tmp_path: Path) -> None:
    started, ended, before = "2026-11-21T10:00:00+00:00", "2026-11-21T10:05:00+00:00", "2026-11-21T09:00:00+00:00"
    dead = process_id() | {"start_ticks": 1}
    cases = {
        "a": ({"status": "completed", "ended": ended}, "completed"),
        "b": ({"status": "failed", "error": "no memory", "ended": ended}, "failed"),
        "c": ({"status": "interrupted", "ended": before}, "running"),  # the end of an earlier attempt
        "d": ({"status": "running", **process_id()}, "running"),
        "e": ({"status": "running", **dead}, "interrupted"),
    }
    folder = write_sweep(
        tmp_path, [job({"x": name}, [], status="running", started=started) for name in cases], status="running"
    )
    for name, (metadata, _) in cases.items():
        (folder / f"x={name}" / "run.json").write_text(json.dumps(metadata))
    assert {row.overrides["x"]: row.status for row in rows_of(folder)} == {
        name: status for name, (_, status) in cases.items()
    }
    assert "no memory" in leaderboard_text(folder)


def test_status_of_a_job_finished_after_the_sweep_ended_comes_from_run_json(tmp_path: Path) -> None:
    stopped, before, since = "2026-11-21T10:00:00+00:00", "2026-11-21T09:00:00+00:00", "2026-11-21T11:00:00+00:00"
    cases = {
        "a": ("interrupted", {"status": "completed", "ended": since}, "completed"),
        "b": ("failed", {"status": "completed", "ended": since}, "completed"),
        # it refused further overrides after it was completed
        "c": ("failed", {"status": "completed", "ended": before}, "failed"),
        "d": ("interrupted", {"status": "running", **process_id()}, "running"),
        "e": ("failed", {"status": "running", **process_id(), "start_ticks": 1}, "failed"),
        "f": ("interrupted", {"status": "interrupted", "ended": before}, "interrupted"),
    }
    jobs = [
        job({"x": name}, [], status=status, ended=stopped, error="stopped", loss="inf" if name == "b" else None)
        for name, (status, _, _) in cases.items()
    ]
    folder = write_sweep(tmp_path, jobs, status="interrupted")
    for name, (_, metadata, _) in cases.items():
        (folder / f"x={name}" / "run.json").write_text(json.dumps({**metadata, "metrics": {"val_loss": 2.0}}))
    rows = {row.overrides["x"]: row for row in rows_of(folder)}
    assert {name: row.status for name, row in rows.items()} == {name: status for name, (_, _, status) in cases.items()}
    assert rows["b"].rank and rows["b"].jobs[0].reason == "" and rows["c"].jobs[0].reason == "stopped"


DAMAGE: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "torn": b'{"kind": "train", "step": 1, "loss": 2.0, "tokens": 1, "time": 1.0}\n{"kind": "train", "st',
    "binary": bytes(range(256)) * 40,
    "other types": b'[1]\n"x"\nnull\n{"kind": ["train"], "step": {}}\n{"kind": "train", "step": "7", "loss": "low"}\n{"kind": "train", "step": true}\n',
    "odd numbers": b'{"kind": "eval", "step": 1e999, "loss": NaN}\n{"kind": "train", "step": 3, "loss": 1e999, "tokens": null, "time": -1}\n',
    "huge integer": b'{"kind": "train", "step": '
    + b"9" * 400
    + b"}\n"
    + b'{"kind": "train", "step": '
    + b"9" * 5000
    + b"}\n",
    "deep nesting": b'{"kind": ' + b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("file", ["metrics.jsonl", "run.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_of_one_job_leaves_the_report_and_other_jobs_intact(
    tmp_path: Path, file: str, damage: str
) -> None:
    folder = write_sweep(tmp_path, [job({LR: "1"}, training(1.0)), job({LR: "2"}, training(2.0))])
    path, content = folder / f"{LR}=1" / file, DAMAGE[damage]
    path.unlink() if content is None else path.write_bytes(content)
    update_report(folder)
    assert {row.overrides[LR] for row in rows_of(folder)} == {"1", "2"}
    assert "2.0000" in leaderboard_text(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"jobs": 3, "swept": [], "overrides": null}',
        b'{"jobs": [1, {}, {"name": 5, "overrides": [], "attempt": "x"}]}',
    ],
)
def test_damaged_sweep_json_is_reported_without_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sweep.json").write_bytes(content)
    update_report(tmp_path)
    assert "continue with" in leaderboard_text(tmp_path)


def test_text_of_a_sweep_proposes_no_resume_while_its_process_is_alive(tmp_path: Path) -> None:
    folder = write_sweep(
        tmp_path, [job({LR: "1"}, training(1.0)), job({LR: "2"}, None, status="new")], status="running"
    )
    (folder / OWNER_FILE).write_text(json.dumps(process_id()))
    assert "continue with" not in leaderboard_text(folder)
    # killed, and its pid is that of another process now
    (folder / OWNER_FILE).write_text(json.dumps({**process_id(), "start_ticks": 1}))
    assert "continue with" in leaderboard_text(folder)


def test_sweep_whose_process_was_killed_is_interrupted(tmp_path: Path) -> None:
    folder = write_sweep(
        tmp_path / "sweep", [job({LR: "1"}, training(1.0)), job({LR: "2"}, None, status="new")], status="running"
    )
    for owner, status in (
        (process_id(), "running"),
        ({**process_id(), "start_ticks": 1}, "interrupted"),
        ({**process_id(), "host": "another"}, "running"),
    ):
        (folder / OWNER_FILE).write_text(json.dumps(owner))
        assert f"\n{status}: " in leaderboard_text(folder)
        assert {row.folder: row.status for row in scan_runs(tmp_path).rows}[folder] == status


def test_job_name_that_leads_out_of_the_sweep_directory_is_not_followed(tmp_path: Path) -> None:
    write_sweep(tmp_path / "other", [job({LR: "1"}, training(1.0))])
    names = [f"../other/{LR}=1", f"{tmp_path}/other/{LR}=1", "..", ".", "", "a\0b"]
    folder = write_sweep(
        tmp_path / "mine", [job({LR: str(i)}, None, name=name) for i, name in enumerate(names, start=1)]
    )
    assert [row.best for row in rows_of(folder)] == [None] * 6


def test_job_directory_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", [job({LR: "1"}, training(1.0))])
    (folder / f"{LR}=1").rename(tmp_path / "moved")
    (folder / f"{LR}=1").symlink_to(tmp_path / "moved")
    assert rows_of(folder)[0].best is None


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_metrics_file_that_is_a_link_or_pipe_is_not_read(tmp_path: Path, kind: str) -> None:
    folder = write_sweep(tmp_path / "sweep", [job({LR: "1"}, training(1.0))])
    path = folder / f"{LR}=1" / "metrics.jsonl"
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved") if kind == "link" else os.mkfifo(path)
    assert rows_of(folder)[0].best is None
