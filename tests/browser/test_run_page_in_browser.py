"""report.html of a run in a browser: it shows the numbers of metrics.jsonl, obeys its controls by mouse and keyboard,
and hostile text stays text.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import page_checks
import pytest

from runner.reporting import runs
from runner.reporting.page_kit import RELOAD_SECONDS
from runner.reporting.page_server import PageServer, folder_pages
from runner.reporting.run_page import STALE_SECONDS, write_run_page

pytestmark = pytest.mark.slow

HOSTILE = "</script></title><script>alert(1)</script><img src=x onerror=alert(2)><a href='javascript:alert(3)'>x</a>{{7*7}}\u202e\u2066${alert(4)}"
CHART = "figure[data-chart] .plot"


def train(step: int, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    loss = round(1 + 4 * math.exp(-step / 40) + 0.05 * math.sin(step), 4)
    numbers = {
        "lr": 1e-3 / step,
        "grad_norm": 1.5 + math.sin(step),
        "tokens_per_second": 4000.0 + step,
        "data_wait": 0.01,
        "peak_memory": step << 20,
    }
    return {
        "kind": "train",
        "step": step,
        "tokens": 100 * step,
        "loss_tokens": 60 * step,
        "loss": loss,
        **numbers,
        "time": 2.0 * step,
        "attempt": attempt,
        **fields,
    }


def evaluation(step: int, loss: float, attempt: int = 1) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "tokens": 100 * step,
        "loss_tokens": 60 * step,
        "loss": loss,
        "time": 2.0 * step + 0.5,
        "attempt": attempt,
    }


RECORDS = [
    record for step in range(1, 121) for record in (train(step), *([evaluation(step, 1.2 + abs(step - 80) / 100)] if step % 20 == 0 else []))
]  # fmt: skip


def write_run(folder: Path, records: list[dict[str, Any]], **fields: Any) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("- optimizer.lr=0.001\n")
    (folder / ".hydra" / "config.yaml").write_text(
        "optimizer: {name: adamw, lr: 0.001}\nstage: {name: pretrain, data_format: text}\ntrain: {epochs: 1, max_steps: 120}\n"
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.json").write_text(
        json.dumps({"status": "completed", "stage": "pretrain", "init_from": "scratch", "step": len(records), **fields})
    )
    return folder


@pytest.fixture
def run_page(tmp_path: Path) -> Path:
    folder = write_run(
        tmp_path / "run", RECORDS, data=[{"file": "rows.jsonl", "read": 40, "kept": 39, "dropped": {"empty": 1}}]
    )
    (folder / "samples.jsonl").write_text(
        "".join(json.dumps({"step": step, "prompt": "It was", "answer": f"day {step}"}) + "\n" for step in range(1, 7))
    )
    return write_run_page(folder)


def points(page: Any, chart: int = 0) -> list[dict[str, Any]]:
    """Return the visible curves of a chart: label, and the points (x, y) that uPlot draws."""
    return page.evaluate(
        """(index) => { const u = lmRunner.charts()[index];
        return u.series.slice(1).map((s, i) => ({label: s.label, show: s.show,
            points: u.data[0].map((x, j) => [x, u.data[i + 1][j]]).filter(([, y]) => y !== undefined)})); }""",
        chart,
    )


def legend(page: Any, chart: int = 0) -> dict[str, str]:
    rows = page.locator(CHART).nth(chart).locator(".u-legend .u-series")
    return {row.locator("th").inner_text(): row.locator("td").inner_text() for row in rows.all()}


def test_run_page_fits_the_screen_and_can_be_read(open_page: Any, viewport: tuple[int, str], run_page: Path) -> None:
    page = open_page(run_page, *viewport)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert [page_checks.overflow(page), page_checks.low_contrast(page), page_checks.unnamed(page)] == [[], [], []]
    assert page.locator("canvas").count() == 6


def test_run_page_shows_long_errors_and_reasons_inside_of_the_screen(open_page: Any, tmp_path: Path) -> None:
    counts = {
        name: 12_345
        for name in (
            "read",
            "kept",
            "split",
            "truncated",
            "tokens",
            "loss_tokens",
            "lost_loss_tokens",
            "longest_conversation",
        )
    }
    reasons = {
        f"the content of message {index} is no string and no list of parts with a text": 100 + index
        for index in range(6)
    }
    data = [
        {
            "file": "/data/sets/" + "long-name" * 6 + ".jsonl",
            "schema": "conversations",
            **counts,
            "bad": reasons,
            "dropped": {"empty": 3},
        }
    ]
    error = "\n".join(f"frame {line} " + "long" * 30 for line in range(100))
    folder = write_run(tmp_path / "run", RECORDS, status="failed", error=error, data=data)
    for width in (1280, 390):
        page = open_page(write_run_page(folder), width)
        assert page_checks.overflow(page) == [] and page_checks.overprinted(page) == []
        box = page.evaluate(
            "() => { const box = document.querySelector('[aria-label=data]'); return [box.scrollWidth, box.clientWidth]; }"
        )
        assert width < 1280 or box[0] <= box[1]
        assert page.locator(".error").bounding_box()["height"] < 2500
        page.click("#error summary")
        assert page.get_by_text("frame 99 ").is_visible()


def test_run_page_draws_and_shows_the_numbers_of_metrics_jsonl(open_page: Any, run_page: Path) -> None:
    page = open_page(run_page)
    losses = [[record["step"], record["loss"]] for record in RECORDS if record["kind"] == "train"]
    validation = [[record["step"], pytest.approx(record["loss"])] for record in RECORDS if record["kind"] == "eval"]
    drawn = {curve["label"]: curve["points"] for curve in points(page)}
    assert drawn["loss"] == losses and drawn["validation loss"] == validation
    assert {curve["label"]: curve["points"] for curve in points(page, 1)} == {
        "lr": [[step, pytest.approx(1e-3 / step, rel=1e-6)] for step in range(1, 121)]
    }
    chart = page.locator(CHART).nth(0)
    x = page.evaluate("(() => { const u = lmRunner.charts()[0]; return u.valToPos(57, 'x'); })()")
    chart.locator(".u-over").hover(position={"x": x, "y": 80})
    shown = legend(page)
    assert (shown["step"], shown["loss"], shown["validation loss"]) == ("57", str(losses[56][1]), "1.6 @40")
    assert legend(page, 2)["grad_norm"] == f"{1.5 + math.sin(57):.7g}" and legend(page, 4)["peak_memory"] == "57 MiB"
    page.locator("#numbers summary").click()
    first = page.locator("#numbers tbody tr").first.locator("td").all_inner_texts()
    assert first[:4] == ["120", "12,000", "240", f"{losses[-1][1]:.4f}"]


def test_run_page_draws_a_curve_for_each_validation_set(open_page: Any, tmp_path: Path) -> None:
    losses = {step: {"law": 1.2 + abs(step - 2) / 10, "chat": 2 - step / 10} for step in (1, 2, 3)}
    records = [
        record
        for step, sets in losses.items()
        for record in (
            train(step),
            {**evaluation(step, sets["law"]), **{f"loss/{name}": loss for name, loss in sets.items()}}
            | {f"perplexity/{name}": 9.0 for name in sets}
            | {"perplexity": 9.0, "exact_match": 0.5, "exact_match/law": 0.5, "exact_match/chat": step / 10}
            | {"head/acc": 0.25},
        )
    ]
    page = open_page(write_run_page(write_run(tmp_path / "run", records)))
    curves = {curve["label"]: curve["points"] for curve in points(page)}
    assert curves == {
        "loss": [[step, pytest.approx(train(step)["loss"])] for step in losses],
        **{f"validation {n} loss": [[step, pytest.approx(sets[n])] for step, sets in losses.items()] for n in ("law", "chat")},
    }  # fmt: skip
    labels = [[curve["label"] for curve in points(page, chart)] for chart in range(page.locator(CHART).count())]
    assert ["validation head/acc"] in labels  # of an objective that names it so
    titles = [chart.get_attribute("aria-label") for chart in page.locator("figure[data-chart]").all()]
    assert titles[-2] == "exact match: validation 0.5000, validation law 0.5000, validation chat 0.3000"
    assert not any("perplexity" in title for title in titles)
    assert labels[-2] == ["validation law exact_match", "validation chat exact_match"]


def test_run_page_controls_choose_axis_smoothing_and_scale(open_page: Any, run_page: Path) -> None:
    page = open_page(run_page)
    page.locator("#smoothing").fill("0")
    for axis, factor in (("tokens", 100), ("seconds", 2), ("step", 1)):
        page.locator("#axis").select_option(axis)
        assert [x for x, _ in points(page)[0]["points"]] == [factor * step for step in range(1, 121)]
    assert [curve["label"] for curve in points(page)] == ["loss", "validation loss"]
    page.locator("#smoothing").fill("0.5")
    raw, smoothed = (points(page)[index]["points"] for index in (0, 1))
    weights = [0.5**age for age in range(3)]
    assert smoothed[2][1] == pytest.approx(
        sum(weight * raw[2 - age][1] for age, weight in enumerate(weights)) / sum(weights)
    )
    scale = "(() => { const {min, max} = lmRunner.charts()[0].scales.y; return [min, max]; })()"
    highest = max(y for _, y in raw)
    assert (
        page.evaluate(scale)[1] < highest
        and page.locator(".clipped").first.inner_text() == f"· up to {highest} above the plot"
    )
    page.locator("#whole").check()
    page.wait_for_function("(highest) => lmRunner.charts()[0].scales.y.max > highest", arg=highest)
    assert page.locator(".clipped").first.inner_text() == ""
    page.locator("#log").check()
    assert page.evaluate("lmRunner.charts().map((u) => u.scales.y.distr)") == [3, 3, 3, 1, 1, 1]
    page.reload()  # the choices stay
    assert [
        page.locator("#axis").input_value(),
        page.locator("#smoothing").input_value(),
        page.locator("#log").is_checked(),
    ] == ["step", "0.5", True]


def test_run_page_is_used_with_the_keyboard_only(open_page: Any, run_page: Path) -> None:
    page = open_page(run_page)
    stops = page_checks.keyboard_stops(page)
    controls = ["select axis", "input smoothing", "input log", "input whole"]
    assert [stop for stop in stops if stop in controls] == controls and sum(
        stop.startswith("div") for stop in stops
    ) >= 6
    page.locator("#axis").focus()
    page.keyboard.type("to")
    assert page.locator("#axis").input_value() == "tokens"
    page.keyboard.press("ArrowUp")
    page.locator(CHART).nth(0).focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "Shift+ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    page.wait_for_function("() => document.querySelector('.spoken').textContent.startsWith('step 12,')")
    assert legend(page)["loss"] == str(RECORDS[11]["loss"]) and legend(page, 1)["step"] == "12"
    page.keyboard.press("+")
    page.wait_for_function("() => lmRunner.charts().every((u) => u.scales.x.max < 60)")
    page.keyboard.press("0")
    page.wait_for_function("() => lmRunner.charts().every((u) => u.scales.x.max === 120)")
    hide = page.locator(CHART).nth(0).locator("th[role=button]").first
    hide.focus()
    page.keyboard.press("Enter")
    assert hide.get_attribute("aria-pressed") == "false" and [curve["show"] for curve in points(page)][0] is False


def test_run_page_answers_after_many_zooms_and_without_curves(open_page: Any, run_page: Path) -> None:
    page = open_page(run_page)
    page.locator("#log").check()
    for name in page.locator(CHART).nth(0).locator("th[role=button]").all():
        name.click()
    page.locator(CHART).nth(0).focus()
    page.keyboard.press("ArrowRight")
    for _ in range(50):
        page.keyboard.press("+")
    page.wait_for_function("() => lmRunner.charts().every((u) => u.scales.x.max - u.scales.x.min > 1e-4)")


@pytest.mark.parametrize("lowest", [0.1, 0.0978, 1e-3, 2.5e-4, 1e-8, 2e-15])
def test_run_page_draws_small_losses_on_a_logarithmic_axis(open_page: Any, tmp_path: Path, lowest: float) -> None:
    page = open_page(write_run_page(write_run(tmp_path / "run", [*RECORDS, train(121, loss=lowest)])))
    page.locator("#log").check()
    page.wait_for_function(
        "() => { const {min, distr} = lmRunner.charts()[0].scales.y; return distr === 3 && min > 0; }"
    )
    assert page.evaluate("lmRunner.charts()[0].scales.y.min") <= lowest


def test_run_page_of_losses_near_zero_has_no_logarithmic_axis(open_page: Any, tmp_path: Path) -> None:
    page = open_page(write_run_page(write_run(tmp_path / "run", [*RECORDS, train(121, loss=1e-40)])))
    page.locator("#log").check()
    assert page.evaluate("lmRunner.charts()[0].scales.y.distr") == 1


def test_run_page_keeps_hostile_text_inert(open_page: Any, tmp_path: Path) -> None:
    fields = {
        name: HOSTILE
        for name in ("stage", "init_from", "error", "note", "name", "started", "degraded", "host", "outcome", "status")
    }
    lists = {
        "tags": [HOSTILE],
        "recovered": [HOSTILE],
        "inexact_because": [HOSTILE],
        "changed": [HOSTILE],
        "export": {"weights": HOSTILE, "step": HOSTILE},
    }
    attempt = {
        "attempt": HOSTILE,
        "error": HOSTILE,
        "environment": {HOSTILE: HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "code": {HOSTILE: HOSTILE},
    }
    data = [
        {
            "file": HOSTILE,
            "schema": HOSTILE,
            "dropped": {HOSTILE: HOSTILE},
            "lost_loss_tokens": 5,
            "loss_tokens": HOSTILE,
        }
    ]
    records = [{**train(step), HOSTILE: float(step)} for step in range(1, 9)]
    folder = write_run(tmp_path / HOSTILE.replace("/", "∕"), records, **fields, **lists, attempts=[attempt], data=data)
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": HOSTILE, "answer": HOSTILE}) + "\n")
    (folder / "evaluations.jsonl").write_text(json.dumps({HOSTILE: HOSTILE}) + "\n")
    (folder / "train.log").write_text(f"warning: {HOSTILE}\n")
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([f"run.note={HOSTILE}"]))
    (folder / ".hydra" / "config.yaml").write_text(
        json.dumps({"stage": {"name": HOSTILE, "data_format": HOSTILE}, "data": {"path": HOSTILE}, HOSTILE: HOSTILE})
    )
    path = write_run_page(folder)
    assert not any(mark in path.read_text() for mark in "\u202e\u2066")
    page = open_page(path)  # a dialog, a request or an error would fail the test
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_timeout(50)
    assert page.evaluate("[document.images.length, document.links.length, document.scripts.length]") == [0, 0, 4]
    assert (
        page.evaluate(
            "[...document.querySelectorAll('*')].flatMap((e) => [...e.attributes]).filter((a) => a.name.startsWith('on')).length"
        )
        == 0
    )
    labels = [
        curve["label"] for chart in range(page.evaluate("lmRunner.charts().length")) for curve in points(page, chart)
    ]
    assert any(label.startswith("</script></title><script>alert(1)") for label in labels) and not any(
        mark in "".join(labels) for mark in "\u202e\u2066"
    )


def test_run_page_shows_gaps_resumes_and_no_value_that_is_not_finite(open_page: Any, tmp_path: Path) -> None:
    records = [
        train(1),
        train(2, loss=None, nonfinite=["loss"]),
        train(3),
        train(4, attempt=2, time=1.0),
        train(5, attempt=2, loss=1e300),
        train(6, attempt=2),
    ]
    page = open_page(write_run_page(write_run(tmp_path / "run", [*records[:3], evaluation(3, 2.5), *records[3:]])))
    curve = dict(points(page)[0]["points"])
    assert [curve[step] is None for step in range(1, 7)] == [False, True, False, False, True, False]
    page.locator(CHART).nth(0).focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.spoken').textContent.startsWith('step 2,')")
    assert legend(page)["loss"] == "not finite"
    page.locator("#axis").select_option("seconds")
    # the second attempt begins after the last record of the first
    assert [x for x, _ in points(page)[0]["points"]] == [2, 4, 6, 7.5, 16.5, 18.5]
    assert page.evaluate("lmRunner.data.attempts") == [4] and "loss in 2 records" in page.inner_text("main")


def test_run_page_of_100_000_steps_is_small_and_quick(open_page: Any, tmp_path: Path) -> None:
    records = [
        train(step, loss=9.0 if step == 77_777 else 2 + math.sin(step) / 3, grad_norm=1 + math.sin(step) / 7)
        for step in range(1, 100_001)
    ]
    path = write_run_page(write_run(tmp_path / "run", records))
    assert path.stat().st_size < 1 << 20
    page = open_page(path)
    drawn = points(page)[0]["points"]
    assert [77_777, 9] in drawn and drawn[0][0] == 1 and drawn[-1][0] == 100_000 and len(drawn) < 2500
    assert all(y == pytest.approx(records[x - 1]["loss"], rel=1e-6) for x, y in drawn)


@pytest.fixture
def live_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that trains, as far as its page knows."""
    monkeypatch.setattr(runs, "is_alive", lambda fields: True)
    return write_run(tmp_path / "run", RECORDS[:60], status="running")


