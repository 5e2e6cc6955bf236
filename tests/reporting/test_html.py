"""report.html of a sweep: needs no other file, runs its own scripts only, escapes every text, and shows the numbers of
the jobs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sweep_fixtures import job, record, training, write_sweep

from runner.reporting.columns import table_columns
from runner.reporting.leaderboard import update_report
from runner.reporting.live import RepeatedPage
from runner.reporting.metrics import MAX_CURVE_POINTS, read_job_metrics
from runner.reporting.page_kit import RELOAD_SECONDS
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.sweep_page import folded_columns, sweep_page, sweep_progress
from runner.reporting.verdict import MIN_JOBS, setting_effects, setting_importance

LR, ACC, DECAY = "optimizer.lr", "train.accumulation_steps", "optimizer.weight_decay"
VOID_TAGS = {"meta", "wbr", "br", "input"}
HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>&'</title></style></svg></script>{{ 7 * 7 }}\x1b[2J\u202e\x00"


def page_of(folder: Path) -> str:
    update_report(folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def chart_data(page: str) -> dict[str, Any]:
    """Return the numbers that the scripts of the page draw."""
    return json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])


class BalancedParser(HTMLParser):
    """Collect the text; fail on a tag that is closed in the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def text_of(page: str) -> str:
    parser = BalancedParser()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return re.sub(r"\s+", " ", parser.text)


def grid() -> list[dict]:
    return [
        job({LR: lr, ACC: acc}, training(2 + i + 0.1 * j))
        for i, lr in enumerate(("1e-4", "5e-4", "1e-3"))
        for j, acc in enumerate(("1", "4"))
    ]


def scored(loss: float) -> dict[str, Any]:
    return {"metrics": {"val_loss": loss}, "export": {"weights": "best", "step": 40, "loss": loss}}


def test_html_runs_only_its_own_scripts_and_loads_nothing(tmp_path: Path) -> None:
    page = page_of(write_sweep(tmp_path, grid()))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    assert len(scripts) == 3 and f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}\"" in page
    assert re.search(r"""(src|href)=["'](?!\./)|@import|url\(""", page.replace(scripts[0], "")) is None


def test_html_escapes_hostile_text_of_sweep_json(tmp_path: Path) -> None:
    hostile = job(
        {HOSTILE: HOSTILE, LR: "1"},
        training(2.0),
        status="failed",
        error=HOSTILE,
        last_lines=[HOSTILE],
        name='a"><script>b',
    )
    jobs = [hostile, job({HOSTILE: "=2", LR: "2"}, training(2.0), name="b")]
    page = page_of(write_sweep(tmp_path, jobs, overrides=(f"data.path={HOSTILE}",), status=HOSTILE))
    assert not [text for text in ("<script>alert", "<script>b", "<img", "\x1b", "\u202e", "\x00") if text in page]
    assert "<script>alert(1)</script>" in text_of(page) and "{{ 7 * 7 }}" in text_of(page)
    assert chart_data(page)["jobs"][1]["values"][0] == "=2" and "<script>alert(1)" in chart_data(page)["keys"][0]["key"]


def test_html_header_has_status_counts_and_commands(tmp_path: Path) -> None:
    jobs = [*grid(), job({LR: "1", ACC: "1"}, None, status="new")]
    text = text_of(page_of(write_sweep(tmp_path, jobs, overrides=("train.max_steps=40",), status="interrupted")))
    assert "interrupted · 7 jobs: 6 completed, 1 new" in text and "done6 of 7running0waiting1failed0" in text
    assert f"python runner/train.py resume={tmp_path}" in text
    assert "python runner/train.py train.max_steps=40 optimizer.lr=1e-4 train.accumulation_steps=1" in text
    assert "Resume the sweep" not in text_of(page_of(write_sweep(tmp_path, grid())))
    # resume= would not run it again
    diverged = [*grid(), job({LR: "5", ACC: "1"}, [record(1, None)], status="failed", loss="inf")]
    assert "Resume the sweep" not in text_of(page_of(write_sweep(tmp_path, diverged, status="failed")))


def test_html_header_names_what_the_jobs_began_from(tmp_path: Path) -> None:
    starts = [{"init_from": "scratch"}, {"init_from": HOSTILE}, {"branched_from": {"run": "/runs/a,b", "step": 4000}}]
    jobs = [job({LR: str(number)}, training(2.0), run=start) for number, start in enumerate([*starts, starts[0]])]
    page = page_of(write_sweep(tmp_path, jobs))
    text = text_of(page)
    assert text.count("branched from /runs/a,b at step 4,000") == text.count("from random weights") == 1
    assert "<script>alert" not in page and "more" not in text.partition("done")[0]
    many = [job({LR: str(number)}, training(2.0), run={"init_from": f"/run{number}"}) for number in range(9)]
    assert "from /run3… 5 more" in text_of(page_of(write_sweep(tmp_path / "many", many)))


