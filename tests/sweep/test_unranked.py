"""What a sweep says before its first job: settings by which jobs cannot be ranked, too few validation rows, other data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import read_sweep

from common.errors import UserError
from runner.config.compose import compose_config
from runner.sweep.comparability import print_unranked, too_few_rows, wider_split

NOTES = {
    "tokens": (["stage=sft"], "data.max_length", ("128", "256"), "data.max_length are judged by different tokens"),
    "split texts": (["stage=pretrain"], "data.max_length", ("128", "256"), ""),
    "loss": (["stage=dpo"], "stage.beta", ("0.1", "0.2"), "stage.beta are judged by different losses"),
    "labels": (["stage=sft"], "data.loss_on", ("assistant", "all"), "data.loss_on are judged by different losses"),
    "rows": ([], "data.val_fraction", ("0.3", "0.2"), "data.val_fraction are judged by other rows"),
    "lr": ([], "optimizer.lr", ("0.1", "0.2"), ""),
    "data": (["data.val_path=val.jsonl"], "data.weights", ("null", "[1]"), ""),
}


@pytest.mark.parametrize("name", NOTES)
def test_sweep_names_settings_by_which_jobs_are_not_ranked(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, key, values, note = NOTES[name]
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", 60)
    write_rows(tmp_path / "val.jsonl", 60)
    data = f"data.path={tmp_path / 'rows.jsonl'}" if "stage=" not in "".join(shared) else "data.on_bad_row=skip"
    print_unranked([compose_config([data, *shared, f"{key}={value}"]) for value in values])
    assert [line for line in capsys.readouterr().err.splitlines() if "ranked" in line] == (
        [f"jobs that differ in {note}{', where a row is longer' * (name == 'tokens')}: they will not be ranked"]
        if note
        else []
    )


def write_rows(file: Path, count: int) -> None:
    file.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(count)))


@pytest.mark.parametrize(
    ("rows", "typed", "expected"),
    [
        (40, [], "there are 8 validation rows, and 10 are needed"),
        (5, [], "there is 1 validation row, and 10 are needed"),
        (50, [], ""),
        (50, ["data.val_fraction=0.1"], "there are 5 validation rows"),
        (100, ["data.val_fraction=0.1"], ""),
        (50, ["data.val_fraction=0"], ""),
        (50, ["train.eval_every=0"], ""),
        (4, ["data.val_path={val}"], ""),
    ],
)
def test_sweep_says_before_it_starts_that_rows_are_too_few(
    rows: int, typed: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_rows(tmp_path / "rows.jsonl", rows)
    write_rows(tmp_path / "val.jsonl", 12)
    overrides = [each.format(val=tmp_path / "val.jsonl") for each in typed]
    config = compose_config([f"data.path={tmp_path / 'rows.jsonl'}", *overrides])
    print_unranked([config, config])
    printed = capsys.readouterr().err
    assert expected in printed and ("will not be ranked" in printed) == bool(expected)
    print_unranked([config])  # one job has no rank anyway
    assert capsys.readouterr().err == ""


def test_sweep_counts_the_rows_that_a_long_text_is_split_into(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a little fox " * 2000)
    data = [f"data.path={tmp_path / 'book.txt'}", "data.max_length=32"]
    assert not too_few_rows([compose_config(data)] * 2)
    assert too_few_rows([compose_config([*data, "data.too_long=truncate"])] * 2) == 1


@pytest.mark.parametrize(
    ("rows", "typed", "split"),
    [
        (20, [], "data.val_fraction=0.5"),
        (42, [], "data.val_fraction=0.25"),
        (49, [], "data.val_fraction=0.23"),
        (19, [], ""),
        (50, [], ""),
        (40, ["data.val_fraction=0.1"], ""),
        (40, ["data.val_path={val}"], ""),
        (40, ["train.eval_every=0"], ""),
    ],
)
def test_sweep_holds_out_as_many_of_few_rows_as_ranks_need(
    rows: int, typed: list[str], split: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", rows)
    write_rows(tmp_path / "val.jsonl", 5)
    data = [f"data.path={tmp_path / 'rows.jsonl'}", *(each.format(val=tmp_path / "val.jsonl") for each in typed)]
    config = compose_config(data)
    assert wider_split([config, config]) == split
    if split:
        assert too_few_rows([config, config]) and not too_few_rows([compose_config([*data, split])] * 2)


@pytest.mark.slow
def test_sweep_of_few_rows_stores_its_split_for_all_jobs(
    sweep: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_rows(tmp_path / "rows.jsonl", 40)
    assert sweep(f"data.path={tmp_path / 'rows.jsonl'}", "optimizer.lr=0.1,0.2") == 0
    printed, state = capsys.readouterr(), read_sweep(tmp_path / "sweep")
    assert "data.val_fraction=0.25 in all jobs: the default split" in printed.err and "ranked" not in printed.err
    assert "data.val_fraction=0.25" in state["overrides"]
    for job in state["jobs"]:
        assert "data.val_fraction=0.25" in (tmp_path / "sweep" / job["name"] / ".hydra" / "overrides.yaml").read_text()


@pytest.mark.parametrize("search", [["hydra/sweeper=halving"], ["hydra/sweeper=optuna", "hydra.sweeper.pruner=median"]])
def test_search_that_stops_jobs_refuses_few_rows_before_the_first(
    search: list[str], sweep: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    typed = [f"data.path={tmp_path / 'rows.jsonl'}", "data.val_fraction=0.1", "train.eval_every=1", "train.max_steps=8"]
    with pytest.raises(UserError, match="jobs cannot be stopped early by their losses: there are 6 validation rows"):
        sweep(*search, *typed, "optimizer.lr=0.1,0.2")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_resume_of_a_sweep_says_first_that_its_data_have_changed(
    finished: Path, resume: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    sha256 = hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()
    for run in finished.glob("*/run.json"):
        data = [{"file": str(tmp_path / "rows.jsonl"), "sha256": sha256}]
        run.write_text(json.dumps(json.loads(run.read_text()) | {"data": data}))
    assert resume("train.accumulation_steps=2") == 0 and "has changed" not in capsys.readouterr().err
    write_rows(tmp_path / "rows.jsonl", 61)
    assert resume("train.accumulation_steps=8") == 0
    printed = capsys.readouterr()
    changed = printed.err.index("rows.jsonl has changed since jobs were trained on it")
    assert "resume: " in printed.err[:changed]
