"""Comparison of runs: its numbers are those of metrics.jsonl, runs that were judged differently have no best one,
hostile text stays text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from report_fixtures import (
    EVALUATION,
    FINGERPRINTS,
    HOSTILE,
    eval_record,
    make_run,
    make_sweep,
    page_data,
    train_record,
)

from common.errors import UserError
from runner.reporting.compare import MAX_COMPARED, compare_page, compare_text, read_comparison
from runner.reporting.runs import expand_sweeps, resolve_runs, split_names
from runner.tracking.bar import cell_width


def test_comparison_draws_the_numbers_of_every_run(tmp_path: Path) -> None:
    first = make_run(
        tmp_path / "a" / "1", [train_record(10, 4.0), train_record(20, 3.0), eval_record(20, 3.1)], name="one"
    )
    second = make_run(tmp_path / "a" / "2", [train_record(10, 5.0), train_record(30, 2.5), eval_record(30, 2.75)])
    runs = page_data(compare_page(read_comparison([first, second])))["runs"]
    assert [run["label"] for run in runs] == ["one", "a/2"]
    assert runs[0]["train"] == {"step": [10, 20], "tokens": 100, "seconds": [1, 2], "loss": [4, 3]}  # tokens per step
    assert runs[1]["eval"] == {"step": [30], "tokens": 100, "seconds": [3], "loss": [2.75]}


def test_comparison_names_the_best_run_of_one_evaluation_only(tmp_path: Path) -> None:
    better = make_run(tmp_path / "better", [train_record(10), eval_record(10, 2.0), eval_record(20, 2.4)])
    worse = make_run(tmp_path / "worse", [train_record(10), eval_record(10, 2.2)])
    comparison = read_comparison([worse, better])
    assert (
        comparison.best_labels == {comparison.runs[1].label}
        and comparison.runs[1].best == (2.0, 10)
        and comparison.runs[1].metrics.eval.newest_loss() == 2.4
    )
    other = make_run(tmp_path / "other", evaluation={**EVALUATION, "data": "e2"})
    comparison = read_comparison([better, other])
    assert not comparison.best_labels and comparison.problem == "the runs were judged with different evaluation rows"
    assert (
        "warning: the evaluation losses cannot be compared: the runs were judged with different evaluation rows"
        in compare_text(comparison)
    )
    assert "No run is called the best" in compare_page(comparison) and "lowest evaluation loss" not in compare_page(
        comparison
    )


def test_comparison_of_runs_judged_on_few_rows_has_no_best_run(tmp_path: Path) -> None:
    few = {**EVALUATION, "rows": 2}
    comparison = read_comparison(
        [make_run(tmp_path / str(loss), [eval_record(10, loss)], evaluation=few) for loss in (2.0, 3.0)]
    )
    assert (
        not comparison.best_labels
        and "judged on 2 rows: not told apart" in compare_text(comparison)
        and "No run is called the best" in compare_page(comparison)
    )
    assert read_comparison([make_run(tmp_path / "alone", evaluation=few)]).problem is None


def test_comparison_names_all_runs_that_are_tied(tmp_path: Path) -> None:
    comparison = read_comparison(
        [
            make_run(tmp_path / name, [eval_record(10, loss)], name=name)
            for name, loss in (("a", 2.0), ("b", 2.0), ("c", 3.0))
        ]
    )
    assert comparison.best_labels == {"a", "b"} and compare_page(comparison).count("lowest evaluation loss</span>") == 2


def test_comparison_with_a_run_whose_evaluation_is_unknown_has_no_best_run(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "known"), make_run(tmp_path / "old", [eval_record(10, 1.0)], evaluation=None)]
    comparison = read_comparison(runs)
    assert not comparison.best_labels and "run.json does not say what was evaluated" in str(comparison.problem)


def test_comparison_says_which_settings_and_data_differ(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "o" / "a", settings={"betas": [0.9, 0.95]}, name="a"),
        make_run(
            tmp_path / "o" / "b", settings={"lr": 0.01}, fingerprints={**FINGERPRINTS, "data": "d2" * 32}, name="b"
        ),
    ]
    config = runs[1] / ".hydra" / "config.yaml"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sweep": {"budget": "30m"}}))
    comparison = read_comparison(runs)
    differing = dict(comparison.differing)
    assert "sweep.budget" not in differing, "what a sweep may spend is no difference between two trainings"
    assert differing["optimizer.lr"] == ["0.001", "0.01"] and differing["optimizer.betas"] == ["[0.9, 0.95]", "–"]
    assert (
        differing["training data (fingerprint)"] == ["d1", "d2d2d2d2d2"]
        and "run.name" not in differing
        and "optimizer.name" not in differing
    )
    assert any(note.startswith("the training data differs (a; b)") for note in comparison.notes)


def test_comparison_warns_of_other_tokenizers_and_unfinished_runs(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", fingerprints={**FINGERPRINTS, "tokenizer": "t2"}, status="failed", outcome="diverged"),
    ]
    notes = " ".join(read_comparison(runs).notes)
    assert "losses per token of different tokens cannot be compared" in notes and "(diverged)" in notes


def test_comparison_leaves_gaps_and_adds_the_time_of_attempts(tmp_path: Path) -> None:
    records = [
        train_record(10),
        {**train_record(20), "loss": None, "nonfinite": ["loss"]},
        train_record(30, time=0.5, attempt=2),
    ]
    run = make_run(tmp_path / "run", records)
    comparison = read_comparison([run, make_run(tmp_path / "other")])
    drawn = page_data(compare_page(comparison))["runs"][0]["train"]
    assert drawn["loss"][1] is None and drawn["seconds"] == [1, 2, 2.5]
    diverged = make_run(tmp_path / "diverged", [{**train_record(10), "loss": None}])
    assert "not finite" in compare_text(read_comparison([diverged, run]))


def test_comparison_takes_a_sweep_for_its_jobs(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "multirun" / "s", {"seed=2": {}, "seed=1": {}})
    alone = make_run(tmp_path / "alone")
    assert expand_sweeps(resolve_runs(f"{sweep},{alone},{sweep / 'seed=1'}")) == [
        sweep / "seed=2",
        sweep / "seed=1",
        alone,
    ]


def test_names_with_commas_are_paths_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1,seed=2").mkdir()
    assert (
        split_names("lr=1,seed=2,other") == ["lr=1,seed=2", "other"]
        and split_names("[a, b]") == ["a", "b"]
        and split_names("a,b") == ["a", "b"]
    )


def test_labels_of_runs_are_unique(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / day / "10-00-00", name=name) for day, name in (("d1", "same"), ("d2", "same"), ("d3", ""))
    ]
    assert [run.label for run in read_comparison(folders).runs] == [
        "same (d1/10-00-00)",
        "same (d2/10-00-00)",
        "d3/10-00-00",
    ]


def test_comparison_runs_only_its_own_scripts_and_escapes_every_text(tmp_path: Path) -> None:
    hostile = {
        "name": HOSTILE,
        "tags": [HOSTILE, 3],
        "note": HOSTILE,
        "error": HOSTILE,
        "stage": HOSTILE,
        "host": HOSTILE,
        "versions": {"torch": HOSTILE},
    }
    run = make_run(tmp_path / "a", settings={"name": HOSTILE, HOSTILE: 1}, **hostile)
    comparison = read_comparison([run, make_run(tmp_path / "b")])
    page, text = compare_page(comparison), compare_text(comparison)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    assert len(scripts) == 3 and f"script-src {hashes}" in page and "default-src 'none'" in page
    assert (
        "<img" not in page and "alert(1)</script>" not in page and re.search(r"""(src|href)=["'](?!#)""", page) is None
    )
    assert all(character not in page + text for character in ("\x1b", "\u202e"))


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", ".hydra/config.yaml"])
@pytest.mark.parametrize(
    "content",
    [
        None,
        b"\xff\x00{[",
        b"[1, 2]\n{}\n",
        b'{"status": "completed", "metrics": 3, "evaluation": [], "tags": 1, "fingerprints": 2}',
    ],
)
def test_comparison_is_written_whatever_is_missing_or_damaged(tmp_path: Path, name: str, content: bytes | None) -> None:
    run = make_run(tmp_path / "a")
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(content)
    comparison = read_comparison([run, make_run(tmp_path / "b")])
    assert compare_page(comparison).endswith("</html>") and compare_text(comparison)