def test_html_before_the_first_job_shows_all_jobs_as_waiting_and_reloads(tmp_path: Path) -> None:
    page = page_of(write_sweep(tmp_path, [job({LR: lr}, None, status="new") for lr in "123"], status="running"))
    assert (
        "3 jobs: 3 new" in text_of(page)
        and "No job has logged a step yet" in text_of(page)
        and chart_data(page)["reload"] == RELOAD_SECONDS
    )
    assert chart_data(page_of(write_sweep(tmp_path / "done", grid())))["reload"] is None


def test_html_has_a_row_per_job_and_the_reason_of_a_failed_one(tmp_path: Path) -> None:
    jobs = [
        *grid(),
        job(
            {LR: "5", ACC: "1"},
            training(9.0)[:9],
            status="failed",
            error="killed by signal 9",
            last_lines=["step 9 | loss 7.1"],
        ),
    ]
    page = page_of(write_sweep(tmp_path, jobs, status="failed"))
    assert len(re.findall('<tr class="point">', page)) == 7
    failed = page[page.index('id="failed"') :]
    assert (
        "killed by signal 9" in failed
        and "step 9 | loss 7.1" in failed
        and "python runner/train.py optimizer.lr=5 train.accumulation_steps=1" in failed
    )
    assert [row["loss"] for row in chart_data(page)["rows"]][:6] == [2.0, 2.1, 3.0, 3.1, 4.0, 4.1]


def test_html_curves_are_the_records_of_metrics_jsonl(tmp_path: Path) -> None:
    records = training(2.0)
    data = chart_data(page_of(write_sweep(tmp_path, [job({LR: "1"}, records), job({LR: "2"}, training(3.0))])))
    for kind, curve in (("train", data["jobs"][0]["train"]), ("eval", data["jobs"][0]["eval"])):
        own = [each for each in records if each["kind"] == kind]
        assert curve["step"] == [each["step"] for each in own] and curve["tokens"] == 160  # per step
        assert curve["loss"] == pytest.approx([each["loss"] for each in own], rel=1e-5) and curve["seconds"] == [
            each["time"] for each in own
        ]


def test_html_curves_keep_gaps_and_add_the_time_of_attempts(tmp_path: Path) -> None:
    records = [record(1, 5.0), record(2, None), record(3, 4.0, time=0.1, attempt=2) | {"tokens": 500}]
    data = chart_data(
        page_of(
            write_sweep(
                tmp_path, [job({LR: "1"}, records), job({LR: "5"}, [record(1, None)], loss="inf"), job({LR: "2"}, [])]
            )
        )
    )
    assert data["jobs"][0]["train"] == {
        "step": [1, 2, 3],
        "tokens": [160, 320, 500],
        "seconds": [0.1, 0.2, 0.3],
        "loss": [5.0, None, 4.0],
    }
    assert (data["jobs"][1]["status"], data["jobs"][2]["train"]) == ("diverged", None)


def test_html_colors_follow_the_job_while_they_suffice_and_the_rank_beyond(tmp_path: Path) -> None:
    jobs = grid()
    first = {row["label"]: row["style"] for row in chart_data(page_of(write_sweep(tmp_path, jobs)))["rows"]}
    jobs[0]["records"] = training(9.0)  # the best becomes the worst
    assert {row["label"]: row["style"] for row in chart_data(page_of(write_sweep(tmp_path, jobs)))["rows"]} == first
    many = [job({LR: str(i)}, training(2 + i)) for i in range(12)]
    assert [row["style"] for row in chart_data(page_of(write_sweep(tmp_path / "many", many)))["rows"]] == [
        *(f"s{i}" for i in range(8)),
        *["sx"] * 4,
    ]


def test_html_marks_ties_and_intervals_over_seeds(tmp_path: Path) -> None:
    losses = {"1": (2.0, 2.2), "2": (2.1, 2.3), "3": (9.0, 9.01)}
    jobs = [
        job({LR: lr, "seed": str(seed)}, training(loss), run=scored(loss))
        for lr, seeds in losses.items()
        for seed, loss in enumerate(seeds)
    ]
    page = page_of(write_sweep(tmp_path, jobs))
    # t = 12.706, deviation 0.1414
    assert page.count('<span class="tie">tie</span>') == 1 and "0.8294 to 3.3706" in page and "No clear winner" in page