def add_record(folder: Path, step: int) -> None:
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps(train(step)) + "\n")
    write_run_page(folder)


def wait_for_step(page: Any, step: int) -> None:
    page.wait_for_function("(step) => window.lmRunner && lmRunner.data.train.step.at(-1) === step", arg=step)


def test_run_page_that_is_reloaded_keeps_what_the_reader_has_chosen(open_page: Any, live_run: Path) -> None:
    page = open_page(write_run_page(live_run), clock=time.time())
    page.locator("#axis").select_option("tokens")
    page.locator("#settings summary").click()
    page.locator(CHART).nth(0).locator("th[role=button]").last.click()
    page.evaluate("() => lmRunner.charts().forEach((u) => u.setScale('x', {min: 1000, max: 2000}))")
    page.locator("#log").focus()
    page.mouse.move(0, 0)
    page.evaluate("() => scrollTo(0, 300)")
    add_record(live_run, 90)
    page.clock.run_for(1000 * RELOAD_SECONDS)
    wait_for_step(page, 90)
    page.wait_for_function("() => lmRunner.charts()[0].scales.x.max === 2000")
    kept = "[document.getElementById('axis').value, document.getElementById('settings').open, document.activeElement.id, scrollY, lmRunner.charts()[0].scales.x.min]"
    assert page.evaluate(kept) == ["tokens", True, "log", 300, 1000]
    assert [curve["show"] for curve in points(page)] == [True, False]