@pytest.mark.slow
def test_comparison_of_many_long_runs_is_small_and_keeps_extremes(tmp_path: Path) -> None:
    long = make_run(tmp_path / "long", [train_record(step, 9.0 if step == 7_777 else 2.0) for step in range(1, 8_001)])
    page = compare_page(read_comparison([long] * 60))
    assert len(page) < 1 << 20 and 9 in page_data(page)["runs"][59]["train"]["loss"]
    with pytest.raises(UserError, match="at most 400"):
        read_comparison([long] * (MAX_COMPARED + 1))


def test_settings_that_are_read_again_follow_the_file(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    assert "optimizer.lr" not in dict(read_comparison(runs).differing)
    (runs[0] / ".hydra" / "config.yaml").write_text(json.dumps({"optimizer": {"lr": 0.5}}))
    assert dict(read_comparison(runs).differing)["optimizer.lr"] == ["0.5", "0.001"]


def test_comparison_names_the_precision_that_auto_was(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, attempts=[{"precision": name}]) for name in ("bf16", "fp32")]
    for run in runs:
        (run / ".hydra" / "config.yaml").write_text(json.dumps({"precision": {"name": "auto"}}))
    assert dict(read_comparison(runs).differing)["precision.name"] == ["bf16", "fp32"]


def test_comparison_on_a_terminal_aligns_wide_characters(tmp_path: Path) -> None:
    lines = compare_text(
        read_comparison([make_run(tmp_path / "a", name="模型一"), make_run(tmp_path / "b", name="plain")])
    ).splitlines()
    assert lines[1].startswith("* 模型一  completed") and lines[2].startswith("* plain   completed")


def test_comparison_on_a_terminal_shortens_wide_characters_by_cells(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", name="模" * 39), make_run(tmp_path / "b", name="plain")]
    assert all(
        cell_width(line.split("  completed")[0]) <= 40 for line in compare_text(read_comparison(runs)).splitlines()[1:3]
    )