def test_html_marks_jobs_whose_validation_loss_rises_from_its_lowest(tmp_path: Path) -> None:
    def evaluated(*losses: float, falls: float) -> list[dict[str, Any]]:
        """Five training losses before each evaluation, each lower by `falls` than those before."""
        return [
            each
            for step, loss in enumerate(losses, 1)
            for each in [
                *(record(step * 10 - 5 + i, 3.0 - falls * step) for i in range(5)),
                record(step * 10, loss, kind="eval"),
            ]
        ]

    jobs = [
        evaluated(2.0, 1.5, 1.7, 1.9, falls=0.5),
        evaluated(2.0, 1.5, 1.7, 1.9, falls=-0.5),
        evaluated(2.0, 1.5, 1.9, falls=0.5),
        training(2.0),
    ]
    page = page_of(write_sweep(tmp_path, [job({LR: str(number)}, records) for number, records in enumerate(jobs)]))
    assert "overfits: 1.5000 at step 20, now 1.9000" in text_of(page) and [
        job["lowest"] for job in chart_data(page)["jobs"]
    ] == [20, None, None, None]


def test_html_effect_of_a_setting_is_mean_and_spread_over_its_jobs(tmp_path: Path) -> None:
    jobs = [*grid(), job({LR: "1e-3", ACC: "2"}, [record(1, None)], status="failed", loss="inf")]
    effects = {effect.key: effect for effect in setting_effects(read_sweep_results(write_sweep(tmp_path, jobs)))}
    assert [*effects] == [LR, ACC]  # the largest difference first
    lowest, _, highest = effects[LR].values
    assert (lowest.value, lowest.loss and (lowest.loss.n, lowest.loss.mean), lowest.best, highest.failed) == (
        "1e-4",
        (2, pytest.approx(2.05)),
        2.0,
        1,
    )
    assert (
        lowest.loss
        and lowest.loss.deviation == pytest.approx(0.1 / math.sqrt(2))
        and effects[LR].spread == pytest.approx(2.0)
    )


def test_html_importance_says_why_it_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(name: str, jobs: list[dict]) -> str:
        return setting_importance(read_sweep_results(write_sweep(tmp_path / name, jobs))).reason

    assert (
        reason("one", [job({LR: str(i)}, training(2 + i)) for i in range(20)])
        == "it needs two settings with several values among the completed jobs"
    )
    assert reason("few", grid()) == f"it needs {MIN_JOBS} completed jobs, there are 6"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reason("missing", many_jobs()).startswith("a package is missing: pip install optuna scikit-learn")


def many_jobs() -> list[dict]:
    """16 jobs whose loss depends on the learning rate only."""
    return [job({LR: f"{lr}e-4", DECAY: decay}, training(1 + lr)) for lr in range(1, 9) for decay in ("0.0", "0.1")]


@pytest.mark.slow
def test_html_importance_is_that_of_the_setting_that_matters(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="fANOVA is Optuna's")
    pytest.importorskip("sklearn", reason="Optuna's fANOVA needs scikit-learn")
    importance = setting_importance(read_sweep_results(write_sweep(tmp_path, many_jobs())))
    (first, share), (second, rest) = importance.shares
    assert (first, second, importance.jobs) == (LR, DECAY, 16) and share > 0.95 and share + rest == pytest.approx(1)


def test_html_importance_of_values_beyond_float32_is_left_out(tmp_path: Path) -> None:
    jobs = [job({LR: lr, DECAY: str(decay)}, training(2 + decay)) for lr in ("-1e308", "2") for decay in range(5)]
    importance = setting_importance(read_sweep_results(write_sweep(tmp_path, jobs)))
    assert importance.shares == [] and importance.reason == f"{LR}=-1e308 is beyond 1e+30, up to which it is computed"
    assert importance.reason in page_of(tmp_path)


def test_html_names_the_edge_and_the_line_that_extends_the_range(tmp_path: Path) -> None:
    page = page_of(
        write_sweep(
            tmp_path, [job({LR: lr}, training(loss), run=scored(loss)) for lr, loss in (("1e-3", 3.0), ("2e-3", 2.0))]
        )
    )
    assert (
        "the best point has the highest optimizer.lr" in page
        and f"python runner/train.py resume={tmp_path} optimizer.lr=0.004" in page
    )


