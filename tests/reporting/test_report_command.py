"""report.py: which page is written where, and which options are refused together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import make_run, make_sweep

from common.errors import UserError
from runner.reporting.command import ReportConfig, print_report


def config(**given: Any) -> ReportConfig:
    return ReportConfig(
        **{"run": None, "sweep": None, "all": False, "root": None, "to": None, "serve": False, "port": 0, **given}
    )


@pytest.mark.parametrize(
    "given",
    [
        {}, {"run": "a", "sweep": "b"}, {"run": "a", "all": True}, {"run": "a", "port": 1}, {"run": "a", "serve": True, "port": 70_000},
        {"run": "a", "root": "b"}, {"all": True, "serve": True, "to": "a.html"}, {"all": True, "to": "a.txt"}, {"all": True, "to": "swanlab"},
    ],
)  # fmt: skip
def test_report_refuses_options_that_contradict(given: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        config(**given)
    assert refused.value.setting and refused.value.fix


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """outputs/ with a run and a sweep of two jobs, whose folder has commas in its name."""
    monkeypatch.setattr("common.paths.REPO_ROOT", tmp_path)
    make_run(tmp_path / "outputs" / "day" / "one", name="one")
    make_sweep(
        tmp_path / "outputs" / "multirun" / "day" / "a,b",
        {"seed=1": {}, "seed=2": {"started": "2026-11-22T10:00:00+00:00"}},
    )
    return tmp_path / "outputs"


def test_report_of_several_runs_is_one_comparison(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(config(run=f"{outputs}/day/one,{outputs}/multirun/day/a,b"))
    printed, page = capsys.readouterr().out, (outputs / "compare.html").read_text()
    assert (
        "3 runs compared" in page
        and page.count("<tr data-run") == 3
        and "compare.html" in printed
        and "seed=2" in printed
    )


def test_report_of_all_is_one_list(outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(config(all=True))
    assert (
        "1 run, 1 sweep, 2 jobs of sweeps" in (outputs / "index.html").read_text()
        and "index.html" in capsys.readouterr().out
    )
    print_report(config(all=True, root=str(outputs / "day"), to=str(tmp_path / "x.html")))
    assert "1 run · this page" in (tmp_path / "x.html").read_text() and not (outputs / "day" / "index.html").exists()


def test_report_of_last_is_the_sweep_of_the_newest_job(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(config(run="last"))
    assert (
        outputs / "multirun" / "day" / "a,b" / "report.html"
    ).exists() and "leaderboard.csv" in capsys.readouterr().out


def test_report_writes_no_page_through_a_link_or_beside_a_run(outputs: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.html").write_text("kept")
    os.symlink(tmp_path / "kept.html", tmp_path / "link.html")
    for target in (tmp_path / "link.html", tmp_path / "missing" / "x.html", tmp_path / "day.html"):
        (tmp_path / "day.html").mkdir(exist_ok=True)
        with pytest.raises(UserError):
            print_report(config(all=True, to=str(target)))
    assert (tmp_path / "kept.html").read_text() == "kept"
    with pytest.raises(UserError, match="is written into its directory"):
        print_report(config(run=str(outputs / "day" / "one"), to=str(tmp_path / "x.html")))


def test_report_names_what_does_not_exist(outputs: Path) -> None:
    for given in ({"run": f"{outputs}/day/one,{outputs}/day/two"}, {"all": True, "root": f"{outputs}/dya"}):
        with pytest.raises(UserError, match="does not exist|is no directory"):
            print_report(config(**given))
