"""leaderboard.csv, the text of the terminal and the command report.py."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from pathlib import Path

import pytest
from sweep_fixtures import job, record, training, write_sweep

from runner.reporting import columns, leaderboard
from runner.reporting.columns import COLUMNS, Column
from runner.reporting.leaderboard import leaderboard_text, resolve_sweep, update_report
from runner.run_dir.best_job import find_best_job

LR = "optimizer.lr"


def csv_rows(folder: Path) -> list[dict[str, str]]:
    update_report(folder)
    return list(csv.DictReader(io.StringIO((folder / "leaderboard.csv").read_text(encoding="utf-8"))))


def write_launches(run: Path, *launches: str) -> None:
    """Write the overrides of each launch of a run to its .hydra/."""
    for number, overrides in enumerate(launches, start=1):
        folder = run / ".hydra" / ("" if number == len(launches) else f"history/{number - 1:03d}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides.split()))


def test_column_added_to_the_table_appears_in_text_csv_and_html(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        columns,
        "COLUMNS",
        [*COLUMNS, Column("steps_logged", "logged steps", lambda row: len(row.jobs[0].metrics.train))],
    )
    folder = write_sweep(tmp_path, [job({LR: "1"}, training(1.0, steps=37))])
    assert csv_rows(folder)[0]["steps_logged"] == "37"
    assert "logged steps" in leaderboard_text(folder) and leaderboard_text(folder).splitlines()[4].endswith("37")
    assert (
        "logged steps</button></th>" in (page := (folder / "report.html").read_text())
        and '<td class="n" data-v="37">37</td>' in page
    )


def test_text_lists_ranks_and_the_reasons_of_failed_jobs(tmp_path: Path) -> None:
    jobs = [
        job({LR: "1"}, training(1.0), status="failed", error="out of memory"),
        job({LR: "3"}, training(3.0)),
        job({LR: "6"}, training(2.0)),
    ]
    text = leaderboard_text(write_sweep(tmp_path, jobs, status="failed"))
    assert [text.index(each) for each in ("1.  6", "2.  3", "-   1 ", "optimizer.lr=1: failed: out of memory")]


def test_text_of_a_diverged_job_without_evaluation_among_evaluated_jobs(tmp_path: Path) -> None:
    jobs = [
        job({LR: "1"}, training(2.0)),
        job({LR: "5"}, [record(1, 9.0), record(2, None)], status="failed", error="not finite", loss="inf"),
    ]
    assert "failed, diverged" in leaderboard_text(write_sweep(tmp_path, jobs, status="failed"))


def test_training_losses_without_evaluations_have_their_own_heading(tmp_path: Path) -> None:
    folder = write_sweep(
        tmp_path, [job({LR: "1"}, [record(1, 5.0), record(2, 4.0)]), job({LR: "2"}, [record(1, 5.0), record(2, 3.0)])]
    )
    assert [(row[LR], row["final_training_loss"]) for row in csv_rows(folder)] == [("2", "3"), ("1", "4")]
    with open(folder / "leaderboard.csv", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert len(set(header)) == len(header) and {len(line) for line in lines} == {len(header)}
    assert "best training loss" in leaderboard_text(folder) and "validation" not in leaderboard_text(folder)


def evaluated(loss: float, weights: str = "best", step: int = 20, evaluation: dict | None = None) -> dict:
    """Fields of run.json of a completed run whose model has this evaluation loss."""
    identity = {"on": "validation", "data": "a", "rows": 10, "tokens": 0, "tokenizer": "t", "loss": {}} | (
        evaluation or {}
    )
    return {
        "metrics": {"loss": 1.0},
        "evaluation": identity,
        "export": {"weights": weights, "step": step, "loss": loss},
    }


def test_rank_and_best_job_are_those_of_the_weights_in_model(tmp_path: Path) -> None:
    """The winner had the lowest loss of any step, 4.11, and its exported weights evaluated to 6.95: with
    export.weights=last it is last.
    """
    records = [record(20, 4.11, kind="eval"), record(40, 6.95, kind="eval")]
    jobs = [
        job({LR: "1"}, records, run=evaluated(6.95, "last", 40)),
        job({LR: "2"}, training(5.0), run=evaluated(5.0, "last", 40)),
    ]
    folder = write_sweep(tmp_path / "last", jobs)
    assert [(row[LR], row["loss"], row["weights"]) for row in csv_rows(folder)] == [
        ("2", "5", "last, step 40"),
        ("1", "6.95", "last, step 40"),
    ]
    assert f"its model: {folder / f'{LR}=2'} (last weights, step 40, evaluation loss 5.0000)" in leaderboard_text(
        folder
    )
    jobs[0]["run"] = evaluated(4.11)
    folder = write_sweep(tmp_path / "best", [dict(each, overrides=dict(each["overrides"])) for each in jobs])
    assert [(row[LR], row["loss"]) for row in csv_rows(folder)] == [("1", "4.11"), ("2", "5")]
    (folder / f"{LR}=1" / "model").mkdir()
    (folder / f"{LR}=2" / "model").mkdir()
    assert find_best_job(folder) == folder / f"{LR}=1"


def test_jobs_without_evaluation_have_no_winner_by_their_luckiest_step(tmp_path: Path) -> None:
    folder = write_sweep(
        tmp_path, [job({LR: "1"}, [record(1, 0.1), record(2, 4.0)]), job({LR: "2"}, [record(1, 5.0), record(2, 3.0)])]
    )
    assert [(row[LR], row["rank"]) for row in csv_rows(folder)] == [("2", ""), ("1", "")]
    text = leaderboard_text(folder)
    assert "no best job: no job was evaluated" in text and "best job:" not in text.replace("no best job:", "")
    assert "No job is ranked: no job was evaluated" in (folder / "report.html").read_text()


def test_jobs_without_validation_data_are_ranked_on_the_same_training_rows(tmp_path: Path) -> None:
    jobs = [
        job(
            {LR: lr},
            [record(1, lucky), record(40, loss), record(40, loss, kind="eval")],
            run=evaluated(loss, "last", 40, {"on": "training"}),
        )
        for lr, lucky, loss in (("1", 0.1, 4.0), ("2", 5.0, 3.0))
    ]
    folder = write_sweep(tmp_path, jobs)
    assert [(row[LR], row["rank"], row["final_training_rows_loss"]) for row in csv_rows(folder)] == [
        ("2", "1", "3"),
        ("1", "2", "4"),
    ]
    assert "final training-rows loss" in leaderboard_text(folder) and "validation loss" not in leaderboard_text(folder)


@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        ({"data": "b"}, "different evaluation rows"),
        ({"tokenizer": "b"}, "different tokenizers"),
        ({"loss": {"stage.beta": 0.5}}, "different losses: stage.beta differs"),
        ({"tokens": 7}, "data.max_length cuts"),
        ({"on": "training"}, "rows of another kind"),
    ],
)
def test_jobs_that_were_judged_differently_are_not_ranked(tmp_path: Path, difference: dict, reason: str) -> None:
    jobs = [
        job({LR: "1"}, training(1.0), run=evaluated(1.0)),
        job({LR: "2"}, training(2.0), run=evaluated(2.0, evaluation=difference)),
    ]
    folder = write_sweep(tmp_path, jobs)
    assert {row["rank"] for row in csv_rows(folder)} == {""}
    assert reason in leaderboard_text(folder) and "best job:" not in leaderboard_text(folder).replace(
        "no best job:", ""
    )


def test_scaled_learning_rate_is_shown_as_it_was_trained(tmp_path: Path) -> None:
    """sweep.lr_scale=linear: the table showed 0.001 for a job that was trained with 0.004."""
    folder = write_sweep(
        tmp_path / "swept",
        [job({LR: "0.001", "train.batch_size": size}, training(loss)) for size, loss in (("4", 2.0), ("16", 1.0))],
    )
    for size, lr in (("4", "0.001"), ("16", "0.004")):
        write_launches(
            folder / f"{LR}=0.001,train.batch_size={size}", f"sweep.lr_scale=linear train.batch_size={size} {LR}={lr}"
        )
    assert [row[LR] for row in csv_rows(folder)] == [
        "0.004",
        "0.001",
    ] and "1.  0.004 (0.001 scaled)  16" in leaderboard_text(folder)
    folder = write_sweep(
        tmp_path / "shared",
        [job({"train.batch_size": size}, training(loss)) for size, loss in (("4", 2.0), ("16", 1.0))],
    )
    write_launches(folder / "train.batch_size=4", "train.batch_size=4")
    (folder / "train.batch_size=4" / ".hydra" / "config.yaml").write_text("optimizer: {lr: 0.001}\n")
    write_launches(folder / "train.batch_size=16", f"train.batch_size=16 {LR}=0.004")
    assert [(row["train.batch_size"], row[LR]) for row in csv_rows(folder)] == [("16", "0.004"), ("4", "0.001")]


def test_extended_points_are_marked(tmp_path: Path) -> None:
    """A job that was completed and trained further has other learning rates than a job of that length."""
    jobs = [job({LR: "1"}, training(1.0), applied_overrides=["train.max_steps=80"]), job({LR: "2"}, training(2.0))]
    folder = write_sweep(tmp_path, jobs)
    assert [row["extended_with"] for row in csv_rows(folder)] == ["train.max_steps=80", ""]
    text = leaderboard_text(folder)
    assert "completed, extended" in text and "optimizer.lr=1: completed, extended with train.max_steps=80" in text
    assert "“Extended”" in (folder / "report.html").read_text()


def test_seeds_have_a_line_each_below_their_grid_point(tmp_path: Path) -> None:
    jobs = [job({"seed": seed, LR: "1e-4"}, training(loss)) for seed, loss in (("1", 2.0), ("2", 2.2), ("3", 2.7))]
    folder = write_sweep(tmp_path, [*jobs, job({LR: "5e-4", "seed": "1"}, training(2.1))])
    assert [(row["row"], row["rank"], row["seed"], row["jobs"]) for row in csv_rows(folder)] == [
        ("point", "1", "1", "1"),
        ("point", "2", "", "3"),
        ("job", "", "1", "1"),
        ("job", "", "2", "1"),
        ("job", "", "3", "1"),
    ]
    assert "2.3000 ± 0.3606 (3)" in leaderboard_text(folder)


def test_seed_as_the_only_swept_key_gives_one_grid_point(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [job({"seed": seed}, training(loss)) for seed, loss in (("1", 1.0), ("2", 2.0))])
    assert "1.  2 seeds" in leaderboard_text(folder)
    assert (csv_rows(folder)[0]["rank"], csv_rows(folder)[0]["best_validation_loss"]) == ("1", "1.5")


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-x", "@SUM(A1)", "\t=1", "  =1", "-2+3"])
def test_csv_cells_are_not_run_as_formulas_by_a_spreadsheet(tmp_path: Path, text: str) -> None:
    folder = write_sweep(
        tmp_path,
        [job({"data.path": text, text: "v"}, training(1.0), status="failed", error=text, name="a")],
        status="failed",
    )
    update_report(folder)
    cells = [cell for row in csv.reader(io.StringIO((folder / "leaderboard.csv").read_text())) for cell in row]
    assert sum(text.strip() in cell for cell in cells) == 3
    assert not [cell for cell in cells if cell.lstrip().startswith(("=", "+", "-", "@"))]


def test_csv_numbers_have_no_separators(tmp_path: Path) -> None:
    (row,) = csv_rows(write_sweep(tmp_path, [job({LR: "-1e-4", "x": "+0.5"}, training(-0.25))]))
    assert (row[LR], row["x"], float(row["best_validation_loss"]), row["loss_tokens"], row["seconds"]) == (
        "-1e-4",
        "+0.5",
        -0.25,
        "4000",
        "4",
    )


def test_csv_numbers_have_every_digit_of_a_count(tmp_path: Path) -> None:
    (row,) = csv_rows(write_sweep(tmp_path, [job({LR: "1"}, [record(1, 2.5) | {"tokens": 12_345_678_901}])]))
    assert (row["tokens"], row["final_training_loss"]) == ("12345678901", "2.5")


def test_best_job_command_has_the_overrides_the_job_was_started_with(tmp_path: Path) -> None:
    overrides = (
        "data.path=/my data/it's.jsonl",
        "sweep.zip=[optimizer.lr,seed]",
        "hydra.sweep.dir=/x",
        "hydra/launcher=local",
        "train.max_steps=5",
    )
    folder = write_sweep(tmp_path, [job({LR: "1"}, training(1.0)), job({LR: "2"}, training(2.0))], overrides=overrides)
    command = "python runner/train.py 'data.path=/my data/it'\"'\"'s.jsonl' train.max_steps=5 optimizer.lr=1"
    assert f"best job: {command}\n" in f"{leaderboard_text(folder)}\n"
    (folder / f"{LR}=1" / ".hydra").mkdir()
    # by sweep.match_budget
    (folder / f"{LR}=1" / ".hydra" / "overrides.yaml").write_text(
        "- train.max_steps=20\n- optimizer.lr=1\n- hydra.run.dir=/x\n"
    )
    assert "best job: python runner/train.py train.max_steps=20 optimizer.lr=1\n" in f"{leaderboard_text(folder)}\n"


def test_text_is_aligned_and_free_of_control_characters(tmp_path: Path) -> None:
    jobs = [
        job({LR: "1e-4", "x": "long value"}, training(1.0)),
        job({LR: "5", "x": "\x1b[2J"}, training(2.0), status="failed", error="bad\x1b]0;\x07 \u202eend", name="b"),
    ]
    text = leaderboard_text(write_sweep(tmp_path, jobs, status="failed"))
    assert "\x1b" not in text and "\u202e" not in text and "continue with: python runner/train.py resume=" in text
    table = text.split("\n\n")[1].splitlines()
    assert len({line.index(status) for line, status in zip(table, ("status", "completed", "failed"), strict=True)}) == 1


def test_report_files_stay_complete_if_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_sweep(tmp_path, [job({LR: "1"}, training(1.0))])
    update_report(folder)
    before = (folder / "report.html").read_bytes()
    monkeypatch.setattr("common.filesystem.fs.rename", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        update_report(folder)
    assert (folder / "report.html").read_bytes() == before and not list(folder.glob(".tmp*"))


def test_resolve_sweep_takes_a_directory_any_path_in_it_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaderboard, "outputs_dir", lambda: tmp_path / "outputs")
    with pytest.raises(ValueError, match="there is no sweep"):
        resolve_sweep("last")
    for age, name in ((30, "2026-01-02/10-00-00"), (10, "2026-01-01/10-00-00")):
        write_sweep(tmp_path / "outputs" / "multirun" / name, [job({LR: "1"}, training(1.0))])
        os.utime(tmp_path / "outputs" / "multirun" / name / "sweep.json", (time.time() - age,) * 2)
    newest = tmp_path / "outputs" / "multirun" / "2026-01-01" / "10-00-00"
    assert resolve_sweep("last") == newest
    assert resolve_sweep(str(newest / f"{LR}=1" / "metrics.jsonl")) == newest
    for name, message in (("missing", "no such file"), (str(tmp_path), "not a sweep directory")):
        with pytest.raises(ValueError, match=message):
            resolve_sweep(name)


@pytest.mark.slow
def test_report_command_prints_the_text_and_the_paths_of_both_files(program, tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "a sweep, it's", [job({LR: "1"}, training(1.0)), job({LR: "2"}, training(2.0))])
    done = program(f"sweep={folder}", command="report.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert leaderboard_text(folder) in done.stdout and f"page: {folder}/report.html" in done.stdout
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [
        "leaderboard.csv",
        "report.html",
        "sweep.json",
    ]


def test_job_continued_by_hand_is_marked_in_text_csv_and_html(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [job({LR: "1"}, training(1.0)), job({LR: "2"}, training(2.0))])
    write_launches(
        folder / f"{LR}=1",
        f"train.max_steps=20 {LR}=1",
        f"{LR}=1 train.max_steps=60",
        f"{LR}=1 train.max_steps=60 optimizer.weight_decay=0.2",
    )
    write_launches(folder / f"{LR}=2", f"train.max_steps=20 {LR}=2")
    overrides = "train.max_steps=60 optimizer.weight_decay=0.2"
    first, second = csv_rows(folder)
    assert (first["continued_with"], second["continued_with"], first["rank"]) == (overrides, "", "1")
    text = leaderboard_text(folder)
    assert text.count("completed, continued by hand") == 1 and f"{LR}=1: completed, continued with {overrides}" in text
    assert f"best job, continued with {overrides}: python" in text
    page = (folder / "report.html").read_text()
    assert f"<b>{LR}=1, continued with {overrides}</b>" in page and page.count(f"continued with {overrides}") == 2


def test_overrides_given_by_the_sweep_do_not_mark_a_job_as_continued_by_hand(tmp_path: Path) -> None:
    """`resume=SWEEP train.max_steps=80` gives every job its override, which sweep.json records; a value typed for one
    job in between is marked.
    """
    applied = ["train.max_steps=20", "train.max_steps=30"]
    jobs = [job({LR: str(number), "seed": "1"}, training(1.0 + number), applied_overrides=applied) for number in (1, 2)]
    folder = write_sweep(tmp_path, [*jobs, job({LR: "1", "seed": "2"}, training(1.0))])
    write_launches(
        folder / f"{LR}=1,seed=1",
        "train.max_steps=10",
        "train.max_steps=20",
        "train.max_steps=25",
        "train.max_steps=30",
    )
    write_launches(folder / f"{LR}=2,seed=1", "train.max_steps=10", "train.max_steps=20", "train.max_steps=30")
    # the overrides of its first launch are missing
    (folder / f"{LR}=1,seed=2" / ".hydra" / "history" / "000").mkdir(parents=True)
    (folder / f"{LR}=1,seed=2" / ".hydra" / "overrides.yaml").write_text("- train.max_steps=10\n")
    assert [row["continued_with"] for row in csv_rows(folder)] == [
        "seed=1: train.max_steps=25",
        "train.max_steps=25",
        "",
        "",
    ]


def test_job_trained_on_changed_data_is_marked_in_text_csv_and_html(tmp_path: Path) -> None:
    """As after `resume=SWEEP seed=3` when the file has changed.

    Other data overrides, and rows drawn by the seed, are not marked.
    """

    def set_data(path: str, seed: str, fingerprint: str, rows: int, system_prob: float = 0.0) -> None:
        run = folder / f"data.path={path},seed={seed}"
        metadata = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(
            json.dumps(metadata | {"fingerprints": {"data": fingerprint}, "data": [{"read": rows, "kept": rows}]})
        )
        (run / ".hydra").mkdir()
        (run / ".hydra" / "config.yaml").write_text(f"data: {{system_prob: {system_prob}, empty_think_prob: 0.0}}\n")

    points = [{"data.path": path, "seed": seed} for path in ("a", "b") for seed in "1234"]
    folder = write_sweep(tmp_path, [job(point, training(1.0 + index)) for index, point in enumerate(points)])
    for seed, fingerprint, rows in (("1", "x", 9), ("2", "x", 9), ("3", "y", 9), ("4", "z", 5)):
        set_data("a", seed, fingerprint, rows)
        set_data("b", seed, fingerprint + seed, rows, system_prob=0.2)
    other_data = {
        row["folder"]: row["other_data_than"]
        for row in csv_rows(folder)
        if row["row"] == "job" and row["other_data_than"]
    }
    assert other_data == {
        "data.path=a,seed=3": "data.path=a,seed=1",
        "data.path=a,seed=4": "data.path=a,seed=1",
        "data.path=b,seed=4": "data.path=b,seed=1",
    }
    text, page = leaderboard_text(folder), (folder / "report.html").read_text()
    assert (
        text.count("completed, other data") == 5
        and "data.path=a seed=4: completed, trained on other data than data.path=a,seed=1" in text
    )
    assert "completed, other data" in page and "trained on other rows" in page
