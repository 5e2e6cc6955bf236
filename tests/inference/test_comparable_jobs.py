"""The best job of a sweep: by the mean of its point, among completed points, and only where all were judged alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from runner.run_dir.best_job import find_best_job

EVALUATION = {
    "on": "validation",
    "rows": 80,
    "tokens": 90,
    "data": "a",
    "tokenizer": "t",
    "loss": {"data.loss_on": "assistant"},
}


def write_sweep(folder: Path, *jobs: tuple[str, str, float | None, dict[str, Any]]) -> Path:
    """`jobs`: (lr, seed, evaluation loss of the exported weights or None if unfinished, changes of EVALUATION)."""
    names = []
    for lr, seed, loss, changes in jobs:
        names.append(name := f"lr={lr},seed={seed}")
        (folder / name / "model").mkdir(parents=True)
        export = {"weights": "best", "step": 4, "loss": loss}
        fields = {
            "status": "completed",
            "outcome": "completed",
            "metrics": {"loss": 1.0},
            "export": export,
            "evaluation": EVALUATION | changes,
        }
        (folder / name / "run.json").write_text(
            json.dumps(fields | ({"status": "failed", "export": None} if loss is None else {}))
        )
    content = [
        {"name": name, "overrides": {"optimizer.lr": lr, "seed": seed}}
        for name, (lr, seed, _, _) in zip(names, jobs, strict=True)
    ]
    (folder / "sweep.json").write_text(json.dumps({"jobs": content}))
    return folder


def test_best_job_is_of_the_point_with_the_lowest_mean(tmp_path: Path) -> None:
    sweep = write_sweep(
        tmp_path,
        ("1", "0", 2.0, {}),
        ("1", "1", 1.8, {}),
        ("2", "0", 1.0, {}),
        ("2", "1", 3.5, {}),
        ("3", "0", 2.5, {}),
        ("3", "1", 2.5, {}),
    )
    assert find_best_job(sweep).name == "lr=1,seed=1"


def test_best_job_that_is_a_link_is_refused(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", ("1", "0", 2.0, {}))
    (sweep / "lr=1,seed=0").rename(tmp_path / "outside")
    (sweep / "lr=1,seed=0").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="this is a link"):
        find_best_job(sweep)


def test_best_job_is_of_a_point_whose_seeds_are_all_completed(tmp_path: Path) -> None:
    assert (
        find_best_job(write_sweep(tmp_path, ("1", "0", 2.0, {}), ("2", "0", 1.0, {}), ("2", "1", None, {}))).name
        == "lr=1,seed=0"
    )


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"data": "b"}, "different evaluation rows"),
        ({"on": "training"}, "rows of another kind"),
        ({"tokenizer": "u"}, "different tokenizers"),
        ({"loss": {"data.loss_on": "all"}}, "data.loss_on differs"),
        ({"tokens": 50}, "data.max_length cuts the evaluation rows"),
    ],
)
def test_best_job_needs_jobs_that_were_judged_alike(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        find_best_job(write_sweep(tmp_path, ("1", "0", 2.0, {}), ("2", "0", 1.0, change)))


@pytest.mark.parametrize("rows, is_best", [(1, False), (9, False), (10, True)])
def test_best_job_judged_on_few_rows_is_taken_with_a_warning(
    rows: int, is_best: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write_sweep(tmp_path, ("1", "0", 2.0, {"rows": rows}), ("2", "0", 1.0, {"rows": rows}))
    assert find_best_job(sweep).name == "lr=2,seed=0"
    message = capsys.readouterr().err
    assert ("best job lr=2" in message) is is_best and (
        f"judged on {rows} row" in message and "has no best job" in message
    ) is not is_best
