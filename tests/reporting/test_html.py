"""report.html: needs nothing beside it, runs nothing, and its pictures hold for every kind of number."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_fixtures import falling, job, line, made_sweep

from runner.reporting import html, leaderboard, svg
from runner.reporting.results import read_sweep_results

LR, ACC = "optimizer.lr", "train.accumulation_steps"
NAMES = re.compile(r"<script|<img|<link|<iframe|javascript:|@import|url\((?!#)|\bon\w+=|src=", re.IGNORECASE)
VOID = {"meta", "wbr", "br"}


def drawn(folder: Path) -> str:
    leaderboard.update_report(folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def pictures(text: str) -> list[ElementTree.Element]:
    """The charts, without the colour samples of the legends."""
    return [ElementTree.fromstring(found) for found in re.findall(r'<svg viewBox="0 0 400.*?</svg>', text, re.DOTALL)]


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(text: str) -> str:
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser.text


def grid() -> list[dict]:
    return [job({LR: lr, ACC: acc}, falling(2 + i + 0.1 * j)) for i, lr in enumerate(("1e-4", "5e-4", "1e-3")) for j, acc in enumerate(("1", "4"))]


def test_the_page_asks_for_nothing_outside_itself_and_runs_nothing(tmp_path: Path) -> None:
    text = drawn(made_sweep(tmp_path, grid()))
    assert NAMES.search(text) is None
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text


HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>&'</title></style></svg>\x1b[2J\u202e\x00"


def test_no_text_of_a_sweep_becomes_part_of_the_page(tmp_path: Path) -> None:
    hostile = job({HOSTILE: HOSTILE, LR: "1"}, falling(2.0), status="failed", error=HOSTILE, last_lines=[HOSTILE], name='a"><script>b')
    folder = made_sweep(tmp_path, [hostile, job({HOSTILE: "=2", LR: "2"}, falling(2.0), name="b")], words=(f"data.path={HOSTILE}",), status=HOSTILE)
    text = drawn(folder)
    assert "<script" not in text and "<img" not in text and "\x1b" not in text and "\u202e" not in text and "\x00" not in text
    assert "<script>alert(1)</script>" in text_of(text)
    assert len(pictures(text)) == 4


def test_the_header_says_status_counts_the_line_to_continue_and_the_best_again(tmp_path: Path) -> None:
    told = text_of(drawn(made_sweep(tmp_path, [*grid(), job({LR: "1", ACC: "1"}, None, status="new")], words=("train.max_steps=40",), status="interrupted")))
    assert "interrupted · 7 jobs: 6 completed, 1 new" in told
    assert (
        f"python runner/train.py resume={tmp_path}" in told and "python runner/train.py train.max_steps=40 optimizer.lr=1e-4 train.accumulation_steps=1" in told
    )
    assert "resume=" not in text_of(drawn(made_sweep(tmp_path, grid())))
    diverged = [*grid(), job({LR: "5", ACC: "1"}, [line(1, None)], status="failed", loss="inf")]  # resume= would not run it again
    assert "resume=" not in text_of(drawn(made_sweep(tmp_path, diverged, status="failed")))


def test_every_job_has_a_row_and_a_failed_one_its_reason_and_last_lines(tmp_path: Path) -> None:
    jobs = [*grid(), job({LR: "5", ACC: "1"}, falling(9.0)[:9], status="failed", error="killed by signal 9", last_lines=["step 9 | loss 7.1"])]
    text = drawn(made_sweep(tmp_path, jobs, status="failed"))
    assert len(re.findall('<tr class="point">', text)) == 7
    assert "killed by signal 9" in text and "step 9 | loss 7.1" in text
    assert [float(found) for found in re.findall(r'<td class="n">(\d\.\d{4})</td><td class="n">\1', text)] == [2.0, 2.1, 3.0, 3.1, 4.0, 4.1]


def test_a_point_has_the_same_colour_in_the_table_the_legend_and_the_curves_whatever_its_rank(tmp_path: Path) -> None:
    jobs = grid()
    first = drawn(made_sweep(tmp_path, jobs))
    jobs[0]["lines"] = falling(9.0)  # the winner becomes the last
    second = drawn(made_sweep(tmp_path, jobs))
    for text in (first, second):
        style = re.search(r'<path class="(s\d d\d) eval"[^>]*><title>optimizer.lr=1e-4 train.accumulation_steps=1: validation', text)
        assert style and style[1] == "s0 d0"
        assert f'<path class="s0 d0" d="M1 4h24"/></svg>{LR}=1e-4 {ACC}=1<' in text
    assert '<path class="s0 d0" d="M1 4h24"/></svg>1</th>' in first and '<path class="s0 d0" d="M1 4h24"/></svg>6</th>' in second


def test_curves_run_over_steps_tokens_and_time(tmp_path: Path) -> None:
    charts = pictures(drawn(made_sweep(tmp_path, grid())))
    assert [chart.attrib["aria-label"] for chart in charts] == [
        "loss over steps",
        "loss over tokens",
        "loss over time, seconds",
        f"final validation loss over {LR}",
    ]
    for chart in charts[:3]:
        titles = [path.findtext("title") or "" for path in chart.iter("path") if "s0" in path.attrib["class"]]
        assert {title.split(": ")[1] for title in titles} == {"training loss", "validation loss"}


def test_the_last_picture_has_a_line_for_each_accumulation_and_needs_a_numeric_word(tmp_path: Path) -> None:
    *_, chart = pictures(drawn(made_sweep(tmp_path / "a", grid())))
    lines = [path for path in chart.iter("path") if "eval" in path.attrib["class"]]
    assert [(path.findtext("title") or "").split(" ")[0] for path in lines] == [f"{ACC}=1", f"{ACC}=4"]
    assert [path.attrib["d"].count("L") for path in lines] == [2, 2]
    x = [float(found) for found in re.findall(r"[ML]([\d.]+) ", lines[0].attrib["d"])]
    assert (x[1] - x[0]) / (x[2] - x[1]) == pytest.approx(math.log(5) / math.log(2), rel=0.01)  # a log axis
    words = [job({"optimizer": name}, falling(2.0)) for name in ("adamw", "muon")]
    assert len(pictures(drawn(made_sweep(tmp_path / "b", words)))) == 3
    seeds = [job({"seed": seed}, falling(2.0)) for seed in "123"]
    assert len(pictures(drawn(made_sweep(tmp_path / "c", seeds)))) == 3


def test_the_word_with_most_values_lies_along_the_last_picture(tmp_path: Path) -> None:
    jobs = [job({LR: lr, ACC: acc}, falling(2.0)) for lr in ("1e-4", "5e-4") for acc in ("1", "2", "4")]
    assert pictures(drawn(made_sweep(tmp_path, jobs)))[-1].attrib["aria-label"] == f"final validation loss over {ACC}"


def test_a_loss_that_is_not_finite_is_a_gap_and_a_cross_and_never_a_number(tmp_path: Path) -> None:
    lines = [line(1, 5.0), line(2, None), line(3, None), line(4, 3.0), line(5, None)]
    text = drawn(made_sweep(tmp_path, [job({LR: "1"}, lines), job({LR: "5"}, [line(1, None)], loss="inf"), job({LR: "2"}, [])]))
    assert not re.search(r"\b(nan|inf|None)\b", "".join(re.findall(r' (?:d|c[xy])="([^"]*)"', text)), re.IGNORECASE)
    train = next(path for path in pictures(text)[0].iter("path") if "s0" in path.attrib["class"] and "train" in path.attrib["class"])
    assert train.attrib["d"].count("M") == 2
    assert sum("s0 d0 train lost" in path.attrib["class"] for path in pictures(text)[0].iter("path")) == 2


def test_a_job_that_explodes_does_not_flatten_the_others() -> None:
    calm = [svg.PlotLine([(x, 8 - x / 20) for x in range(100)], "s0", "calm") for _ in range(3)]
    above = svg.draw_plot(
        [*calm, svg.PlotLine([(1.0, 50.0), (2.0, 90.0)], "s1", "never inside")], svg.PlotAxis(0.0, 100.0), svg.curve_y(calm), "step", "loss", "c"
    )
    assert above.count("lost") == 1 and "lost" not in svg.draw_plot(calm, svg.PlotAxis(0.0, 100.0), svg.curve_y(calm), "step", "loss", "c")
    axis = svg.curve_y([*calm, svg.PlotLine([(x, 8.0 + 10 * x) for x in range(100)], "s1", "wild")])
    assert axis.high < 9 and axis.at(8) - axis.at(4) > 0.4
    assert svg.nearest_index([2.0, 2.1, 2.2, 900.0]).high < 3


@given(st.lists(st.none() | st.floats(-1e12, 1e12), min_size=1, max_size=3000), st.integers(4, 500))
def test_thinning_keeps_both_ends_the_extremes_and_that_there_were_gaps(losses: list[float | None], limit: int) -> None:
    points = list(enumerate(losses))
    kept = svg.downsample(points, limit)
    assert kept[0] == points[0] and kept[-1] == points[-1] and kept == sorted(kept)
    assert len(kept) <= 1.5 * limit + 5
    finite = [loss for loss in losses if loss is not None]
    thinned = [loss for _, loss in kept if loss is not None]
    assert not finite or (min(finite), max(finite)) == (min(thinned), max(thinned))
    assert (None in losses) == (None in [loss for _, loss in kept])


def test_the_curves_of_a_long_run_are_about_500_points(tmp_path: Path) -> None:
    folder = made_sweep(tmp_path, [job({LR: "1"}, [line(step, 5 + math.sin(step)) for step in range(1, 5001)])])
    train = next(path for path in pictures(drawn(folder))[0].iter("path") if "train" in path.attrib["class"])
    assert 400 < train.attrib["d"].count("L") < 520


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e100, max_value=1e100) | st.none(), min_size=1, max_size=20))
def test_any_finite_numbers_make_a_whole_picture(values: list[float | None]) -> None:
    found = [value for value in values if value is not None] or [0.0]
    line_ = svg.PlotLine(list(enumerate(values)), "s0", "x", dots=2.0, spread=[1.0] * len(values))
    for y in (svg.curve_y([line_]), svg.nearest_index(found)):
        text = svg.draw_plot([line_], svg.tick_positions(found), y, "<x>", "y", "clip")
        ElementTree.fromstring(text)
        assert not re.search(r"nan|inf\b|e\+", " ".join(re.findall(r'd="([^"]*)"', text)))


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_an_axis_has_a_few_marks_in_order_and_inside(a: float, b: float) -> None:
    low, high = sorted((a, b))
    for axis in (svg.PlotAxis(low, high), svg.PlotAxis(low, high, log=True)):
        marks = axis.marks()
        assert marks == sorted(marks) and len(marks) <= 30
        assert all(-1e-9 <= axis.at(mark) <= 1 + 1e-9 for mark in marks)
    if high > low * 1.01:
        assert 2 <= len(svg.PlotAxis(low, high).marks()) <= 11


def test_an_axis_names_the_values_of_a_word_while_they_are_few() -> None:
    assert svg.tick_positions([3e-4, 1e-4, 7e-4]).marks() == [1e-4, 3e-4, 7e-4]
    assert svg.tick_positions([i / 7 for i in range(50)]).marks() == [0, 2, 4, 6]


def test_short_numbers() -> None:
    written = {0: "0", 1500: "1.5k", 2e6: "2M", 5e-4: "5e-4", 1.5e-5: "1.5e-5", 0.05: "0.05", -2000: "-2k", 8: "8", 0.01: "0.01", 1e30: "1e30", -1e-9: "-1e-9"}
    assert {value: svg.short_number(value) for value in written} == written


def test_a_sweep_of_many_points_has_a_folded_legend_and_a_page_of_bounded_size(tmp_path: Path) -> None:
    jobs = [job({LR: str(i)}, falling(2.0, steps=600)) for i in range(60)]
    text = drawn(made_sweep(tmp_path, jobs))
    assert "<summary>60 colours</summary>" in text and len(text) < 5 << 20
    text_of(text)


def test_a_long_reason_is_folded_and_whole(tmp_path: Path) -> None:
    why = "rows " + " ".join(f"data/pretrain.jsonl:{i}" for i in range(40))
    text = drawn(made_sweep(tmp_path, [job({LR: "1"}, [line(1, 2.0)], status="failed", error=why)], status="failed"))
    assert f"<summary>{why[:160]} …</summary>{why}</details>" in text


def test_links_lead_to_the_folders_of_jobs_that_have_begun(tmp_path: Path) -> None:
    jobs = [job({"x": "1"}, falling(2.0), name="a b#c?d%"), job({"x": "2"}, None, status="new"), job({"x": "3"}, None, name="../y", status="failed")]
    assert re.findall(r'href="([^"]*)"', drawn(made_sweep(tmp_path, jobs))) == ["./a%20b%23c%3Fd%25/"]


def test_the_style_sheet_has_the_colours_the_page_counts_on() -> None:
    style = html.STYLE.read_text(encoding="utf-8")
    assert all(len(re.findall(rf"\.s{i} ", style)) == 2 for i in range(html.CURVE_COLORS))  # light and dark
    assert all(f".d{i} " in style for i in range(html.CURVE_DASHES))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_browser_opens_the_page_from_the_disk(tmp_path: Path) -> None:
    leaderboard.update_report(made_sweep(tmp_path, grid()))
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={tmp_path / 'page.png'}", f"file://{tmp_path}/report.html"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (tmp_path / "page.png").stat().st_size > 10_000, done.stderr


def test_an_empty_sweep_has_a_page(tmp_path: Path) -> None:
    told = text_of(drawn(made_sweep(tmp_path, [])))
    assert "0 jobs" in told and read_sweep_results(tmp_path).best is None
