"""Evaluations in run.json and in leaderboards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.inference import evaluate
from runner.inference.evaluate import (
    MAX_LABEL,
    current_evaluations,
    evaluation_label,
    headline,
    record_results,
    results_of,
)
from runner.reporting.columns import evaluation_columns
from runner.reporting.sweep_results import JobResult
from runner.run_dir.metadata import RunMetadata

HELLASWAG: dict[str, Any] = {
    "task": "hellaswag",
    "shots": 0,
    "limit": None,
    "chat_template": False,
    "n": 10,
    "weights": "best",
    "step": 4,
}
HELLASWAG["results"] = {"acc": 0.3, "acc_stderr": 0.01, "acc_norm": 0.4}
PERPLEXITY = {
    "metric": "perplexity",
    "data": "rows/val.jsonl",
    "weights": "best",
    "step": 4,
    "loss": 2.0,
    "perplexity": 7.4,
    "loss_tokens": 9,
}


def write_run(folder: Path) -> Path:
    metadata = RunMetadata.open(folder)
    metadata.update(
        status="completed", outcome="completed", attempt=1, export={"weights": "best", "step": 4, "loss": 2.0}
    )
    metadata.close()
    return folder


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run.json").read_text())["evaluations"]


def test_evaluations_of_a_run_are_replaced_by_repetitions_and_kept_otherwise(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    again, five = HELLASWAG | {"results": {"acc": 0.5}}, HELLASWAG | {"shots": 5}
    rounded = PERPLEXITY | {"dtype": "bf16"}
    for record in (HELLASWAG, PERPLEXITY, five, again, rounded):
        record_results(run, record)
    assert evaluations(run) == [PERPLEXITY, five, again, rounded]
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 5
    assert RunMetadata.read(run)["status"] == "completed"


def test_evaluations_of_a_running_run_are_recorded_beside_it_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    running = RunMetadata.open(run, resume=True)
    record_results(run, PERPLEXITY)
    running.close()
    assert (
        "not in run.json" in capsys.readouterr().err and not evaluations(run) and (run / "evaluations.jsonl").is_file()
    )


def test_evaluation_that_cannot_be_recorded_is_printed_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(evaluate, "open_append", denied)  # chmod has no effect for root
    record_results(write_run(tmp_path / "run"), PERPLEXITY)
    out, err = capsys.readouterr()
    assert json.loads(out) == PERPLEXITY and "not recorded" in err and "Permission denied" in err


def test_evaluations_of_earlier_weights_are_not_current() -> None:
    metadata = {
        "export": {"weights": "best", "step": 8},
        "evaluations": [HELLASWAG, PERPLEXITY | {"step": 8}, "damaged"],
    }
    assert [record["metric"] for record in current_evaluations(metadata)] == ["perplexity"]
    assert current_evaluations({"evaluations": 3}) == current_evaluations({}) == []


def test_evaluation_columns_have_one_headline_and_every_number_in_the_csv() -> None:
    jobs = [
        JobResult("a", {}, evaluations=[HELLASWAG, PERPLEXITY, {"metric": "x", "data": "d", "x": float("nan")}]),
        JobResult("b", {}),
    ]
    columns = evaluation_columns(jobs)
    assert [column.title for column in columns if column.title] == ["hellaswag acc_norm", "perplexity val.jsonl"]
    assert {column.key for column in columns} == {
        *(f"hellaswag/{name}" for name in ("acc", "acc_stderr", "acc_norm")),
        *(f"perplexity val.jsonl/{name}" for name in ("perplexity", "loss")),
    }


def test_evaluations_of_a_job_are_read_once_not_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    job, reads = JobResult("a", {}, evaluations=[HELLASWAG | {"results": {f"m{i}": float(i) for i in range(50)}}]), []
    monkeypatch.setattr("runner.reporting.columns.results_of", lambda record: (reads.append(1), results_of(record))[1])
    row: Any = SimpleNamespace(jobs=[job])
    found = {column.key: column.get(row) for column in evaluation_columns([job])}
    assert len(reads) == 1 and len(found) == 50, "a file of 16 MiB with a million numbers would never be shown"
    assert found["hellaswag/m7"].mean == 7 and len(evaluation_label({"task": "x" * 10**6})) == MAX_LABEL


def test_evaluation_labels_name_what_makes_results_differ() -> None:
    assert (
        evaluation_label(HELLASWAG | {"shots": 5, "limit": 100, "chat_template": True})
        == "hellaswag 5-shot chat, first 100"
    )
    assert evaluation_label(PERPLEXITY) == "perplexity val.jsonl"
    assert (
        headline(
            {
                "exact_match,strict-match_stderr": 1.0,
                "exact_match,strict-match": 0.1,
                "exact_match,flexible-extract": 0.2,
            }
        )
        == "exact_match,strict-match"
    )
    assert headline({"acc_stderr": 0.1, "other": 3.0}) == "other" and headline({}) is None
