"""report.html of a run: its numbers are those of metrics.jsonl, hostile text stays text, and whatever is missing leaves
only its part out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from runner.diagnostics.monitor import RunMonitor
from runner.diagnostics.symptoms import RunFacts
from runner.reporting import live, run_facts, runs
from runner.reporting.live import LivePage
from runner.reporting.metrics import MAX_FIELDS, MAX_NAME_CHARS, MAX_POINTS, choose_points, metrics_of
from runner.reporting.page_kit import RELOAD_SECONDS
from runner.reporting.run_facts import RunReport, run_text, stage_defaults
from runner.reporting.run_page import STALE_SECONDS, write_run_page
from runner.run_dir.metadata import RunMetadata

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m"


def train(step: int, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "tokens": 100 * step,
        "loss_tokens": 60 * step,
        "loss": 5 - step / 100,
        "lr": 1e-3,
        "time": float(step),
        "attempt": 1,
        **fields,
    }


def evaluation(step: int, loss: float, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "tokens": 100 * step,
        "loss_tokens": 60 * step,
        "loss": loss,
        "perplexity": math.exp(loss),
        "time": float(step),
        "attempt": 1,
        **fields,
    }


def write_run(folder: Path, records: list[dict[str, Any]], **fields: Any) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("- optimizer.lr=0.001\n")
    (folder / ".hydra" / "config.yaml").write_text(
        "optimizer:\n  lr: 0.001\n  betas: [0.9, 0.95]\nstage:\n  data_format: text\n"
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.json").write_text(
        json.dumps({"status": "completed", "stage": "pretrain", "init_from": "scratch", "step": len(records), **fields})
    )
    return folder


def page_of(folder: Path) -> str:
    return write_run_page(folder).read_text(encoding="utf-8")


def chart_data(page: str) -> dict[str, Any]:
    """Return the numbers that the scripts of the page draw."""
    return json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])


def test_run_page_draws_the_numbers_of_metrics_jsonl(tmp_path: Path) -> None:
    records = [*(train(step) for step in range(1, 41)), evaluation(20, 4.5), evaluation(40, 4.4)]
    data = chart_data(page_of(write_run(tmp_path / "run", records)))
    assert data["train"]["loss"] == [record["loss"] for record in records[:40]] and data["train"]["tokens"] == [
        100 * step for step in range(1, 41)
    ]
    assert (data["eval"]["step"], data["eval"]["loss"], data["reload"]) == ([20, 40], [4.5, 4.4], None)


def test_run_page_runs_only_its_own_scripts_and_escapes_every_text(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        [train(1)],
        status="failed",
        error=HOSTILE,
        data=[{"file": HOSTILE, "schema": HOSTILE}],
        init_from=HOSTILE,
    )
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": HOSTILE, "answer": HOSTILE}) + "\n")
    (folder / "train.log").write_text(f"warning: {HOSTILE}\n")
    (folder / "metrics.jsonl").write_text(json.dumps({**train(1), HOSTILE: 1.0}) + "\n")
    page = page_of(folder)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    assert len(scripts) == 3 and f"script-src {hashes}" in page and "default-src 'none'" in page
    assert "<img" not in page and "alert(1)</script>" not in page and "\x1b" not in page and "\u202e" not in page
    assert re.search(r"""(src|href)=["'](?!#)""", page) is None


def test_run_page_leaves_gaps_where_a_loss_is_not_finite(tmp_path: Path) -> None:
    records = [train(1), train(2, loss=None, nonfinite=["loss"]), train(3)]
    page = page_of(write_run(tmp_path / "run", records))
    assert chart_data(page)["train"]["loss"] == [4.99, None, 4.97] and "loss in 1 records" in page


def test_run_page_adds_the_time_of_attempts_and_marks_where_they_began(tmp_path: Path) -> None:
    records = [train(1, time=1.0), train(2, time=2.5), train(3, time=0.5, attempt=2)]
    data = chart_data(page_of(write_run(tmp_path / "run", records)))
    assert data["train"]["seconds"] == [1, 2.5, 3] and data["attempts"] == [3]


