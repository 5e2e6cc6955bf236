"""Rows of the leaderboard from job results: which jobs a mean has, and which rows have a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runner.reporting.sweep_results import JobResult, ResultRow, result_rows
from runner.run_dir.best_job import ModelScore


def job_result(lr: str, seed: str, loss: float, data: str = "a", **fields: Any) -> JobResult:
    losses: dict[str, Any] = {
        "final": {"validation": loss},
        "best": {"validation": (loss, 4.0)},
        "model": ModelScore("best", 4, loss),
    }
    evaluation = {"on": "validation", "data": data, "rows": 80, "tokens": 90, "tokenizer": "t", "loss": {}}
    return JobResult(
        f"{lr}-{seed}",
        {"optimizer.lr": lr, "seed": seed},
        status="completed",
        evaluation=evaluation,
        **losses,
        **fields,
    )


def test_row_score_is_the_mean_of_the_seeds_that_did_not_diverge() -> None:
    row = ResultRow(
        [job_result("1", "0", 2.0), job_result("1", "1", 3.0), job_result("1", "2", 9.0, diverged=True)], "validation"
    )
    assert row.score is not None and (row.score.mean, row.score.n, row.diverged) == (2.5, 2, 1)


def test_rows_have_ranks_only_if_all_were_evaluated_on_the_same_rows() -> None:
    same = result_rows([job_result("1", "0", 2.0), job_result("2", "0", 1.0)], "validation")
    assert [(row.overrides["optimizer.lr"], row.rank) for row in same] == [("2", 1), ("1", 2)]
    assert [
        row.rank for row in result_rows([job_result("1", "0", 2.0), job_result("2", "0", 1.0, data="b")], "validation")
    ] == [None, None]


def test_point_with_a_job_that_still_runs_is_not_completed() -> None:
    jobs = [job_result("1", "0", 2.0), replace(job_result("1", "1", 2.0), status="running")]
    for order in (jobs, jobs[::-1]):
        (row,) = result_rows(order, "validation")
        assert row.status == "running" and row.rank is None


def test_rank_1_of_ties_ends_at_the_first_row_that_differs() -> None:
    """A row of two seeds is compared at a stricter level than a better row of three, and is no tie for that."""
    losses = {"5": [8.10, 8.16, 8.20], "2": [8.54, 8.55, 8.56], "1": [8.66, 8.67]}
    jobs = [job_result(lr, str(seed), loss) for lr, each in losses.items() for seed, loss in enumerate(each)]
    rows = result_rows(jobs, "validation", planned_seeds=5)
    assert [row.differs for row in rows] == [False, True, False]
    assert [row.rank for row in rows] == [1, 2, 3]


def test_seeds_that_change_nothing_tell_no_points_apart() -> None:
    jobs = [job_result(lr, str(seed), float(lr)) for lr in "12" for seed in range(3)]
    assert [row.differs for row in result_rows(jobs, "validation")] == [False, None]
