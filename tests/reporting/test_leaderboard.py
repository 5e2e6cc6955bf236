"""A sweep read back: points in their order, files that are damaged, the table, leaderboard.csv and report.py."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import statistics
import time
from pathlib import Path

import pytest
from sweep_fixtures import falling, job, line, made_sweep

from runner.reporting import aggregate, results
from runner.reporting import leaderboard as leaderboard_module
from runner.reporting.metrics_reader import read_run_metrics
from runner.run_dir.provenance import process_id

LR = "optimizer.lr"


def leaderboard(folder: Path) -> list[dict[str, str]]:
    leaderboard_module.update_report(folder)
    return list(csv.DictReader(io.StringIO((folder / "leaderboard.csv").read_text(encoding="utf-8"))))


def test_the_lowest_best_validation_loss_stands_first_and_what_did_not_end_well_stands_last(tmp_path: Path) -> None:
    jobs = [
        job({LR: "1"}, falling(1.0), status="failed", error="out of memory"),
        job({LR: "2"}, None, status="new"),
        job({LR: "3"}, falling(3.0)),
        job({LR: "4"}, [*falling(1.5)[:-1], line(40, None, kind="eval")]),
        job({LR: "5"}, falling(1.0)[:20], status="interrupted"),
        job({LR: "6"}, falling(2.0)),
        job({LR: "7"}, falling(1.0)[:20], status="running"),
    ]
    folder = made_sweep(tmp_path, jobs, status="running")
    rows = leaderboard_module.print_leaderboard(folder)
    assert [row.words[LR] for row in rows] == ["6", "3", "4", "7", "5", "1", "2"]
    assert [row.ranked for row in rows] == [True, True, False, False, False, False, False]
    reasons = [row.jobs[0].reason for row in rows]
    assert reasons == ["", "", "diverged: its last loss is not finite", "at step 19", "stopped at step 19", "out of memory", ""]
    text = leaderboard_module.leaderboard_text(folder)
    assert [text.index(each) for each in ("1.  6", "2.  3", "-   4", "-   1 ", "optimizer.lr=1: failed: out of memory")]


def test_an_early_dip_is_the_best_and_the_newest_evaluation_is_the_final_one(tmp_path: Path) -> None:
    lines = [line(10, 3.0, kind="eval"), line(20, 2.0, kind="eval"), line(30, 2.5, kind="eval"), line(31, 1.0)]
    (row,) = leaderboard_module.print_leaderboard(made_sweep(tmp_path, [job({LR: "1"}, lines)]))
    assert row.final and row.best and row.train and (row.final.mean, row.best.mean, row.best_step, row.train.mean) == (2.5, 2.0, 20, 1.0)


def test_where_nothing_is_evaluated_training_losses_are_compared_and_named_so(tmp_path: Path) -> None:
    folder = made_sweep(tmp_path, [job({LR: "1"}, [line(1, 5.0), line(2, 4.0)]), job({LR: "2"}, [line(1, 5.0), line(2, 3.0)])])
    assert [(row["optimizer.lr"], row["final_training_loss"]) for row in leaderboard(folder)] == [("2", "3"), ("1", "4")]
    with open(folder / "leaderboard.csv", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert len(set(header)) == len(header) and {len(line) for line in lines} == {len(header)}
    assert "best training loss" in leaderboard_module.leaderboard_text(folder) and "validation" not in leaderboard_module.leaderboard_text(folder)


def test_a_job_without_evaluation_is_not_ranked_by_its_training_loss_beside_others_that_have_one(tmp_path: Path) -> None:
    folder = made_sweep(tmp_path, [job({LR: "1"}, [line(1, 0.1)]), job({LR: "2"}, falling(2.0))])
    first, second = leaderboard_module.print_leaderboard(folder)
    assert (first.words[LR], second.words[LR], second.best, second.ranked) == ("2", "1", None, False)


def test_jobs_that_differ_only_in_seed_are_one_point_with_mean_deviation_and_count(tmp_path: Path) -> None:
    losses = {"1": 2.0, "2": 2.2, "3": 2.7}
    jobs = [job({"seed": seed, LR: "1e-4"}, falling(loss)) for seed, loss in losses.items()] + [job({LR: "5e-4", "seed": "1"}, falling(2.1))]
    folder = made_sweep(tmp_path, jobs)
    one, many = leaderboard_module.print_leaderboard(folder)
    assert one.words == {LR: "5e-4"} and many.words == {LR: "1e-4"} and many.best
    assert many.best.mean == pytest.approx(2.3) and many.best.deviation == pytest.approx(statistics.stdev(losses.values())) and many.best.n == 3
    rows = leaderboard(folder)
    assert [(row["row"], row["rank"], row["seed"], row["jobs"]) for row in rows] == [
        ("point", "1", "1", "1"),
        ("point", "2", "", "3"),
        ("job", "", "1", "1"),
        ("job", "", "2", "1"),
        ("job", "", "3", "1"),
    ]
    assert "2.3000 ± 0.3606 (3)" in leaderboard_module.leaderboard_text(folder)


def test_a_point_with_a_seed_that_failed_averages_the_others_and_has_no_rank(tmp_path: Path) -> None:
    jobs = [
        job({LR: "1", "seed": "1"}, falling(1.0)),
        job({LR: "1", "seed": "2"}, falling(9.0)[:8], status="failed"),
        job({LR: "2", "seed": "1"}, falling(4.0)),
    ]
    first, second = leaderboard_module.print_leaderboard(made_sweep(tmp_path, jobs, status="failed"))
    assert first.words == {LR: "2"} and second.best and (second.best.mean, second.best.n, second.ranked) == (1.0, 1, False)


def test_a_point_none_of_whose_seeds_is_completed_has_a_mean_only_where_all_stand_at_one_step(tmp_path: Path) -> None:
    seeds = [job({LR: "1", "seed": seed}, falling(2.0, steps=steps), status="interrupted") for seed, steps in (("1", 20), ("2", 40))]
    (apart,) = leaderboard_module.print_leaderboard(made_sweep(tmp_path / "apart", seeds, status="interrupted"))
    assert (apart.final, apart.best, apart.train) == (None, None, None) and apart.tokens
    (level,) = leaderboard_module.print_leaderboard(made_sweep(tmp_path / "level", [{**each, "lines": falling(2.0)} for each in seeds], status="interrupted"))
    assert level.best and level.best.n == 2


def test_a_word_is_one_point_however_its_words_are_ordered(tmp_path: Path) -> None:
    jobs = [job({"a": "1", "b": "2", "seed": "1"}, falling(1.0)), job({"b": "2", "seed": "2", "a": "1"}, falling(2.0))]
    assert len(leaderboard_module.print_leaderboard(made_sweep(tmp_path, jobs))) == 1


def test_time_goes_on_over_attempts_and_lost_steps_are_not_counted(tmp_path: Path) -> None:
    lines = [line(10, 5.0, time=3.0), line(20, 4.0, time=6.0), line(30, 3.0, time=2.5, attempt=3), line(40, 2.0, time=5.0, attempt=3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert [mark.time for mark in read_run_metrics(tmp_path / "metrics.jsonl").train] == [3.0, 6.0, 8.5, 11.0]


def test_time_includes_the_last_evaluation(tmp_path: Path) -> None:
    (row,) = leaderboard_module.print_leaderboard(made_sweep(tmp_path, [job({LR: "1"}, [line(10, 3.0, time=4.0), line(10, 3.0, time=6.0, kind="eval")])]))
    assert row.seconds == 6.0


def test_tokens_per_second_weighs_each_line_by_the_steps_it_stands_for(tmp_path: Path) -> None:
    """Ten steps at 1000 and thirty at 3000 take twice ten units of time for forty steps' worth: 2000."""
    lines = [line(10, 5.0) | {"tokens_per_second": 1000.0}, line(40, 4.0) | {"tokens_per_second": 3000.0}, line(41, 4.0) | {"tokens_per_second": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert read_run_metrics(tmp_path / "metrics.jsonl").tokens_per_second == pytest.approx(2000)


def test_a_job_that_returned_infinity_has_diverged_whatever_its_last_line_says(tmp_path: Path) -> None:
    for status in ("completed", "failed"):
        (row,) = leaderboard_module.print_leaderboard(made_sweep(tmp_path / status, [job({LR: "5"}, falling(2.0), status=status, loss="inf")]))
        assert row.diverged == 1 and not row.ranked and row.final is None


def test_a_job_that_diverged_before_it_evaluated_has_diverged_among_jobs_that_did(tmp_path: Path) -> None:
    jobs = [job({LR: "1"}, falling(2.0)), job({LR: "5"}, [line(1, 9.0), line(2, None)], status="failed", error="not finite", loss="inf")]
    assert "failed, diverged" in leaderboard_module.leaderboard_text(made_sweep(tmp_path, jobs, status="failed"))


def test_losses_come_from_run_json_where_nothing_was_logged(tmp_path: Path) -> None:
    folder = made_sweep(tmp_path, [job({LR: "1"}, [])])
    metrics = {"loss": 3.0, "val_loss": 2.5, "best_val_loss": 2.0, "best_step": 7}
    (folder / f"{LR}=1" / "run.json").write_text(json.dumps({"status": "completed", "step": 9, "metrics": metrics}))
    (row,) = leaderboard_module.print_leaderboard(folder)
    assert row.final and row.best and (row.final.mean, row.best.mean, row.best_step, row.ranked) == (2.5, 2.0, 7, True)


def test_of_a_job_that_runs_by_sweep_json_its_own_record_knows_the_end(tmp_path: Path) -> None:
    """The launcher was killed: nobody has written down how its jobs ended."""
    began, ended, before = "2026-11-21T10:00:00+00:00", "2026-11-21T10:05:00+00:00", "2026-11-21T09:00:00+00:00"
    gone = process_id() | {"start_ticks": 1}
    cases = {
        "a": ({"status": "completed", "ended": ended}, "completed"),
        "b": ({"status": "failed", "error": "no memory", "ended": ended}, "failed"),
        "c": ({"status": "interrupted", "ended": before}, "running"),  # that was the attempt before
        "d": ({"status": "running", **process_id()}, "running"),
        "e": ({"status": "running", **gone}, "interrupted"),
    }
    folder = made_sweep(tmp_path, [job({"x": name}, [], status="running", started=began) for name in cases], status="running")
    for name, (record, _) in cases.items():
        (folder / f"x={name}" / "run.json").write_text(json.dumps(record))
    assert {row.words["x"]: row.status for row in leaderboard_module.print_leaderboard(folder)} == {name: status for name, (_, status) in cases.items()}
    assert "no memory" in leaderboard_module.leaderboard_text(folder)


def test_a_job_finished_by_hand_since_the_sweep_was_stopped_is_completed(tmp_path: Path) -> None:
    stopped, before, since = "2026-11-21T10:00:00+00:00", "2026-11-21T09:00:00+00:00", "2026-11-21T11:00:00+00:00"
    cases = {
        "a": ("interrupted", {"status": "completed", "ended": since}, "completed"),
        "b": ("failed", {"status": "completed", "ended": since}, "completed"),
        "c": ("failed", {"status": "completed", "ended": before}, "failed"),  # it has refused more words since
        "d": ("interrupted", {"status": "running", **process_id()}, "running"),
        "e": ("failed", {"status": "running", **process_id(), "start_ticks": 1}, "failed"),
        "f": ("interrupted", {"status": "interrupted", "ended": before}, "interrupted"),
    }
    jobs = [job({"x": name}, [], status=status, ended=stopped, error="stopped", loss="inf" if name == "b" else None) for name, (status, _, _) in cases.items()]
    folder = made_sweep(tmp_path, jobs, status="interrupted")
    for name, (_, record, _) in cases.items():
        (folder / f"x={name}" / "run.json").write_text(json.dumps({**record, "metrics": {"val_loss": 2.0}}))
    rows = {row.words["x"]: row for row in leaderboard_module.print_leaderboard(folder)}
    assert {name: row.status for name, row in rows.items()} == {name: status for name, (_, _, status) in cases.items()}
    assert rows["b"].ranked and rows["b"].jobs[0].reason == "" and rows["c"].jobs[0].reason == "stopped"


DAMAGE: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "torn": b'{"kind": "train", "step": 1, "loss": 2.0, "tokens": 1, "time": 1.0}\n{"kind": "train", "st',
    "binary": bytes(range(256)) * 40,
    "other types": b'[1]\n"x"\nnull\n{"kind": ["train"], "step": {}}\n{"kind": "train", "step": "7", "loss": "low"}\n{"kind": "train", "step": true}\n',
    "odd numbers": b'{"kind": "eval", "step": 1e999, "loss": NaN}\n{"kind": "train", "step": 3, "loss": 1e999, "tokens": null, "time": -1}\n',
    "huge whole number": b'{"kind": "train", "step": ' + b"9" * 400 + b"}\n" + b'{"kind": "train", "step": ' + b"9" * 5000 + b"}\n",
    "deep": b'{"kind": ' + b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("file", ["metrics.jsonl", "run.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_one_job_harms_neither_the_update_nor_the_others(tmp_path: Path, file: str, damage: str) -> None:
    folder = made_sweep(tmp_path, [job({LR: "1"}, falling(1.0)), job({LR: "2"}, falling(2.0))])
    path, content = folder / f"{LR}=1" / file, DAMAGE[damage]
    path.unlink() if content is None else path.write_bytes(content)
    assert {row["optimizer.lr"] for row in leaderboard(folder)} == {"1", "2"}
    assert "2.0000" in leaderboard_module.leaderboard_text(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"jobs": 3, "swept": [], "overrides": null}', b'{"jobs": [1, {}, {"name": 5, "overrides": [], "attempt": "x"}]}']
)
def test_a_damaged_sweep_json_is_no_error_either(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sweep.json").write_bytes(content)
    leaderboard_module.update_report(tmp_path)
    assert "continue with" in leaderboard_module.leaderboard_text(tmp_path)


def test_a_job_whose_name_leads_out_of_the_sweep_is_not_followed(tmp_path: Path) -> None:
    made_sweep(tmp_path / "other", [job({LR: "1"}, falling(1.0))])
    names = [f"../other/{LR}=1", f"{tmp_path}/other/{LR}=1", "..", ".", "", "a\0b"]
    folder = made_sweep(tmp_path / "mine", [job({LR: str(i)}, None, name=name) for i, name in enumerate(names, start=1)])
    (folder / "linked").symlink_to(tmp_path / "other" / f"{LR}=1" / "metrics.jsonl")
    assert [row.best for row in leaderboard_module.print_leaderboard(folder)] == [None] * 6


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    folder = made_sweep(tmp_path, [job({LR: "1"}, falling(1.0))])
    path = folder / f"{LR}=1" / "metrics.jsonl"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(path)
    assert leaderboard_module.print_leaderboard(folder)[0].best is None


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-x", "@SUM(A1)", "\t=1", "  =1", "-2+3"])
def test_a_spreadsheet_runs_no_cell(tmp_path: Path, text: str) -> None:
    folder = made_sweep(tmp_path, [job({"data.path": text, text: "v"}, falling(1.0), status="failed", error=text, name="a")], status="failed")
    rows = list(csv.reader(io.StringIO((leaderboard_module.update_report(folder), folder / "leaderboard.csv")[1].read_text())))
    cells = [cell for row in rows for cell in row]
    assert sum(text.strip() in cell for cell in cells) == 3
    assert not [cell for cell in cells if cell.lstrip().startswith(("=", "+", "-", "@"))]


def test_numbers_stay_numbers_in_the_table(tmp_path: Path) -> None:
    (row,) = leaderboard(made_sweep(tmp_path, [job({LR: "-1e-4", "x": "+0.5"}, falling(-0.25))]))
    assert (row[LR], row["x"], float(row["best_validation_loss"]), row["tokens"], row["seconds"]) == ("-1e-4", "+0.5", -0.25, "4000", "4")


def test_the_best_again_is_what_its_folder_was_started_with(tmp_path: Path) -> None:
    words = ("data.path=/my data/it's.jsonl", "sweep.zip=[optimizer.lr,seed]", "hydra.sweep.dir=/x", "hydra/launcher=local", "train.max_steps=5")
    folder = made_sweep(tmp_path, [job({LR: "1"}, falling(1.0)), job({LR: "2"}, falling(2.0))], words=words)
    again = "python runner/train.py 'data.path=/my data/it'\"'\"'s.jsonl' train.max_steps=5 optimizer.lr=1"
    assert f"the best again: {again}\n" in f"{leaderboard_module.leaderboard_text(folder)}\n"
    (folder / f"{LR}=1" / ".hydra").mkdir()
    (folder / f"{LR}=1" / ".hydra" / "overrides.yaml").write_text("- train.max_steps=20\n- optimizer.lr=1\n- hydra.run.dir=/x\n")  # sweep.match_budget has spoken
    assert "the best again: python runner/train.py train.max_steps=20 optimizer.lr=1\n" in f"{leaderboard_module.leaderboard_text(folder)}\n"


def test_the_terminal_is_aligned_and_cannot_be_rewritten_by_a_job(tmp_path: Path) -> None:
    jobs = [
        job({LR: "1e-4", "x": "long value"}, falling(1.0)),
        job({LR: "5", "x": "\x1b[2J"}, falling(2.0), status="failed", error="bad\x1b]0;\x07 \u202eend", name="b"),
    ]
    text = leaderboard_module.leaderboard_text(made_sweep(tmp_path, jobs, status="failed"))
    assert "\x1b" not in text and "\u202e" not in text and "continue with: python runner/train.py resume=" in text
    table = text.split("\n\n")[1].splitlines()
    assert len({line.index(word) for line, word in zip(table, ("status", "completed", "failed"), strict=True)}) == 1


def test_a_seed_alone_is_one_point(tmp_path: Path) -> None:
    folder = made_sweep(tmp_path, [job({"seed": seed}, falling(loss)) for seed, loss in (("1", 1.0), ("2", 2.0))])
    (row,) = leaderboard_module.print_leaderboard(folder)
    assert row.words == {} and row.best and row.best.mean == 1.5
    assert "1.  2 seeds" in leaderboard_module.leaderboard_text(folder) and leaderboard(folder)[0]["rank"] == "1"


def test_the_page_of_200_jobs_stays_small(tmp_path: Path) -> None:
    lines = falling(2.0, steps=300, every=10)
    leaderboard_module.update_report(folder := made_sweep(tmp_path, [job({LR: str(i), "train.accumulation_steps": str(i % 4)}, lines) for i in range(200)]))
    assert (folder / "report.html").stat().st_size < 4 << 20


def test_readers_find_whole_files_while_they_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_sweep(tmp_path, [job({LR: "1"}, falling(1.0))])
    leaderboard_module.update_report(folder)
    before = (folder / "report.html").read_bytes()
    monkeypatch.setattr("common.filesystem.fs.rename", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        leaderboard_module.update_report(folder)
    assert (folder / "report.html").read_bytes() == before and not list(folder.glob(".tmp*"))


def test_find_takes_a_folder_anything_in_it_and_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaderboard_module, "REPO_ROOT", tmp_path)
    with pytest.raises(ValueError, match="there is no sweep yet"):
        leaderboard_module.resolve_sweep("last")
    for age, name in ((30, "2026-01-02/10-00-00"), (10, "2026-01-01/10-00-00")):
        made_sweep(tmp_path / "outputs" / "multirun" / name, [job({LR: "1"}, falling(1.0))])
        os.utime(tmp_path / "outputs" / "multirun" / name / "sweep.json", (time.time() - age,) * 2)
    newest = tmp_path / "outputs" / "multirun" / "2026-01-01" / "10-00-00"
    assert leaderboard_module.resolve_sweep("last") == newest
    assert leaderboard_module.resolve_sweep(str(newest / f"{LR}=1" / "metrics.jsonl")) == newest
    for name, what in (("nowhere", "no such file"), (str(tmp_path), "no sweep here")):
        with pytest.raises(ValueError, match=what):
            leaderboard_module.resolve_sweep(name)


def test_report_prints_the_table_and_says_where_the_page_is(program, tmp_path: Path) -> None:
    folder = made_sweep(tmp_path / "a sweep, it's", [job({LR: "1"}, falling(1.0)), job({LR: "2"}, falling(2.0))])
    done = program(f"sweep={folder}", command="report.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert leaderboard_module.leaderboard_text(folder) in done.stdout and f"page: {folder}/report.html" in done.stdout
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["leaderboard.csv", "report.html", "sweep.json"]
    shutil.rmtree(folder)
    refused = program(f"sweep={folder}", command="report.py")
    assert refused.returncode == 2 and refused.stderr.startswith("error: there is no such file or folder\n")
    help_page = program("--help", command="report.py")
    assert "sweep=..." in help_page.stdout and "python runner/report.py sweep=last" in help_page.stdout


def test_a_spread_of_one_has_no_deviation() -> None:
    only = results.JobResult("a", {}, "completed", final={"training": 2.0}, best={"training": (2.0, 1.0)})
    assert aggregate.aggregate_row({}, [only], "training").final == aggregate.MeanStd(2.0, None, 1)


def launched(run: Path, *launches: str) -> None:
    """The words of each launch of a run, as its .hydra/ keeps them."""
    for number, words in enumerate(launches, start=1):
        place = run / ".hydra" / ("" if number == len(launches) else f"history/{number - 1:03d}")
        place.mkdir(parents=True, exist_ok=True)
        (place / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words.split()))


def test_a_job_continued_by_hand_with_other_words_is_marked_wherever_it_stands(tmp_path: Path) -> None:
    folder = made_sweep(tmp_path, [job({LR: "1"}, falling(1.0)), job({LR: "2"}, falling(2.0))])
    launched(folder / f"{LR}=1", f"train.max_steps=20 {LR}=1", f"{LR}=1 train.max_steps=60", f"{LR}=1 train.max_steps=60 optimizer.weight_decay=0.2")
    launched(folder / f"{LR}=2", f"train.max_steps=20 {LR}=2")
    words = "train.max_steps=60 optimizer.weight_decay=0.2"
    first, second = leaderboard(folder)
    assert (first["continued_with"], second["continued_with"], first["rank"]) == (words, "", "1")
    text = leaderboard_module.leaderboard_text(folder)
    assert text.count("completed, continued by hand") == 1 and f"{LR}=1: completed, continued with {words}" in text
    assert f"the best again, continued with {words}: python" in text
    page = (folder / "report.html").read_text()
    assert f"The best job again ({LR}=1, continued with {words})" in page and page.count(f"continued with {words}") == 2


def test_a_job_whose_data_had_changed_when_it_began_is_marked_wherever_it_stands(tmp_path: Path) -> None:
    """As after `resume=SWEEP seed=3` on a file that is shorter by then. Other data by other words, and rows that are drawn by seed, are meant."""

    def told(path: str, seed: str, print_: str, rows: int, drawn: float = 0.0) -> None:
        run = folder / f"data.path={path},seed={seed}"
        record = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(record | {"fingerprints": {"data": print_}, "data": [{"read": rows, "kept": rows}]}))
        (run / ".hydra").mkdir()
        (run / ".hydra" / "config.yaml").write_text(f"data: {{system_prob: {drawn}, empty_think_prob: 0.0}}\n")

    words = [{"data.path": path, "seed": seed} for path in ("a", "b") for seed in "1234"]
    folder = made_sweep(tmp_path, [job(each, falling(1.0 + place)) for place, each in enumerate(words)])
    for seed, print_, rows in (("1", "x", 9), ("2", "x", 9), ("3", "y", 9), ("4", "z", 5)):
        told("a", seed, print_, rows)
        told("b", seed, print_ + seed, rows, drawn=0.2)
    other = {row["folder"]: row["other_data_than"] for row in leaderboard(folder) if row["row"] == "job"}
    assert {name: than for name, than in other.items() if than} == {
        "data.path=a,seed=3": "data.path=a,seed=1",
        "data.path=a,seed=4": "data.path=a,seed=1",
        "data.path=b,seed=4": "data.path=b,seed=1",
    }
    text, page = leaderboard_module.leaderboard_text(folder), (folder / "report.html").read_text()
    assert text.count("completed, other data") == 5 and "data.path=a seed=4: completed, trained on other data than data.path=a,seed=1" in text
    assert "completed, other data" in page and "trained on other rows" in page


def test_words_of_the_sweep_are_no_mark(tmp_path: Path) -> None:
    """`resume=SWEEP train.max_steps=80` gives a job its share of them, and sweep.json says which; a number tried by hand in between counts."""
    given = ["train.max_steps=20", "train.max_steps=30"]
    jobs = [job({LR: str(number), "seed": "1"}, falling(1.0 + number), applied_overrides=given) for number in (1, 2)] + [job({LR: "1", "seed": "2"}, falling(1.0))]
    folder = made_sweep(tmp_path, jobs)
    launched(folder / f"{LR}=1,seed=1", "train.max_steps=10", "train.max_steps=20", "train.max_steps=25", "train.max_steps=30")
    launched(folder / f"{LR}=2,seed=1", "train.max_steps=10", "train.max_steps=20", "train.max_steps=30")
    (folder / f"{LR}=1,seed=2" / ".hydra" / "history" / "000").mkdir(parents=True)
    (folder / f"{LR}=1,seed=2" / ".hydra" / "overrides.yaml").write_text("- train.max_steps=10\n")  # its first words are lost
    assert [row["continued_with"] for row in leaderboard(folder)] == ["seed=1: train.max_steps=25", "train.max_steps=25", "", ""]