def test_run_page_names_overfitting_truncation_and_warnings(tmp_path: Path) -> None:
    data = [{"file": "a/rows.jsonl", "loss_tokens": 44, "lost_loss_tokens": 56}]
    records = [
        *map(train, range(1, 11)),
        evaluation(10, 2.0),
        *map(train, range(11, 21)),
        evaluation(20, 2.1),
        *map(train, range(21, 31)),
        evaluation(30, 2.5),
    ]
    attempts = [{"total_steps": 30}]
    folder = write_run(tmp_path / "run", records, step=30, data=data, export={"weights": "best"}, attempts=attempts)
    (folder / "train.log").write_text("warning: slow data\nstep 30/30 100.0% | loss 1\n")
    text = run_text(folder)
    assert (
        "overfitting: the validation loss was lowest at step 10 (2.0000) and is 2.5000 now; model/ has the weights of the best evaluation"
        in text
    )
    assert "rows.jsonl: truncation removed 56 of 100 tokens with loss (56%); raise data.max_length" in text
    assert "note: slow data" in text and "30 of 30" in text


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "samples.jsonl", "train.log", ".hydra/config.yaml", ".hydra/overrides.yaml"]
)
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00{[", b"[1, 2]\n{}\n"])
def test_run_page_is_written_whatever_is_missing_or_damaged(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = write_run(tmp_path / "run", [train(1), evaluation(1, 2.0)])
    if content is None:
        (folder / name).unlink(missing_ok=True)
    else:
        (folder / name).write_bytes(content)
    assert page_of(folder).endswith("</html>")


@pytest.mark.parametrize(
    ("losses", "train_loss", "expected"),
    [([2.0, 2.1, 2.5], None, True), ([2.0, 2.5], None, False), ([2.0, 2.1, 2.5], 3.0, False)],
)
def test_run_page_names_overfitting_where_the_run_warns_of_it(
    losses: list[float], train_loss: float | None, expected: bool, tmp_path: Path
) -> None:
    fields = {} if train_loss is None else {"loss": train_loss}
    records = [
        record
        for at, loss in enumerate(losses)
        for record in [*(train(10 * at + i, **fields) for i in range(1, 11)), evaluation(10 * at + 10, loss)]
    ]
    facts = RunFacts(1000, 1e-3, 0, 0.0, 0, 1, False, None)
    monitor = RunMonitor(facts)
    assert ("overfitting" in {symptom.name for record in records for symptom in monitor.add(record)}) is expected
    assert ("overfitting" in run_text(write_run(tmp_path / "run", records))) is expected


def test_run_page_shows_the_newest_prompts_and_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_facts, "MAX_EVALUATIONS", 2)
    folder = write_run(tmp_path / "run", [train(1)])
    (folder / "samples.jsonl").write_text(
        "".join(json.dumps({"step": step, "prompt": f"p{step % 20}", "answer": "a"}) + "\n" for step in range(1, 41))
    )
    (folder / "evaluations.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(9)))
    run = RunReport.read(folder)
    assert [*run.samples] == [f"p{step % 20}" for step in range(33, 41)] and run.samples["p13"] == [(33, "a")]
    assert [record["step"] for record in run.evaluations] == [7, 8]


@pytest.mark.slow
def test_run_page_of_a_long_run_is_small_and_keeps_extremes(tmp_path: Path) -> None:
    records = [
        train(step, loss=9.0 if step == 7_777 else 2.0, grad_norm=1.23456789, tokens_per_second=4321.1234567)
        for step in range(1, 20_001)
    ]
    page = page_of(write_run(tmp_path / "run", records))
    data = chart_data(page)
    assert 9.0 in data["train"]["loss"] and len(data["train"]["step"]) <= MAX_POINTS + 2 and len(page) < 1 << 20


def test_points_of_a_curve_are_first_last_and_extremes() -> None:
    values = [1.0] * 1000
    values[501], values[502] = 9.0, -9.0
    kept = choose_points([*values[:700], None, *values[701:]], 30)
    assert {0, 501, 502, 700, 999} <= {*kept} and len(kept) <= 60


def test_records_that_are_no_steps_are_left_out() -> None:
    series = metrics_of(
        [{"kind": "note", "step": 1}, {"kind": "train", "step": "2"}, {"kind": "train", "step": True}, train(3)]
    )
    assert series.train.columns["step"] == [3.0]


def test_live_page_warns_once_and_never_raises(tmp_path: Path) -> None:
    warnings: list[str] = []
    page = LivePage(RunMetadata.detached(tmp_path / "gone", 1), warnings.append)
    page.write()
    page.write()
    assert len(warnings) == 1 and warnings[0].startswith("report.html cannot be written: ")


class TakenRun(RunMetadata):
    def check_owned(self) -> None:
        raise RuntimeError("taken")


def test_live_page_writes_nothing_into_a_directory_of_another_process(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train(1)])
    LivePage(TakenRun.detached(folder, 1), lambda message: None).write()
    assert not (folder / "report.html").exists()


def test_run_page_shows_settings_that_differ_from_the_defaults_of_the_stage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train(1)])
    (folder / ".hydra" / "config.yaml").write_text(
        "optimizer: {name: muon, lr: 0.25}\nstage: {name: sft}\ndata: {cache: /x/.cache}\nmine: 1\n"
    )
    settings = RunReport.read(folder).compared_settings
    default = stage_defaults("sft")["optimizer.lr"]
    assert [(setting.key, setting.value, setting.default) for setting in settings if setting.differs] == [
        ("optimizer.lr", "0.25", default),
        ("mine", "1", None),
    ]
    assert (
        float(default) < 0.1
        and stage_defaults("sft")["data.path"]
        != stage_defaults("pretrain")["data.path"]
        == stage_defaults("gone")["data.path"]
    )
    assert f'<td>0.25</td><td class="dim">{default}</td>' in page_of(folder)