def test_html_has_the_settings_in_which_jobs_differ(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [job({LR: lr}, training(2.0)) for lr in "12"])
    for lr in "12":
        (folder / f"{LR}={lr}" / ".hydra").mkdir()
        (folder / f"{LR}={lr}" / ".hydra" / "config.yaml").write_text(
            f"optimizer: {{lr: {lr}, betas: [0.9]}}\ntrain: {{max_steps: {10 * int(lr)}}}\n"
        )
    settings = chart_data(page_of(folder))["settings"]
    assert settings == {
        LR: {"values": ["1", "2"], "of": [0, 1]},
        "train.max_steps": {"values": ["10", "20"], "of": [0, 1]},
    }


def test_progress_expects_the_mean_time_of_completed_jobs(tmp_path: Path) -> None:
    times = {"started": "2026-11-22T10:00:00+00:00", "ended": "2026-11-22T10:10:00+00:00"}
    jobs = [job({LR: "1"}, training(2.0), **times), *(job({LR: lr}, None, status="new") for lr in "345")]
    now = datetime(2026, 11, 22, 10, 14, tzinfo=UTC).timestamp()
    sweep = read_sweep_results(write_sweep(tmp_path, jobs, status="running"))
    assert sweep_progress(sweep, now).remaining == "about 00:30:00"
    sweep.jobs[1].status, sweep.jobs[1].started = "running", now - 240
    progress = sweep_progress(sweep, now)
    assert (progress.remaining, progress.ended, progress.total) == ("about 00:26:00", 1, 4)
    # two at a time: 6 minutes of both, then one job
    sweep.jobs[2].status, sweep.jobs[2].started = "running", sweep.jobs[1].started
    assert sweep_progress(sweep, now).remaining == "about 00:11:00"


def test_progress_of_a_study_ignores_a_number_of_trials_that_is_none(tmp_path: Path) -> None:
    times = {"started": "2026-11-22T10:00:00+00:00", "ended": "2026-11-22T10:10:00+00:00"}
    folder = write_sweep(tmp_path, [job({LR: "1"}, training(2.0), **times)], status="running")
    sweep = read_sweep_results(folder)
    sweep.sweeper = "optuna"
    for trials, total in (("12", 12), ("9" * 400, 1), ("9" * 5000, 1)):
        sweep.shared_overrides = [f"hydra.sweeper.n_trials={trials}"]
        assert sweep_progress(sweep, 0.0).total == total


def test_curves_of_jobs_are_read_once_and_keep_extremes(tmp_path: Path) -> None:
    losses = [5 + math.sin(step) for step in range(5000)]
    losses[2222], losses[3333] = 99.0, 0.5
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record(step, loss)) + "\n" for step, loss in enumerate(losses, start=1)))
    metrics = read_job_metrics(path)
    assert {99.0, 0.5, losses[0], losses[-1]} <= {*metrics.train.columns["loss"]} and len(
        metrics.train
    ) < MAX_CURVE_POINTS * 1.1
    assert read_job_metrics(path) is metrics
    path.write_text(json.dumps(record(1, 2.0)) + "\n")
    assert len(read_job_metrics(path).train) == 1


def test_html_counts_diverged_jobs_apart_from_failed_ones(tmp_path: Path) -> None:
    diverged = job({LR: "5", ACC: "1"}, [record(1, None)], status="failed", loss="inf")
    failed = job({LR: "6", ACC: "1"}, [record(1, 2.0)], status="failed", error="killed")
    text = text_of(page_of(write_sweep(tmp_path, [*grid(), diverged, failed], status="failed")))
    assert "8 jobs: 6 completed, 1 failed, 1 diverged" in text
    assert "done6 of 8running0waiting0diverged1failed1" in text


def test_folded_columns_are_equal_in_all_rows_or_repeat_another(tmp_path: Path) -> None:
    run = {"export": {"weights": "final", "step": 40, "loss": 2.0}}
    jobs = [job({LR: "1"}, training(2.0), run=run), job({LR: "2"}, training(3.0, steps=41), run=dict(run))]
    sweep = read_sweep_results(write_sweep(tmp_path, jobs))
    columns = [column for column in table_columns(sweep) if column.title]
    shown = {column.title for column in columns if column.key not in folded_columns(sweep, columns)}
    assert {"final validation loss", "newest training loss", "tokens", "status"} <= shown
    assert not {"best validation loss", "loss of model/", "weights", "tokens/s"} & shown


