"""The last lines of a sweep: winner, certainty, ties, and commands that can be typed, in 80 columns."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from sweep_fixtures import job, training, write_sweep

from common.paths import REPO_ROOT
from runner.reporting.leaderboard import describe_sweep_end
from runner.tracking.bar import cell_width

LR = "optimizer.lr"


def end_of(folder: Path) -> tuple[list[str], dict]:
    text, event = describe_sweep_end(folder)
    lines = text.splitlines()
    table = lines[: lines.index("next") if "next" in lines else None]  # arguments of commands are not broken
    assert all(cell_width(line) <= 80 for line in table if "/" not in line), lines
    return lines, event


def row(lines: list[str], label: str) -> str:
    """Return the value of a labelled line with its continuation."""
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{label} "))
    following = [line for line in lines[start + 1 :]]
    more = following[: next((n for n, line in enumerate(following) if not line.startswith("   ")), len(following))]
    return " ".join(" ".join([lines[start].removeprefix(label), *more]).split())


def test_end_names_the_winner_and_that_one_seed_is_not_sure(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [job({LR: "1e-3"}, training(2.5)), job({LR: "1e-2"}, training(2.0))])
    lines, event = end_of(folder)
    assert row(lines, "best") == "optimizer.lr=1e-2, validation loss 2.0000" and "not known" in row(lines, "certainty")
    assert (event["winner"], event["loss"], event["ties"]) == ("optimizer.lr=1e-2", 2.0, 0) and event[
        "certainty"
    ] == row(lines, "certainty")
    assert lines[1].startswith("1.  1e-2") and lines[2].startswith("2.  1e-3")


def test_end_says_ties_over_seeds(tmp_path: Path) -> None:
    jobs = [
        job({LR: lr, "seed": str(seed)}, training(loss + 0.2 * seed))
        for lr, loss in (("1", 2.0), ("2", 2.05))
        for seed in (1, 2, 3)
    ]
    lines, event = end_of(write_sweep(tmp_path, jobs))
    assert (
        event["ties"] == 1
        and row(lines, "certainty").startswith("no clear winner")
        and not [line for line in lines if line.startswith("winner")]
    )
    assert row(lines, "best").startswith("optimizer.lr=1,") and lines[2].endswith("tied with the best")


def test_end_without_a_result_has_the_reasons_and_the_command_to_continue(tmp_path: Path) -> None:
    hostile = job({LR: "1"}, training(2.0), status="failed", error="no memory\x1b[2J\nwarning: fake")
    lines, event = end_of(write_sweep(tmp_path, [hostile], status="failed"))
    text = "\n".join(lines)
    assert "\x1b" not in text and "optimizer.lr=1: failed: no memory" in text and "warning: fake" not in lines
    assert row(lines, "certainty").startswith("no winner") and event["winner"] is None
    assert event["next"][-1][-1].startswith("resume=") and "next" not in lines  # session.py prints that command last


def test_commands_of_the_end_can_be_typed_where_the_sweep_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_sweep(
        tmp_path / "a sweep",
        [
            job({LR: "1"}, training(2.0), status="interrupted"),
            job({LR: "2"}, training(3.0), run={"metrics": {"val_loss": 3.0}, "step": 40}),
        ],
        status="interrupted",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    lines, event = end_of(folder)
    assert event["next"].pop() == [
        sys.executable,
        str(REPO_ROOT / "runner" / "train.py"),
        f"resume={folder.relative_to(tmp_path)}",
    ]
    shown = "\n".join(line.removeprefix("  ") for line in lines[lines.index("next") + 1 :]).replace("\\\n", "")
    assert [shlex.split(line) for line in shown.splitlines() if not line.startswith("#")] == event["next"]


def test_end_shortens_a_long_number_to_its_first_digits(tmp_path: Path) -> None:
    drawn = {LR: "0.00036731839385814114", "optimizer.weight_decay": "0.1", "optimizer.eps": "1e-8"}
    assert end_of(write_sweep(tmp_path, [job(drawn, training(2.0))]))[0][1].split()[1] == "0.0003673"


def test_end_shortens_a_long_integer_to_its_ends(tmp_path: Path) -> None:
    drawn = {"data.seed": "1234567890123456789", "optimizer.weight_decay": "0.1", "optimizer.eps": "1e-8"}
    assert end_of(write_sweep(tmp_path, [job(drawn, training(2.0))]))[0][1].split()[1].endswith("56789")


def test_long_sweeps_show_their_best_ten_points_and_shorten_wide_values(tmp_path: Path) -> None:
    values = [
        {"model": "名" * 50 + str(number), "data.path": "/data/" + "x" * 70, LR: str(number)} for number in range(1, 31)
    ]
    jobs = [job(value, training(float(number)), name=f"job-{number}") for number, value in enumerate(values, start=1)]
    lines, _ = end_of(write_sweep(tmp_path, jobs))
    assert (
        "and 20 more, in leaderboard.csv" in lines
        and lines[10].startswith("10. ")
        and max(map(cell_width, lines[:12])) <= 80
    )
