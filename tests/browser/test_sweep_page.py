"""report.html of a sweep in a browser: it draws the numbers of the jobs, obeys its controls by mouse and keyboard, and
hostile text stays text.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import page_checks
import pytest
from sweep_fixtures import job, record, training, write_sweep

from runner.reporting import verdict
from runner.reporting.leaderboard import update_report
from runner.reporting.page_kit import RELOAD_SECONDS
from runner.reporting.page_server import PageServer, folder_pages
from runner.reporting.runs import REPORT_FILE

pytestmark = pytest.mark.slow

LR, ACC, DECAY = "optimizer.lr", "train.accumulation_steps", "optimizer.weight_decay"
HOSTILE = "</script></title><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}\u202e"


def write_page(folder: Path) -> Path:
    update_report(folder)
    return folder / REPORT_FILE


def grid(folder: Path) -> Path:
    """Write a sweep of 12 jobs over three settings: one diverged, one failed, one waits, one overfits."""
    jobs = [
        job({LR: lr, ACC: acc, DECAY: decay}, training(2 + i + 0.1 * j + 0.01 * k, eval_every=5))
        for i, lr in enumerate(("1e-4", "1e-3", "1e-2"))
        for j, acc in enumerate(("1", "4"))
        for k, decay in enumerate(("0.0", "0.1"))
    ]
    jobs[1]["records"] = [
        *(record(step, 3.0 - step / 20) for step in range(1, 11)), record(10, 2.0, kind="eval"), *(record(step, 3.0 - step / 20) for step in range(11, 21)),
        record(20, 2.4, kind="eval"), *(record(step, 3.0 - step / 20) for step in range(21, 31)), record(30, 2.9, kind="eval"),
    ]  # fmt: skip
    jobs[9] |= {"status": "failed", "error": "killed by signal 9", "last_lines": ["Killed"]}
    jobs[10] |= {"records": [record(1, 9.0), record(2, None), record(3, 8.0)], "status": "failed", "loss": "inf"}
    jobs[11] |= {"records": None, "status": "new"}
    write_sweep(folder, jobs, overrides=("train.max_steps=40",), status="failed")
    for each in jobs[:11]:
        hydra = folder / ",".join(f"{key}={value}" for key, value in sorted(each["overrides"].items())) / ".hydra"
        hydra.mkdir()
        values = each["overrides"]
        (hydra / "config.yaml").write_text(
            f"optimizer: {{name: adamw, lr: {values[LR]}, weight_decay: {values[DECAY]}}}\ntrain: {{accumulation_steps: {values[ACC]}}}\n"
        )
    return write_page(folder)


def ranks(page: Any) -> list[str]:
    """Return the ranks of the visible rows, from top to bottom."""
    return [text.split()[0] for text in page.locator("#leaderboard tbody:visible button.pick").all_inner_texts()]


def curves(page: Any) -> list[dict[str, Any]]:
    return page.evaluate("lmRunner.curves()")


def test_sweep_page_draws_the_records_of_every_job(open_page: Any, tmp_path: Path) -> None:
    page = open_page(grid(tmp_path / "sweep"))
    assert curves(page)[-1]["x"][-1] == 40 * 160  # by tokens: the steps of the jobs differ in size
    page.locator("#axis").select_option("step")
    page.locator("#smoothing").fill("0")
    jobs = page.evaluate("lmRunner.data.jobs")
    drawn = curves(page)
    assert len(drawn) == 21  # 11 jobs have logged, the diverged one has no validation loss
    for curve in drawn:
        lines = (tmp_path / "sweep" / jobs[curve["job"]]["name"] / "metrics.jsonl").read_text().splitlines()
        own = [
            each
            for each in map(json.loads, lines)
            if each["kind"] == {"training": "train", "validation": "eval"}[curve["kind"]]
        ]
        assert curve["x"] == [each["step"] for each in own] and curve["y"] == [
            each["loss"] if each["loss"] is None else pytest.approx(each["loss"], rel=1e-5) for each in own
        ]
    assert jobs[drawn[-1]["job"]]["row"] == 0 and drawn[-1]["kind"] == "validation"  # the best is drawn last
    page.locator("#axis").select_option("tokens")
    assert curves(page)[-1]["x"][-1] == 40 * 160
    page.locator("#axis").select_option("seconds")
    assert curves(page)[-1]["x"][-1] == 4
    page.locator("#training").uncheck()
    assert {curve["kind"] for curve in curves(page)} == {"validation"}
    page.locator("#log").check()
    assert page.evaluate("lmRunner.chart().scales.y.distr") == 3


def test_sweep_page_is_filtered_by_text_and_setting(open_page: Any, tmp_path: Path) -> None:
    page = open_page(grid(tmp_path / "sweep"))
    page.locator("#text").fill(f"{LR}=1e-3 {ACC}=4")
    assert page.locator("#shown").inner_text() == "2 of 12 jobs" and len(ranks(page)) == 2
    assert {page.evaluate("lmRunner.data.jobs")[curve["job"]]["values"][0] for curve in curves(page)} == {"1e-3"}
    page.locator("#filters select").nth(2).select_option("0.1")
    assert page.locator("#shown").inner_text() == "1 of 12 jobs"
    page.get_by_role("button", name="show all").click()
    assert page.locator("#shown").inner_text() == "12 jobs" and len(ranks(page)) == 12
    page.locator("#text").fill("0.001 4")
    assert page.locator("#shown").inner_text() == "2 of 12 jobs"
    page.locator("#text").fill("no such job")
    assert ranks(page) == [] and curves(page) == []
    matches = "typed => matchesFilter('data of v2.5.1, lr 5e-3', typed)"
    assert [page.evaluate(matches, typed) for typed in ("0.005 v2", "rate", "6e-3")] == [True, False, False]


def test_sweep_page_is_sorted_and_read_by_keyboard(open_page: Any, tmp_path: Path) -> None:
    page = open_page(grid(tmp_path / "sweep"))
    assert {"input text", "select axis", "div chart", "select first-job"} <= {*page_checks.keyboard_stops(page)}
    assert ranks(page)[:4] == ["1", "1", "3", "4"]  # two have equal losses
    header = page.get_by_role("columnheader", name="final validation loss")
    header.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending" and page.locator("[aria-sort]").count() == 1
    column = header.evaluate("header => header.cellIndex")
    cells = page.evaluate(
        "column => [...document.querySelectorAll('#leaderboard tbody')].map((table) => table.rows[0].cells[column].dataset.v)",
        column,
    )
    losses = [float(text) for text in cells if text]
    assert losses == sorted(losses) and len(losses) == 10
    page.keyboard.press("Enter")
    # rows without a value stay last
    assert header.get_attribute("aria-sort") == "descending" and ranks(page)[-1] == "–"
    page.locator("#chart").focus()
    page.keyboard.press("End")
    assert (
        page.locator("#hovered")
        .inner_text()
        .startswith(f"{LR}=1e-4 {ACC}=1 {DECAY}=0.0: validation loss 2 at step 40, 6.4k tokens")
    )
    page.keyboard.press("ArrowLeft")
    assert "at step 35" in page.locator("#hovered").inner_text()


def test_sweep_page_lets_a_row_stand_out_and_keeps_it_over_a_reload(open_page: Any, tmp_path: Path) -> None:
    page = open_page(grid(tmp_path / "sweep"))
    page.get_by_role("button", name=f"pick {LR}=1e-3 {ACC}=1 {DECAY}=0.0 out").click()
    row = page.evaluate("lmRunner.picked()")
    assert (
        page.evaluate("lmRunner.data.jobs")[curves(page)[-1]["job"]]["row"] == row
        and page.locator(".line.picked").count() == 1
    )
    page.locator("#text").fill("1e-3")
    page.reload()
    assert page.evaluate("lmRunner.picked()") == row and page.locator("#shown").inner_text() == "4 of 12 jobs"


def test_sweep_page_is_zoomed_by_a_drag_that_picks_nothing(open_page: Any, tmp_path: Path) -> None:
    page = open_page(grid(tmp_path / "sweep"))
    box = page.locator("#chart .u-over").bounding_box()
    x, y, width = box["x"], box["y"] + box["height"] / 2, box["width"]
    page.mouse.move(x + width / 2, y)
    page.mouse.down()
    page.mouse.move(x + width - 1, y, steps=4)
    page.mouse.up()
    scales = page.evaluate(
        "[lmRunner.chart().scales.x.min, lmRunner.chart().scales.x.max, lmRunner.chart().scales.y.max]"
    )
    seen = [
        loss
        for curve in curves(page)
        for step, loss in zip(curve["x"], curve["y"], strict=True)
        if loss is not None and scales[0] <= step <= scales[1]
    ]
    assert (
        scales[0] == pytest.approx(3200, rel=0.01)
        and scales[2] < 1.1 * max(seen)
        and page.evaluate("lmRunner.picked()") is None
    )
    page.mouse.dblclick(x + width / 2, y)
    # tokens
    assert page.evaluate("[lmRunner.chart().scales.x.min, lmRunner.chart().scales.x.max, lmRunner.picked()]") == [
        0,
        6400,
        None,
    ]


def test_sweep_page_shows_effects_parallel_lines_failures_and_two_jobs(open_page: Any, tmp_path: Path) -> None:
    page = open_page(grid(tmp_path / "sweep"))
    assert (
        page.locator(".effect[data-key='optimizer.lr'] circle").count() == 9
        and page.locator(".effect[data-key='optimizer.lr'] .cross").count() == 1
    )
    assert page.locator("#parallel .line").count() == 10  # 9 completed, one diverged
    assert (
        "Killed" in page.locator("#failed").inner_text()
        and "python runner/train.py train.max_steps=40" in page.locator("#failed").inner_text()
    )
    assert "overfits: 2.0000 at step 10, now 2.9000" in page.locator("#leaderboard").inner_text()
    rows = page.locator("#diff tbody tr").all_inner_texts()
    first, second = [
        "".join(page.locator(f"#{name} option:checked").all_inner_texts()) for name in ("first-job", "second-job")
    ]
    assert (
        rows[-1].split("\t")[0] == "validation loss"
        and all(len(row.split("\t")) == 3 for row in rows)
        and first != second
    )
    page.locator("#second-job").select_option(page.locator("#first-job").input_value())
    assert page.locator("#diff").inner_text() == "The same job twice."


def seeds(folder: Path, **last: Any) -> Path:
    """Write a sweep of 2 x 2 points with three seeds; `last` changes the last job."""
    jobs = [
        job(
            {LR: lr, ACC: acc, "seed": str(seed)},
            training(2 + i + 0.2 * j + 0.01 * seed),
            started=f"2026-11-21T10:0{i}:{10 * j + 20 * seed:02}+00:00",
            ended=f"2026-11-21T10:0{i}:{10 * j + 20 * seed + 9:02}+00:00",
            run={"export": {"weights": "final", "step": 40, "loss": 2 + i + 0.2 * j + 0.01 * seed}},
        )
        for i, lr in enumerate(("1e-3", "1e-2"))
        for j, acc in enumerate(("1", "4"))
        for seed in (0, 1, 2)
    ]
    jobs[-1] |= last
    return write_page(write_sweep(folder, jobs))


def test_sweep_page_draws_a_mean_and_band_per_point(open_page: Any, tmp_path: Path) -> None:
    page = open_page(seeds(tmp_path / "sweep"))
    page.locator("#training").uncheck()
    assert len(curves(page)) == 4
    best = curves(page)[-1]
    assert best["job"] is None and best["seeds"] == 3 and best["step"] == [10, 20, 30, 40]
    ends = [best[name][-1] for name in ("low", "y", "high")]
    assert ends == pytest.approx([2.0, 2.01, 2.02])
    page.locator("#chart").focus()
    page.keyboard.press("End")
    text = page.locator("#hovered").inner_text()
    assert text.startswith(f"{LR}=1e-3 {ACC}=1: mean of 3 seeds, validation loss 2.01 (2 to 2.02) at step 40")
    page.locator("button.pick").first.click()
    picked = [curve for curve in curves(page) if curve["row"] == 0]
    assert len(curves(page)) == 7 and sorted(curve["y"][-1] for curve in picked) == pytest.approx([2, 2.01, 2.01, 2.02])


def test_sweep_page_leaves_a_diverged_seed_out_of_the_mean(open_page: Any, tmp_path: Path) -> None:
    diverged = {"records": [record(1, 9.0), record(10, 5.0, kind="eval"), record(11, None)], "status": "failed"}
    page = open_page(seeds(tmp_path / "sweep", **diverged, loss="inf", error="diverged"))
    means = {curve["kind"]: curve for curve in curves(page) if curve["row"] == 3}
    assert means["validation"]["seeds"] == 2 and means["validation"]["step"] == [10, 20, 30, 40]
    assert means["training"]["lost"] == [11 * 160]  # by tokens
    assert "12 jobs: 11 completed, 1 diverged" in page.locator("header").inner_text()
    assert "diverged\n1\nfailed\n0" in page.locator(".facts").inner_text()
    assert page.locator("#heat").inner_text().split("\n")[-1].split("\t")[-1] == "diverged"
    assert page.locator("#timeline rect.diverged").count() == 1
    assert page.locator("#failed h2").inner_text() == "Failed and diverged jobs"


def test_sweep_page_marks_jobs_that_are_paused(open_page: Any, viewport: tuple[int, str], tmp_path: Path) -> None:
    run = {"status": "interrupted", "outcome": "paused", "step": 10, "attempts": [{"total_steps": 20}]}
    jobs = [job({LR: lr, ACC: acc}, training(2.0)) for lr in "12" for acc in "14"]
    for each in jobs[2:]:
        times = {"started": "2026-11-21T10:00:00+00:00", "ended": "2026-11-21T10:00:09+00:00"}
        each |= {"records": training(3.0, steps=10), "status": "paused", "run": dict(run), **times}
    folder = write_sweep(tmp_path / "sweep", jobs, sweeper="halving")
    for acc, share in (("1", "0.5"), ("4", "0.25")):
        hydra = folder / f"{LR}=2,{ACC}={acc}" / ".hydra"
        hydra.mkdir()
        (hydra / "config.yaml").write_text(f"train: {{stop_at: {share}}}\n")
    page = open_page(write_page(folder), *viewport)
    assert [curve["isPaused"] for curve in curves(page)] == [True] * 4 + [False] * 4
    assert "paused\n2" in page.locator(".facts").inner_text()
    cells = page.locator("#heat tbody tr").last.inner_text()
    assert cells == "2\tpaused at 1/2: 3.000\tpaused at 1/4: 3.000"
    assert page.locator("#timeline rect.paused").count() == 2
    assert page_checks.overflow(page) == [] and page_checks.low_contrast(page) == [] and page_checks.unnamed(page) == []


def test_sweep_page_shows_the_loss_of_two_settings_as_cells(open_page: Any, tmp_path: Path) -> None:
    page = open_page(seeds(tmp_path / "two"))
    assert not page.locator("#heat-rows").is_visible()
    assert page.locator("#heat tr").all_inner_texts() == ["\t1\t4", "1e-3\t2.010\t2.210", "1e-2\t3.010\t3.210"]
    assert page.locator("#heat .best").all_inner_texts() == ["2.010"]
    page.locator("#heat button").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("lmRunner.picked()") == 1
    assert page.locator("#heat button:focus").get_attribute("aria-pressed") == "true"
    # the best of a cell of three settings has a diverged and a failed neighbour, one cell was not run
    page = open_page(grid(tmp_path / "three"))
    page.locator("#heat-rows").select_option(LR)
    page.locator("#heat-columns").select_option(ACC)
    cells = [row.split("\t")[1:] for row in page.locator("#heat tbody tr").all_inner_texts()]
    assert cells == [["2.000", "2.100"], ["3.000", "3.100"], ["4.000", "diverged"]]
    page.locator("#heat-over").select_option("mean")
    assert page.locator("#heat tbody tr").first.inner_text() == "1e-4\t2.000\t2.105"
    page.locator("#heat-columns").select_option(LR)
    assert page.locator("#heat").inner_text() == "Choose two different settings."


def test_sweep_page_shows_history_and_timeline_of_its_jobs(open_page: Any, tmp_path: Path) -> None:
    page = open_page(seeds(tmp_path / "sweep"))
    assert page.locator("#history circle").count() == 12 and page.locator("#timeline rect.completed").count() == 12
    assert page.locator("#history circle title").first.text_content() == f"1. {LR}=1e-3 {ACC}=1 seed=0: 2"
    assert (
        len({*page.evaluate("[...document.querySelectorAll('#timeline rect')].map((e) => e.getAttribute('y'))")}) == 1
    )
    assert page.locator("#timeline").inner_text().endswith("12 completed")
    few = [job({LR: lr}, training(2.0), started="2026-11-21T10:00:00+00:00") for lr in "123"]
    assert open_page(write_page(write_sweep(tmp_path / "few", few))).locator("#history-section").count() == 0


def test_sweep_page_shows_the_status_without_scrolling(open_page: Any, tmp_path: Path) -> None:
    page = open_page(seeds(tmp_path / "sweep"))
    box = page.get_by_role("columnheader", name="status").bounding_box()
    assert box["x"] + box["width"] < 1280
    final = page.get_by_role("columnheader", name="final validation loss")
    assert final.count() == 0  # as the loss of model/
    page.locator("#all-columns").check()
    assert final.is_visible()
    page.reload()
    assert final.is_visible()


def test_sweep_page_headings_and_ticks_are_apart_and_in_the_picture(open_page: Any, tmp_path: Path) -> None:
    names = ("optimizer.learning_rate", "train.accumulation_steps", "model.intermediate_size")
    jobs = [
        job({names[0]: f"{0.0011 * 1.3**i:.9f}", names[1]: str(i % 4), names[2]: str(i % 3)}, training(2 + i / 20))
        for i in range(20)
    ]
    page = open_page(write_page(write_sweep(tmp_path / "sweep", jobs)), 390)
    boxes = """(selector) => [...document.querySelectorAll(selector)].map((e) => {
      const box = e.getBoundingClientRect(), picture = e.closest("svg").getBoundingClientRect();
      return [box.left, box.right, box.top, box.bottom, picture.left, picture.right]; })"""
    headings = page.evaluate(boxes, "#parallel .axis-title")
    ticks = page.evaluate(boxes, f".effect[data-key='{names[0]}'] .axis-text[text-anchor=middle]")
    assert len(headings) == 4 and len(ticks) == 5
    for found in (headings, ticks):
        assert all(left >= start and right <= end for left, right, _, _, start, end in found)
        assert all(a[1] < b[0] for a, b in zip(found, found[1:], strict=False))


def test_sweep_page_names_the_curve_below_the_pointer_after_a_zoom(open_page: Any, tmp_path: Path) -> None:
    sparse = [record(step, 2.87, kind="eval") for step in (1, 100)]
    dense = [record(step, 2.8 + step / 1000, kind="eval") for step in range(1, 101)]
    jobs = [job({LR: "1"}, sparse), job({LR: "2"}, dense), job({LR: "3"}, [record(1, 5.0, kind="eval")])]
    page = open_page(write_page(write_sweep(tmp_path / "sweep", jobs)))
    page.locator("#chart").scroll_into_view_if_needed()
    box = page.locator("#chart .u-over").bounding_box()
    x, y, width = box["x"], box["y"], box["width"]
    page.mouse.move(x + width * 0.3, y + 60)
    page.mouse.down()
    page.mouse.move(x + width * 0.7, y + 60, steps=4)
    page.mouse.up()
    after_zoom = page.locator("#hovered").inner_text()
    page.mouse.move(x + width * 0.7 + 1, y + 60)
    assert after_zoom == page.locator("#hovered").inner_text()
    page.mouse.move(x + width / 2, y + page.evaluate("lmRunner.chart().valToPos(2.87, 'y')"))
    assert page.locator("#hovered").inner_text().startswith(f"{LR}=1: validation loss 2.87 at step")
    page.mouse.move(x + width / 2, y - 40)
    assert page.locator("#hovered").inner_text().strip() == ""


def test_sweep_page_fits_the_screen_and_can_be_read(open_page: Any, viewport: tuple[int, str], tmp_path: Path) -> None:
    page = open_page(grid(tmp_path / "sweep"), *viewport)
    assert page_checks.overflow(page) == [] and page_checks.low_contrast(page) == [] and page_checks.unnamed(page) == []


def test_sweep_page_of_hostile_text_stays_text(open_page: Any, tmp_path: Path) -> None:
    hostile = job(
        {HOSTILE: HOSTILE, LR: "1", " b  c": "c"},
        training(2.0),
        status="failed",
        error=HOSTILE,
        last_lines=[HOSTILE],
        name="a<b>",
    )
    other = job({HOSTILE: f"{HOSTILE}2", LR: "2", " b  c": "d"}, training(3.0), name="b")
    page = open_page(
        write_page(write_sweep(tmp_path / "sweep", [hostile, other], overrides=(HOSTILE,), status=HOSTILE))
    )
    assert (
        page.locator("img, script:not([type]) ~ script ~ script ~ script").count() == 0
        and "<script>alert(1)" in page.locator("#diff").inner_text()
    )
    page.locator("#heat-columns").select_option("2")
    assert page.locator("#heat tbody tr").count() == 2
    page.locator("#heat-rows").select_option("0")
    assert "<script>alert(1)" in page.locator("#heat").inner_text()


@pytest.mark.parametrize("jobs", [0, 1, 200])
def test_sweep_page_draws_any_number_of_jobs(
    open_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(verdict, "MIN_JOBS", 1000)  # it takes seconds
    sweep = [
        job({LR: f"{i + 1}e-5", ACC: str(i % 4), DECAY: str(i % 3)}, training(2 + i / 100, steps=200, eval_every=10))
        for i in range(jobs)
    ]
    page = open_page(write_page(write_sweep(tmp_path / "sweep", sweep)))
    assert len(ranks(page)) == jobs and page_checks.overflow(page) == []
    if jobs:
        is_hidden = jobs > 20  # training curves, at first
        assert len(curves(page)) == jobs * (1 if is_hidden else 2)
        page.locator("#training").check()
        assert len(curves(page)) == 2 * jobs


def wait_for_reload(page: Any) -> None:
    with page.expect_navigation():
        page.clock.run_for(1000 * RELOAD_SECONDS)
    page.clock.run_for(100)  # the charts are drawn in the next frame


def test_sweep_page_follows_a_sweep_that_runs(open_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.reporting.page_server.PAGE_SECONDS", 0.0)
    monkeypatch.setattr("runner.reporting.page_server.MAX_PAGE_SHARE", float("inf"))
    waiting = [job({LR: lr}, None, status="new") for lr in "12"]
    folder = write_sweep(tmp_path / "sweep", waiting, status="running")
    with PageServer(folder_pages(folder), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = open_page(f"http://127.0.0.1:{server.server_port}/", clock=time.time())
        assert "No job has logged a step yet" in page.locator("main").inner_text()
        write_sweep(folder, [job({LR: "1"}, training(2.0)), waiting[1]], status="running")
        wait_for_reload(page)
        page.locator("#chart").wait_for()
        assert len(curves(page)) == 2 and page.evaluate("lmRunner.data.reload") == RELOAD_SECONDS
        write_sweep(folder, [job({LR: "1"}, training(2.0)), job({LR: "2"}, training(3.0))])
        wait_for_reload(page)
        page.locator("header b.completed").wait_for()
        assert page.evaluate("lmRunner.data.reload") is None and "Best" in page.locator("#verdict").inner_text()
        server.shutdown()