@pytest.mark.slow
@pytest.mark.parametrize(("number", "size"), [(200, 1_000_000), (500, 1_200_000)])
def test_html_of_many_jobs_is_small(number: int, size: int, tmp_path: Path) -> None:
    lines = [f"line {number} {'x' * 500}" for number in range(20)]
    failed = {"status": "failed", "error": "killed by signal 9", "last_lines": lines}
    records = training(2.0, steps=120, eval_every=4)
    jobs = [
        job({LR: f"{i}.123456e-4", ACC: str(i % 4), DECAY: "0.1"}, records, **(failed if i % 5 == 0 else {}))
        for i in range(number)
    ]
    page = page_of(write_sweep(tmp_path, jobs))
    assert len(page.encode()) < size
    text_of(page)


def test_html_folds_a_long_reason_and_has_it_complete(tmp_path: Path) -> None:
    error = "rows " + " ".join(f"data/pretrain.jsonl:{i}" for i in range(40))
    page = page_of(
        write_sweep(tmp_path, [job({LR: "1"}, [record(1, 2.0)], status="failed", error=error)], status="failed")
    )
    assert f"<summary>{error[:160]} …</summary>{error}</details>" in page


def test_html_links_only_to_run_directories_of_started_jobs(tmp_path: Path) -> None:
    jobs = [
        job({"x": "1"}, training(2.0), name="a b#c?d%"),
        job({"x": "2"}, None, status="new"),
        job({"x": "3"}, None, name="../y", status="failed"),
    ]
    folder = write_sweep(tmp_path, jobs)
    assert re.findall(r'href="([^"]*)"', page_of(folder)) == ["./a%20b%23c%3Fd%25/"]
    (folder / "a b#c?d%" / "report.html").touch()
    assert re.findall(r'href="([^"]*)"', page_of(folder)) == ["./a%20b%23c%3Fd%25/report.html", "./a%20b%23c%3Fd%25/"]


def test_html_of_an_empty_sweep_is_written(tmp_path: Path) -> None:
    assert "0 jobs" in text_of(page_of(write_sweep(tmp_path, [])))


@pytest.mark.parametrize(
    "name", ["sweep.json", "run.json", "metrics.jsonl", ".hydra/config.yaml", ".hydra/overrides.yaml"]
)
@pytest.mark.parametrize("content", [b"", b"\xff\x00{[", b"[1, 2]\n{}\n", b"optimizer: {lr: 2}\ntrain: [1]\n"])
def test_html_is_written_whatever_is_damaged(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_sweep(tmp_path, [job({LR: lr}, training(float(lr)), run=scored(float(lr))) for lr in "12"])
    path = folder / (name if name == "sweep.json" else f"{LR}=1/{name}")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert page_of(folder).endswith("</html>")


def test_html_of_a_running_sweep_does_not_wait_for_the_importance(tmp_path: Path) -> None:
    sweep = read_sweep_results(write_sweep(tmp_path, many_jobs(), status="running"))
    assert "it is calculated when the sweep ends" in sweep_page(sweep, is_final=False)


def test_repeated_page_warns_once_and_waits_in_proportion_to_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written, warnings = [100.0], [], []
    monkeypatch.setattr("runner.reporting.live.time.monotonic", lambda: clock[0])

    def write_page() -> None:
        written.append(clock[0])
        clock[0] += 1.0
        raise OSError("disk full")

    page = RepeatedPage(write_page, warnings.append)
    for now in (100.0, 105.0, 106.0, 300.0, 307.0):
        clock[0] = max(clock[0], now)
        page.write_if_due()
    # then 1 s of 200 s
    assert written == [100.0, 106.0, 307.0] and warnings == ["report.html cannot be written: OSError: disk full"]


@pytest.mark.parametrize(
    "key, rule, is_by_tokens",
    [
        ("train.accumulation_steps", "auto", True),
        ("train.accumulation_steps", "steps", False),
        ("optimizer.lr", "auto", False),
    ],
)
def test_page_opens_by_tokens_where_the_size_of_a_step_is_swept(
    key: str, rule: str, is_by_tokens: bool, tmp_path: Path
) -> None:
    write_sweep(tmp_path, [job({key: "1"}, training(2.0)), job({key: "2"}, training(3.0))])
    (tmp_path / f"{key}=1" / ".hydra").mkdir()
    (tmp_path / f"{key}=1" / ".hydra" / "config.yaml").write_text(f"sweep: {{match_budget: {rule}}}\n")
    update_report(tmp_path)
    assert ('<option value="tokens" selected>' in (tmp_path / "report.html").read_text()) is is_by_tokens
