"""The comparison and the list of runs in Chromium: their numbers, controls and keyboard; no request leaves, hostile
text is inert.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import page_checks
import pytest
from report_fixtures import EVALUATION, HOSTILE, eval_record, make_run, make_sweep, train_record

from runner.reporting.compare import compare_page, read_comparison
from runner.reporting.page_server import PageServer, list_pages
from runner.reporting.run_list import file_link, list_page, scan_runs

pytestmark = pytest.mark.slow


def make_outputs(root: Path) -> Path:
    """Write a lineage, a sweep of four jobs, a diverged run with hostile text, and one that is damaged."""
    gap = [train_record(step) if step != 50 else {**train_record(step), "loss": None} for step in range(10, 110, 10)]
    base = make_run(
        root / "d1" / "base",
        [*gap, eval_record(50, 2.9), eval_record(100, 2.7)],
        name="base",
        tags=["first"],
        note="the first run",
    )
    make_run(
        root / "d1" / "hot",
        [*gap, eval_record(100, 2.4)],
        {"lr": 0.01},
        name="hot",
        started="2026-11-22T10:00:00+00:00",
    )
    sft = make_run(root / "d2" / "sft", stage="sft", init_from=f"{base}/model", evaluation={**EVALUATION, "data": "e2"})
    make_run(root / "d2" / "dpo", stage="dpo", init_from=str(sft), evaluation={**EVALUATION, "data": "e3"})
    make_run(
        root / "d3" / "bad",
        name=HOSTILE,
        note=HOSTILE,
        tags=[HOSTILE],
        stage=HOSTILE,
        status="failed",
        outcome="diverged",
        error=HOSTILE,
        init_from=HOSTILE,
    )
    make_sweep(root / "s", {f"seed={seed}": {"init_from": str(base)} for seed in range(4)})
    (root / "torn").mkdir()
    (root / "torn" / "run.json").write_text("{")
    return root


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_outputs(tmp_path_factory.mktemp("outputs"))


@pytest.fixture(scope="module")
def comparison(outputs: Path) -> Path:
    """A page of three runs, written where no other test writes."""
    path = outputs / "compare.html"
    path.write_bytes(
        compare_page(
            read_comparison([outputs / "d1" / "base", outputs / "d1" / "hot", outputs / "d3" / "bad"])
        ).encode()
    )
    return path


@pytest.fixture(scope="module")
def listing(outputs: Path) -> Path:
    path = outputs / "index.html"
    path.write_bytes(list_page(scan_runs(outputs), lambda row: file_link(row, path), is_served=False).encode())
    return path


def read_curves(page: Any) -> list[list[Any]]:
    """Return [label, x, y] of each curve that the chart draws."""
    return page.evaluate("""() => { const { chart, curves, data } = window.lmRunner; const u = chart(); return curves().map((curve, index) => {
      const kept = u.data[0].map((x, at) => [x, u.data[index + 1][at]]).filter(([, y]) => y !== undefined);
      return [`${data.runs[curve.run].label} ${curve.kind}`, kept.map(([x]) => x), kept.map(([, y]) => y)]; }); }""")


def logged(folder: Path, kind: str, field: str) -> list[Any]:
    return [
        record[field]
        for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if record["kind"] == kind
    ]


def test_comparison_draws_what_metrics_jsonl_holds(open_page: Any, comparison: Path, outputs: Path) -> None:
    page = open_page(comparison)
    page.select_option("#axis", "tokens")
    page.evaluate(
        "() => { const e = document.getElementById('smoothing'); e.value = 0; e.dispatchEvent(new Event('input')); }"
    )
    curves = {label: (x, y) for label, x, y in read_curves(page)}
    base = outputs / "d1" / "base"
    assert len(curves) == 6 and curves["base eval"] == (logged(base, "eval", "tokens"), logged(base, "eval", "loss"))
    x, y = curves["base train"]
    points = dict(zip(x, y, strict=True))
    assert all(
        points[tokens] == (None if loss is None else pytest.approx(loss))
        for tokens, loss in zip(logged(base, "train", "tokens"), logged(base, "train", "loss"), strict=True)
    )


def test_comparison_fits_the_y_axis_to_the_part_that_is_zoomed_into(open_page: Any, comparison: Path) -> None:
    page = open_page(comparison)
    page.evaluate("() => lmRunner.chart().setScale('x', { min: 60, max: 100 })")
    page.wait_for_function("() => lmRunner.chart().scales.x.min === 60")
    values = [
        value
        for curve in page.evaluate("() => lmRunner.curves()")
        for x, value in zip(curve["x"], curve["values"], strict=True)
        if 60 <= x <= 100 and value is not None
    ]
    low, high = page.evaluate("() => [lmRunner.chart().scales.y.min, lmRunner.chart().scales.y.max]")
    margin = (max(values) - min(values)) * 0.06
    assert min(values) - margin < low < min(values) and max(values) < high < max(values) + margin


def test_comparison_controls_choose_curves_sort_and_filter_by_keyboard(open_page: Any, comparison: Path) -> None:
    page = open_page(comparison)
    page.select_option("#kinds", "eval")
    assert len(read_curves(page)) == 3
    page.focus("input[data-show='0']")
    page.keyboard.press("Space")
    assert [label.split(" ")[0] for label, _, _ in read_curves(page)] == [
        "hot",
        "</script><script>alert(1)</script><img",
    ]
    first = "() => document.querySelector('#runs tbody tr td[data-value]').dataset.value"
    page.get_by_role("button", name="best evaluation loss").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(first) == "hot" and page.get_attribute("#runs th[aria-sort]", "aria-sort") == "ascending"
    page.keyboard.press("Enter")
    assert page.evaluate(first) == "base" and page.get_attribute("#runs th[aria-sort]", "aria-sort") == "descending"
    page.fill("#filter", "first base")
    assert page.locator("#runs tbody tr:visible").count() == 1 and page.inner_text("#count") == "1 of 3 runs"
    page.click("#show-none")
    page.fill("#filter", "")
    page.click("#show-none")
    assert "No curve is chosen" in page.inner_text("#plot")
    page.click("#show-all")
    page.check("#log")
    assert len(read_curves(page)) == 3 and page.evaluate("() => window.lmRunner.chart().scales.y.distr") == 3


def test_pages_of_several_runs_fit_the_screen_and_are_readable(
    open_page: Any, viewport: tuple[int, str], comparison: Path, listing: Path
) -> None:
    for path in (comparison, listing):
        page = open_page(path, *viewport)
        assert (
            page_checks.overflow(page) == []
            and page_checks.low_contrast(page) == []
            and page_checks.unnamed(page) == []
        )


def test_comparison_wraps_long_values_inside_of_their_cells(open_page: Any, tmp_path: Path) -> None:
    long = {
        name: make_run(tmp_path / name, settings={"path": f"/data/{name * 60}.jsonl", "betas": [0.9, 0.95]})
        for name in ("a", "b", "c")
    }
    (tmp_path / "page.html").write_text(compare_page(read_comparison([*long.values()])))
    for width in (1280, 390):
        page = open_page(tmp_path / "page.html", width)
        assert page_checks.overprinted(page) == [] and page_checks.overflow(page) == []


def test_list_filters_sorts_and_gives_the_command_of_a_comparison(open_page: Any, listing: Path, outputs: Path) -> None:
    page = open_page(listing)
    visible = page.locator("#runs tbody tr:visible")
    assert visible.count() == 7 and page.locator("svg .box").count() == 4 and page.locator("svg .edge").count() == 3
    page.check("#jobs")
    assert visible.count() == 11
    page.select_option("#stage", "sft")
    assert visible.count() == 1
    page.select_option("#stage", "")
    page.uncheck("#jobs")
    page.fill("#filter", "FIRST")
    assert visible.count() == 1 and "base" in visible.inner_text()
    page.check("#runs tbody tr:visible input")
    page.fill("#filter", "hot")
    page.check("#runs tbody tr:visible input")
    assert page.input_value("#command").endswith(f"run={outputs}/d1/hot,{outputs}/d1/base")
    page.fill("#filter", "")
    page.get_by_role("button", name="evaluation loss").click()
    assert page.locator("#runs tbody tr").first.inner_text().find("hot") >= 0


@pytest.fixture
def server(outputs: Path) -> Iterator[str]:
    with PageServer(list_pages(outputs), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_served_list_opens_runs_and_comparisons_and_keeps_its_controls(open_page: Any, server: str) -> None:
    page = open_page(server)
    page.get_by_role("link", name="base", exact=True).first.click()
    assert page.url == f"{server}run/d1/base/" and page.inner_text("h1") == "Run base"
    page.go_back()
    page.fill("#filter", "d1/")
    for box in page.locator("#runs tbody tr:visible input").all():
        box.check()
    page.reload()
    assert page.input_value("#filter") == "d1/" and page.locator("#runs tbody tr:visible input:checked").count() == 2
    page.focus("#compare")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{server}compare?*")
    assert page.inner_text("h1") == "2 runs compared" and len(read_curves(page)) == 4
