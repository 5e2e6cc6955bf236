"""The verdict of a sweep: the winner, ties inside the spread over seeds, edges of the range, and commands that can be
typed.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from sweep_fixtures import job, training, write_sweep

from runner.reporting.leaderboard import describe_sweep_end, leaderboard_text, update_report
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.statistics import MeanStd, difference_interval, mean_interval, t_quantile
from runner.reporting.verdict import SweepVerdict, next_value

LR, ACC = "optimizer.lr", "train.accumulation_steps"


def verdict_of(
    folder: Path,
    losses: dict[str, list[float]],
    key: str = LR,
    rows: int = 10,
    trunk: int | None = None,
    **fields: object,
) -> SweepVerdict:
    """The verdict of a sweep with one point per value, and a job per seed where there are several losses."""
    jobs = []
    for value, seeds in losses.items():
        for seed, loss in enumerate(seeds):
            run = {
                "metrics": {"val_loss": loss},
                "export": {"weights": "best", "step": 40, "loss": loss},
                "evaluation": {"on": "validation", "rows": rows},
                "branched_from": trunk and {"run": "/runs/trunk", "step": trunk},
            }
            jobs.append(job({key: value} | ({"seed": str(seed)} if len(seeds) > 1 else {}), training(loss), run=run))
    return SweepVerdict(read_sweep_results(write_sweep(folder, jobs, **fields)))


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227), (10_000, 1.96020)]
)
def test_t_quantile_equals_tables(degrees: float, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, rel=1e-5)


def test_intervals_equal_a_calculation_by_hand() -> None:
    first, second = MeanStd(2.0, 0.1, 4), MeanStd(2.5, 0.3, 4)
    assert mean_interval(first) == pytest.approx((2 - 3.18245 * 0.05, 2 + 3.18245 * 0.05), rel=1e-4)
    interval = difference_interval(first, second)  # Welch: 3.66 degrees of freedom, rounded down
    assert (
        interval is not None
        and interval[0] < 0.5 < interval[1]
        and interval[1] - interval[0] == pytest.approx(2 * 0.15811 * t_quantile(3.6), rel=1e-4)
    )
    assert mean_interval(MeanStd(2.0, None, 1)) is None and difference_interval(first, MeanStd(2.0, None, 1)) is None


def test_verdict_calls_a_difference_inside_the_spread_no_winner(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, {"1e-4": [2.0, 2.2, 2.1], "5e-4": [2.05, 2.25, 2.15], "1e-3": [4.0, 4.2, 4.1]})
    assert [row.overrides[LR] for row in verdict.ties] == ["5e-4"]
    assert verdict.certainty.startswith(
        "no clear winner: 1 other point (optimizer.lr=5e-4) does not differ from the best at 95 % over 3 seeds"
    )


def test_points_tied_with_the_best_share_rank_1_and_have_no_edge(tmp_path: Path) -> None:
    losses = {"1e-4": [2.0, 2.2, 2.1], "5e-4": [2.05, 2.25, 2.15], "1e-3": [4.0, 4.2, 4.1]}
    verdict = verdict_of(tmp_path, losses)
    assert [row.rank for row in read_sweep_results(tmp_path).rows] == [1, 1, 3]
    assert verdict.edges == [] and not verdict.is_sure and verdict.judged_on == "10 validation rows, 3 seeds per point"
    update_report(tmp_path)
    table = list(csv.DictReader((tmp_path / "leaderboard.csv").read_text().splitlines()))
    points = [(row["rank"], row["jobs"], row["evaluation_rows"]) for row in table if row["row"] == "point"]
    assert points == [("1", "3", "10"), ("1", "3", "10"), ("3", "3", "10")]
    assert "Judged on 10 validation rows, 3 seeds per point." in (tmp_path / "report.html").read_text()
    assert "(10 validation rows, 3 seeds per point)" in leaderboard_text(tmp_path)
    end, event = describe_sweep_end(tmp_path)
    assert "judged on" in end and (event["told_apart"], event["ties"]) == (False, 1)


def test_points_of_one_seed_are_not_told_apart_from_the_best(tmp_path: Path) -> None:
    losses = {"1e-4": [2.0, 2.1, 2.05], "5e-4": [3.0], "1e-3": [4.0, 4.1, 4.05]}
    verdict = verdict_of(tmp_path, losses)
    assert "better than the 1 of 2 other points with enough seeds at 95 % over 3 seeds" in verdict.certainty
    assert not verdict.is_sure and verdict.judged_on == "10 validation rows, 1 to 3 seeds per point"
    assert "winner " not in describe_sweep_end(tmp_path)[0]
    del losses["5e-4"]
    assert verdict_of(tmp_path / "sure", losses).is_sure
    assert "winner " in describe_sweep_end(tmp_path / "sure")[0]


def test_verdict_names_a_winner_outside_of_the_spread(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, {"1e-4": [3.0, 3.2, 3.1], "5e-4": [2.0, 2.2, 2.1]})
    assert verdict.name == f"{LR}=5e-4" and not verdict.ties
    assert verdict.certainty.startswith(
        "1.0000 below the second best (optimizer.lr=1e-4: 3.1000 ± 0.1000 (3)); better than every other point at 95 %"
    )


def test_verdict_of_one_seed_per_point_says_that_chance_is_not_known(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, {"1e-4": [3.0], "5e-4": [2.0]})
    assert (
        verdict.certainty
        == "1.0000 below the second best (optimizer.lr=1e-4: 3.0000); one seed per point: how much of that is chance is not known"
    )
    assert verdict.repeat == "python runner/train.py optimizer.lr=5e-4 --multirun seed=1,2,3"
    assert (
        verdict_of(tmp_path / "equal", {"1e-4": [2.0], "5e-4": [2.0]}).certainty
        == "no winner: 1 other point has the same loss"
    )
    for step, suffix in ((40, ", that of the trunk: training on made none better"), (30, "")):
        branches = verdict_of(tmp_path / f"branches{step}", {"1e-4": [2.0], "5e-4": [2.0]}, trunk=step)
        assert branches.certainty == f"no winner: 1 other point has the same loss{suffix}"


def test_verdict_of_points_judged_on_few_rows_has_no_winner_anywhere(tmp_path: Path) -> None:
    reason = "the jobs were judged on 1 row: not told apart, at least 10 validation rows are needed"
    verdict = verdict_of(tmp_path, {"1e-4": [3.0], "5e-4": [2.0]}, rows=1)
    assert (verdict.winner, verdict.job, verdict.edges) == (None, None, []) and verdict.certainty.startswith(
        f"no winner: {reason}"
    )
    update_report(tmp_path)
    table = list(csv.DictReader((tmp_path / "leaderboard.csv").read_text().splitlines()))
    assert [(row["rank"], row["loss"], row["evaluation_rows"]) for row in table] == [("", "2", "1"), ("", "3", "1")]
    page, (end, event) = (tmp_path / "report.html").read_text(), describe_sweep_end(tmp_path)
    assert (
        "<h2>No winner</h2>" in page
        and f"Not shown: {reason}" in page
        and "Sorted by the validation loss" in page
        and 'class="effect"' not in page
    )
    assert (
        "no winner: the jobs were judged on 1 row" in end
        and event["winner"] is None
        and "best job:" not in leaderboard_text(tmp_path).replace("no best job:", "")
    )


def test_verdict_without_a_result_says_why(tmp_path: Path) -> None:
    empty = SweepVerdict(
        read_sweep_results(write_sweep(tmp_path, [job({LR: "1"}, None, status="new")], status="running"))
    )
    assert (empty.winner, empty.job, empty.certainty) == (
        None,
        None,
        "no winner: no point has all of its jobs completed and evaluated",
    )


def test_verdict_extends_a_range_where_the_winner_is_at_its_edge(tmp_path: Path) -> None:
    (edge,) = verdict_of(tmp_path / "a", {"1e-4": [3.0], "5e-4": [2.5], "2.5e-3": [2.0]}).edges
    assert (edge.side, edge.value) == ("highest", "2.5e-3") and edge.command.endswith(
        f"resume={tmp_path / 'a'} optimizer.lr=0.0125"
    )
    assert verdict_of(tmp_path / "b", {"1e-4": [3.0], "5e-4": [2.0], "1e-3": [2.5]}).edges == []
    assert verdict_of(tmp_path / "c", {"1": [2.0], "4": [3.0]}, key=ACC).edges == []  # 1/4 is no whole number
    (edge,) = verdict_of(
        tmp_path / "d", {"1": [3.0], "4": [2.0]}, key=ACC, overrides=("sweep.zip=[train.accumulation_steps,x]",)
    ).edges
    assert edge.command == ""  # resume= cannot add one value of a pair


def test_verdict_suggests_no_value_that_the_setting_refuses(tmp_path: Path) -> None:
    losses = {"0.2": [3.0], "0.6": [2.0]}
    verdict_of(tmp_path, losses, key="optimizer.betas")
    for value in losses:
        hydra = tmp_path / f"schedule.min_lr_ratio={value}" / ".hydra"
        hydra.mkdir(parents=True)
        (hydra / "config.yaml").write_text(
            "schedule: {name: cosine, warmup_steps: 0, warmup_ratio: 0.0, min_lr_ratio: 0.1}\n"
        )
    assert verdict_of(tmp_path, losses, key="schedule.min_lr_ratio").edges == []  # 1.8 is above 1
    for path in tmp_path.glob("*/.hydra/config.yaml"):
        path.unlink()
    # without a config nothing can be checked
    assert len(verdict_of(tmp_path, losses, key="schedule.min_lr_ratio").edges) == 1


def test_verdict_trains_the_winner_longer(tmp_path: Path) -> None:
    hydra = tmp_path / f"{LR}=5e-4" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text("train: {max_steps: 40, epochs: 1, patience: 0}\n")
    assert verdict_of(tmp_path, {"1e-4": [3.0], "5e-4": [2.0]}).train_longer.endswith(
        f"resume={tmp_path}/optimizer.lr=5e-4 train.max_steps=80"
    )
    # stopped early: a resume would end at once
    (hydra / "config.yaml").write_text("train: {max_steps: 90, epochs: 1, patience: 2}\n")
    assert verdict_of(tmp_path, {"1e-4": [3.0], "5e-4": [2.0]}).train_longer == ""


@pytest.mark.parametrize(
    ("edge", "neighbour", "is_whole", "expected"),
    [
        (4, 1, True, 16),
        (1, 4, True, None),
        (64, 32, True, 128),
        (0.0, 0.1, False, None),
        (0.1, 0.0, False, 0.2),
        (1e-3, 5e-4, False, 2e-3),
        (0.9, 0.8, False, 1),
        (1e-2, 100, False, 1e-3),  # four powers of ten apart: one step of ten, no 1e-06
        (1000, 1, True, 10_000),
        (-1e-2, -100, False, -1e-3),
    ],
)
def test_next_value_continues_ratios_and_differences(
    edge: float, neighbour: float, is_whole: bool, expected: float | None
) -> None:
    assert next_value(edge, neighbour, is_whole) == (None if expected is None else pytest.approx(expected))


def test_commands_of_a_sweep_leave_out_overrides_of_code_or_a_hub(tmp_path: Path) -> None:
    stored = (
        "plugins=[/evil/code.py]",
        "+hydra.searchpath=[file:///evil]",
        "init_from=evil/base",
        "++model.path=hub:evil/x",
        "data.path=[a.txt,hub:evil/d]",
        "run.name=mine",
    )
    folder = write_sweep(
        tmp_path, [job({LR: "1e-4"}, training(3.0)), job({LR: "5e-4"}, training(2.0))], overrides=stored
    )
    sweep = read_sweep_results(folder)
    for each in sweep.jobs:
        assert sweep.job_command(each) == f"python runner/train.py run.name=mine {LR}={each.swept[LR]}"
        assert "plugins, hydra.searchpath, init_from, model.path, data.path" in sweep.command_note(each)
    assert "evil" not in leaderboard_text(folder)
    safe = read_sweep_results(
        write_sweep(tmp_path / "safe", [job({LR: "1e-4"}, training(3.0))], overrides=("run.name=mine",))
    )
    assert safe.command_note(safe.jobs[0]) == ""


def test_commands_of_a_sweep_name_the_options_of_a_users_folder(tmp_path: Path) -> None:
    stored = ("stage=sft.yaml", "tracker=null", "experiment=mine")
    sweep = read_sweep_results(write_sweep(tmp_path, [job({LR: "1e-4"}, training(3.0))], overrides=stored))
    assert sweep.command_note(sweep.jobs[0]) == "add the --config-dir or plugin that has experiment=mine"