def test_run_page_shows_control_characters_of_a_path_as_text(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a\u202eb\u2066", [train(1)]))
    assert "\\u202eb\\u2066" in page and "\u202e" not in page and "\u2066" not in page


def test_run_page_draws_a_bounded_number_of_fields(tmp_path: Path) -> None:
    records = [{**train(step), **{f"field {step} {index}" * 9: 1.0 for index in range(500)}} for step in range(1, 3)]
    data = chart_data(page_of(write_run(tmp_path / "run", records)))
    assert (
        len(data["train"]) == MAX_FIELDS and max(map(len, data["train"])) <= MAX_NAME_CHARS and "loss" in data["train"]
    )


def test_run_page_gives_the_longer_command_only_where_it_would_train(tmp_path: Path) -> None:
    config = "stage: {name: pretrain, data_format: text}\ntrain: {max_steps: 0, epochs: 3}\n"
    for name, steps, is_whole in (("whole", 2, True), ("stopped", 9, False)):
        folder = write_run(tmp_path / name, [train(1), train(2)], attempts=[{"total_steps": steps}])
        (folder / ".hydra" / "config.yaml").write_text(config)
        assert ("train.epochs=6" in run_text(folder)) is is_whole


def test_page_of_a_run_that_trains_is_stale_after_ten_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "is_alive", lambda fields: True)
    for seconds, stale in ((1, STALE_SECONDS), (60, 600)):
        records = [train(step, time=float(seconds * step)) for step in range(1, 4)]
        data = chart_data(page_of(write_run(tmp_path / str(seconds), records, status="running")))
        assert (data["stale"], data["reload"]) == (stale, RELOAD_SECONDS)


def test_run_page_of_a_diverged_run_proposes_a_smaller_learning_rate(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train(1), train(2)], status="failed", outcome="diverged")
    text = run_text(folder)
    assert "diverged" in text and "optimizer.lr=0.0001" in text and "resume=" not in text


@pytest.mark.parametrize(
    ("log", "fields"),
    [
        ("step 1/" + "9" * 5000 + " 0.1% | loss 1\n", {}),
        ("", {"attempts": [{"total_steps": 10**300}]}),
        ("", {"data": [{"file": "a", "lost_loss_tokens": 5, "loss_tokens": -5}]}),
    ],
    ids=["digits of the log", "digits of run.json", "negative count"],
)
def test_run_page_is_written_whatever_numbers_a_damaged_run_names(
    log: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", [train(1)], **fields)
    (folder / "train.log").write_text(log)
    assert "run" in run_text(folder) and "<html" in page_of(folder)


@pytest.mark.slow
def test_live_page_of_a_run_whose_metrics_are_large_is_written_by_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written at the end of the run only."""
    folder, warnings = write_run(tmp_path / "run", [train(step) for step in range(9)]), list[str]()
    monkeypatch.setattr(live, "MAX_LIVE_BYTES", 100)
    page = LivePage(RunMetadata.detached(folder, 1), warnings.append)
    page.record_logged()
    child = page._child
    assert (
        child is not None
        and child.wait() == 0
        and len(chart_data((folder / "report.html").read_text())["train"]["step"]) == 9
    )
    page.record_logged(), page.record_logged()
    # the next one takes 1 % of the time
    assert page._child is None and page._due - page._begun > (time.monotonic() - page._begun) * 2
    page._due = 0.0
    page.record_logged()
    (folder / "report.html").unlink()
    page.write()
    assert page._child is None and (folder / "report.html").exists() and warnings == []


def test_live_page_of_a_directory_of_another_process_starts_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", [train(step) for step in range(9)])
    monkeypatch.setattr(live, "MAX_LIVE_BYTES", 100)
    page = LivePage(TakenRun.detached(folder, 1), lambda message: None)
    page.record_logged()
    assert page._child is None and not (folder / "report.html").exists()


def test_run_page_names_the_lowest_of_all_validation_losses() -> None:
    records = [
        {"kind": "eval", "step": step, "loss": loss, "time": 1.0, "attempt": 1}
        for step, loss in ((1, 3.0), (2, 1.5), (3, None), (4, 2.0))
    ]
    assert metrics_of(records).eval.lowest() == (1.5, 2.0)
