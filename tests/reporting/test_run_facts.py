"""The numbers and texts of a run's page and of report.py: means, maxima and times over all attempts, errors, reasons of
unused rows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import eval_record, make_run, page_data, train_record

from common.ownership import process_id
from data.tokenize.block import RowStats, truncation_warning
from runner.reporting import run_facts, runs
from runner.reporting.compare import read_comparison
from runner.reporting.run_facts import RunReport, run_text
from runner.reporting.run_list import scan_runs
from runner.reporting.run_page import run_page
from runner.tracking import logger as run_logger
from runner.tracking.config import TrackerConfig
from runner.tracking.jsonl import SavedLogs
from runner.tracking.logger import RunLogger

TWO_ATTEMPTS = [
    train_record(10, tokens_per_second=1000.0, peak_memory=800 << 20),
    train_record(20, tokens_per_second=1000.0, peak_memory=900 << 20),
    train_record(50, tokens_per_second=3000.0, peak_memory=300 << 20, attempt=2, time=0.5),
]


def page_of(folder: Path) -> str:
    return run_page(RunReport.read(folder))


def number(text: str, name: str) -> str:
    """Return the value of a line of run_text."""
    return next(line[len(name) :].strip() for line in text.splitlines() if line.startswith(f"{name} "))


def test_mean_speed_is_by_tokens_as_in_a_comparison(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", TWO_ATTEMPTS)
    compared = read_comparison([folder, make_run(tmp_path / "other")]).runs[0].metrics.tokens_per_second
    assert compared == pytest.approx(5000 / 3) and number(run_text(folder), "mean tokens/s") == "1,667"


def test_peak_memory_is_the_largest_of_all_attempts(tmp_path: Path) -> None:
    assert number(run_text(make_run(tmp_path / "run", TWO_ATTEMPTS)), "peak memory") == "900 MiB"


def test_run_page_names_the_start_of_the_first_attempt(tmp_path: Path) -> None:
    attempts = [{"attempt": attempt, "started": f"2026-11-2{attempt}T10:00:00+00:00"} for attempt in (1, 2, 3)]
    page = page_of(make_run(tmp_path / "run", started=attempts[-1]["started"], attempts=attempts))
    assert "started 2026-11-21T10:00:00+00:00 · attempt 3 began 2026-11-23T10:00:00+00:00" in page
    # run.json keeps the newest attempts
    page = page_of(make_run(tmp_path / "many", started=attempts[-1]["started"], attempts=attempts[1:]))
    assert "attempt 2 began 2026-11-22T10:00:00+00:00 · attempt 3 began" in page and "started 2026-11-22" not in page


def test_remaining_time_is_the_eta_of_the_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes ten seconds, after a slow beginning, with an evaluation of 60 seconds in the second attempt."""
    now = [0.0]
    monkeypatch.setattr(run_logger.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(runs, "is_alive", lambda fields: True)
    folder = make_run(
        tmp_path / "run",
        [train_record(step, time=100.0 * step) for step in (1, 2, 3)],
        status="running",
        attempts=[{"total_steps": 20}],
        **process_id(),
    )
    size = (folder / "metrics.jsonl").stat().st_size
    logger = RunLogger(folder, TrackerConfig(name="none", console="quiet", page=False))
    logger.start(
        {},
        total_steps=20,
        attempt=2,
        run_config={},
        saved=SavedLogs(positions={"metrics": size, "samples": 0}),
        tracker_id=None,
    )
    for step in range(4, 10):
        now[0] += 10
        logger.log("train", step, tokens=100 * step, loss=2.0, tokens_per_second=10.0)
        if step == 6:
            now[0] += 60
            logger.log("eval", step, loss=2.0)
    eta = re.findall(r"eta (\S+)", (folder / "train.log").read_text())[-1]
    assert eta == "00:04:02" == number(run_text(folder), "remaining")  # 110 seconds for 5 steps, 11 steps to go
    logger.finish("interrupted")


def test_run_page_folds_a_long_error_and_the_text_has_one_line_of_it(tmp_path: Path) -> None:
    error = "out of memory\n" + "\n".join(f"frame {line}" for line in range(100))
    folder = make_run(
        tmp_path / "run", status="failed", outcome="failed", error=error, attempts=[{"attempt": 1, "error": error}]
    )
    page = page_of(folder)
    shown, folded = re.findall(
        r'<li class="error">(.*?)<details id="error">.*?</summary>(.*?)</details>', page, re.DOTALL
    )[0]
    assert f"{shown}\n{folded}" == error and shown.endswith("frame 19") and page.count("frame 99") == 1
    assert [line for line in run_text(folder).splitlines() if "memory" in line] == ["error: out of memory ..."]


def test_run_page_folds_an_error_that_is_one_long_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", status="failed", error="x" * 4000)
    shown, folded = re.findall(
        r'<li class="error">(x*)<details id="error">.*?</summary>(x*)</details>', page_of(folder)
    )[0]
    assert len(shown + folded) == 4000 and len(shown) < 2000
    assert max(map(len, run_text(folder).splitlines())) < 400


def test_run_page_names_truncation_once(tmp_path: Path) -> None:
    stats = RowStats(truncated=3, loss_tokens=44, lost_loss_tokens=56, lost_by_length=Counter({99: 56}))
    folder = make_run(tmp_path / "run", data=[{"file": "rows.jsonl", "loss_tokens": 44, "lost_loss_tokens": 56}])
    assert "rows.jsonl: truncation removed 56 of 100 tokens" in run_text(folder)
    (folder / "train.log").write_text(f"warning: {truncation_warning([stats], 40, 4096)}\n")
    assert "data.max_length=40 cuts off 56.0%" in run_text(folder) and "truncation removed" not in run_text(folder)


def test_run_page_has_the_sum_of_unused_rows_and_their_reasons_below(tmp_path: Path) -> None:
    reasons = {"no text": 1200, "content is not a string": 34}
    page = page_of(
        make_run(
            tmp_path / "run",
            data=[
                {"file": "rows.jsonl", "bad": reasons, "dropped": {}, "first_seen": {"no text": "/data/rows.jsonl:7"}}
            ],
        )
    )
    assert '<td class="n">1,234</td>' in page and '<td class="n">0</td>' in page
    assert "bad 1,200: no text (first: rows.jsonl:7)</td>" in page and "bad 34: content is not a string</td>" in page


def test_run_page_says_that_training_waited_for_saves(tmp_path: Path) -> None:
    assert 'aria-label="Seconds that training waited for saves: 1.5000"' in page_of(
        make_run(tmp_path / "run", [train_record(1, save_stall=1.5)])
    )


@pytest.mark.parametrize("step", [10**30, 2**53, -1, -0.5])
def test_records_of_impossible_steps_are_left_out_everywhere(tmp_path: Path, step: Any) -> None:
    records = [
        train_record(10),
        {**train_record(20), "step": step, "tokens": 10**40},
        {**eval_record(50, 1.0), "step": step},
    ]
    folder = make_run(tmp_path / "runs" / "run", records, step=step, metrics={}, evaluation=None)
    (folder / "samples.jsonl").write_text(json.dumps({"step": step, "prompt": "far away", "answer": "x"}) + "\n")
    page = page_of(folder)
    assert page_data(page)["train"]["step"] == [10] and page_data(page)["eval"] == {} and "far away" not in page
    assert number(run_text(folder), "step") == "10" and number(run_text(folder), "tokens") == "1,000"
    (run,) = read_comparison([folder]).runs
    assert run.metrics.last and (run.step, run.metrics.last.tokens) == (10, 1000)
    assert (len(run.metrics.train), len(run.metrics.eval)) == (1, 0)
    assert [row.step for row in scan_runs(tmp_path / "runs").rows] == [10]


def test_run_page_names_metrics_that_are_too_large_to_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", TWO_ATTEMPTS)
    assert "its curves and numbers are left out" not in page_of(folder)
    monkeypatch.setattr(run_facts, "MAX_METRICS_BYTES", 10)
    assert "metrics.jsonl is larger than 0 MiB: its curves and numbers are left out" in page_of(folder)