def test_run_page_is_not_reloaded_while_a_value_is_read(open_page: Any, live_run: Path) -> None:
    page = open_page(write_run_page(live_run), clock=time.time())
    page.locator(".u-over").first.hover()
    add_record(live_run, 90)
    page.clock.run_for(3000 * RELOAD_SECONDS)
    assert page.evaluate("lmRunner.data.train.step.at(-1)") == 58
    page.mouse.move(0, 0)
    page.clock.run_for(1000 * RELOAD_SECONDS)
    wait_for_step(page, 90)


def test_run_page_says_when_it_was_not_written_for_long(open_page: Any, live_run: Path) -> None:
    page = open_page(write_run_page(live_run), clock=time.time() + STALE_SECONDS - 60)
    page.locator(".u-over").first.hover()  # so that it is not loaded again
    page.clock.run_for(1000 * RELOAD_SECONDS)
    assert page.locator("#stale").is_hidden()
    page.clock.run_for(3600_000)
    assert "last written 01:01:" in page.locator("#stale").inner_text()


@pytest.fixture
def server(live_run: Path) -> Iterator[str]:
    with PageServer(folder_pages(live_run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_run_page_that_is_served_follows_the_run(
    open_page: Any, server: str, live_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.reporting.page_server.PAGE_SECONDS", 0.0)
    monkeypatch.setattr("runner.reporting.page_server.MAX_PAGE_SHARE", float("inf"))
    page = open_page(server, clock=time.time())
    wait_for_step(page, 58)
    add_record(live_run, 91)
    page.clock.run_for(1000 * RELOAD_SECONDS)
    wait_for_step(page, 91)
