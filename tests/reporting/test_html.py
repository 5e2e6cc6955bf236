"""report.html: needs no other file, runs no script, escapes every text."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sweep_fixtures import job, record, training, write_sweep

from runner.reporting import page_template
from runner.reporting.sweep_page import page as html
from runner.reporting.sweep_results.leaderboard import update_report

LR, ACC = "optimizer.lr", "train.accumulation_steps"
ACTIVE_CONTENT = re.compile(r"<script|<img|<link|<iframe|javascript:|@import|url\((?!#)|\bon\w+=|src=", re.IGNORECASE)
VOID_TAGS = {"meta", "wbr", "br"}
HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>&'</title></style></svg>{{ 7 * 7 }}\x1b[2J\u202e\x00"


def page_of(folder: Path) -> str:
    update_report(folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def plots(page: str) -> list[ElementTree.Element]:
    """The plots of a page, without the colour samples of its legends."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r'<svg viewBox="0 0 400.*?</svg>', page, re.DOTALL)]


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
        self.text += data


def text_of(page: str) -> str:
    parser = BalancedParser()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.text


def grid() -> list[dict]:
    return [job({LR: lr, ACC: acc}, training(2 + i + 0.1 * j)) for i, lr in enumerate(("1e-4", "5e-4", "1e-3")) for j, acc in enumerate(("1", "4"))]


def test_html_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    page = page_of(write_sweep(tmp_path, grid()))
    assert ACTIVE_CONTENT.search(page) is None
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page


def test_html_escapes_hostile_text_of_sweep_json(tmp_path: Path) -> None:
    hostile = job({HOSTILE: HOSTILE, LR: "1"}, training(2.0), status="failed", error=HOSTILE, last_lines=[HOSTILE], name='a"><script>b')
    jobs = [hostile, job({HOSTILE: "=2", LR: "2"}, training(2.0), name="b")]
    page = page_of(write_sweep(tmp_path, jobs, overrides=(f"data.path={HOSTILE}",), status=HOSTILE))
    assert not [text for text in ("<script", "<img", "\x1b", "\u202e", "\x00") if text in page]
    assert "<script>alert(1)</script>" in text_of(page) and "{{ 7 * 7 }}" in text_of(page)
    assert len(plots(page)) == 4


def test_html_header_has_status_counts_and_commands(tmp_path: Path) -> None:
    jobs = [*grid(), job({LR: "1", ACC: "1"}, None, status="new")]
    text = text_of(page_of(write_sweep(tmp_path, jobs, overrides=("train.max_steps=40",), status="interrupted")))
    assert "interrupted · 7 jobs: 6 completed, 1 new" in text
    assert f"python runner/train.py resume={tmp_path}" in text
    assert "python runner/train.py train.max_steps=40 optimizer.lr=1e-4 train.accumulation_steps=1" in text
    assert "resume=" not in text_of(page_of(write_sweep(tmp_path, grid())))
    diverged = [*grid(), job({LR: "5", ACC: "1"}, [record(1, None)], status="failed", loss="inf")]  # resume= would not run it again
    assert "resume=" not in text_of(page_of(write_sweep(tmp_path, diverged, status="failed")))


def test_html_has_a_row_per_job_and_the_reason_and_output_of_a_failed_one(tmp_path: Path) -> None:
    jobs = [*grid(), job({LR: "5", ACC: "1"}, training(9.0)[:9], status="failed", error="killed by signal 9", last_lines=["step 9 | loss 7.1"])]
    page = page_of(write_sweep(tmp_path, jobs, status="failed"))
    assert len(re.findall('<tr class="point">', page)) == 7
    assert "killed by signal 9" in page and "step 9 | loss 7.1" in page
    assert [float(loss) for loss in re.findall(r'<td class="n">(\d\.\d{4})</td>\s*<td class="n">\1', page)] == [2.0, 2.1, 3.0, 3.1, 4.0, 4.1]


def test_html_colour_of_a_row_does_not_depend_on_its_rank(tmp_path: Path) -> None:
    jobs = grid()
    first = page_of(write_sweep(tmp_path, jobs))
    jobs[0]["records"] = training(9.0)  # the best becomes the worst
    second = page_of(write_sweep(tmp_path, jobs))
    swatch = '<path class="s0 d0" d="M1 4h24"/></svg>'
    for page in (first, second):
        style = re.search(r'<path class="(s\d d\d) eval"[^>]*><title>optimizer.lr=1e-4 train.accumulation_steps=1: validation', page)
        assert style and style[1] == "s0 d0"
        assert f"{swatch}{LR}=1e-4 {ACC}=1<" in page
    assert f"{swatch}1</th>" in first and f"{swatch}6</th>" in second


def test_html_curves_are_over_steps_tokens_and_time(tmp_path: Path) -> None:
    drawn = plots(page_of(write_sweep(tmp_path, grid())))
    labels = [plot.attrib["aria-label"] for plot in drawn]
    assert labels == ["loss over steps", "loss over loss tokens", "loss over time, seconds", f"final validation loss over {LR}"]
    for plot in drawn[:3]:
        titles = [path.findtext("title") or "" for path in plot.iter("path") if "s0" in path.attrib["class"]]
        assert {title.split(": ")[1] for title in titles} == {"training loss", "validation loss"}


def test_html_final_plot_has_a_line_per_value_of_the_other_key(tmp_path: Path) -> None:
    *_, plot = plots(page_of(write_sweep(tmp_path, grid())))
    lines = [path for path in plot.iter("path") if "eval" in path.attrib["class"]]
    assert [(path.findtext("title") or "").split(" ")[0] for path in lines] == [f"{ACC}=1", f"{ACC}=4"]
    assert [path.attrib["d"].count("L") for path in lines] == [2, 2]
    x = [float(pixel) for pixel in re.findall(r"[ML]([\d.]+) ", lines[0].attrib["d"])]
    assert (x[1] - x[0]) / (x[2] - x[1]) == pytest.approx(math.log(5) / math.log(2), rel=0.01)  # a log axis


@pytest.mark.parametrize(("key", "values"), [("optimizer", ["adamw", "muon"]), ("seed", ["1", "2", "3"])])
def test_html_has_no_final_plot_without_a_numeric_swept_key(tmp_path: Path, key: str, values: list[str]) -> None:
    assert len(plots(page_of(write_sweep(tmp_path, [job({key: value}, training(2.0)) for value in values])))) == 3


def test_html_final_plot_is_over_the_key_with_most_values(tmp_path: Path) -> None:
    jobs = [job({LR: lr, ACC: acc}, training(2.0)) for lr in ("1e-4", "5e-4") for acc in ("1", "2", "4")]
    assert plots(page_of(write_sweep(tmp_path, jobs)))[-1].attrib["aria-label"] == f"final validation loss over {ACC}"


def test_html_draws_a_loss_that_is_not_finite_as_gap_and_cross(tmp_path: Path) -> None:
    records = [record(1, 5.0), record(2, None), record(3, None), record(4, 3.0), record(5, None)]
    page = page_of(write_sweep(tmp_path, [job({LR: "1"}, records), job({LR: "5"}, [record(1, None)], loss="inf"), job({LR: "2"}, [])]))
    assert not re.search(r"\b(nan|inf|None)\b", "".join(re.findall(r' (?:d|c[xy])="([^"]*)"', page)), re.IGNORECASE)
    train = next(path for path in plots(page)[0].iter("path") if "s0" in path.attrib["class"] and "train" in path.attrib["class"])
    assert train.attrib["d"].count("M") == 2
    assert sum("s0 d0 train lost" in path.attrib["class"] for path in plots(page)[0].iter("path")) == 2


def test_html_curve_of_a_long_run_has_about_500_points(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [job({LR: "1"}, [record(step, 5 + math.sin(step)) for step in range(1, 5001)])])
    train = next(path for path in plots(page_of(folder))[0].iter("path") if "train" in path.attrib["class"])
    assert 400 < train.attrib["d"].count("L") < 520


@pytest.mark.slow
def test_html_of_many_jobs_has_a_folded_legend_and_a_bounded_size(tmp_path: Path) -> None:
    records = training(2.0, steps=300)
    page = page_of(write_sweep(tmp_path, [job({LR: str(i), ACC: str(i % 4)}, records) for i in range(120)]))
    assert "<summary>120 colours</summary>" in page and len(page) < 4 << 20
    text_of(page)


def test_html_folds_a_long_reason_and_has_it_complete(tmp_path: Path) -> None:
    error = "rows " + " ".join(f"data/pretrain.jsonl:{i}" for i in range(40))
    page = page_of(write_sweep(tmp_path, [job({LR: "1"}, [record(1, 2.0)], status="failed", error=error)], status="failed"))
    assert f"<summary>{error[:160]} …</summary>{error}</details>" in page


def test_html_links_only_to_run_directories_of_started_jobs(tmp_path: Path) -> None:
    jobs = [job({"x": "1"}, training(2.0), name="a b#c?d%"), job({"x": "2"}, None, status="new"), job({"x": "3"}, None, name="../y", status="failed")]
    assert re.findall(r'href="([^"]*)"', page_of(write_sweep(tmp_path, jobs))) == ["./a%20b%23c%3Fd%25/"]


def test_html_of_an_empty_sweep_is_written(tmp_path: Path) -> None:
    assert "0 jobs" in text_of(page_of(write_sweep(tmp_path, [])))


def test_css_has_all_colour_and_dash_classes() -> None:
    css = page_template.CSS.read_text(encoding="utf-8")
    assert all(len(re.findall(rf"\.s{i} ", css)) == 2 for i in range(html.COLORS))  # light and dark
    assert all(f".d{i} " in css for i in range(html.DASHES))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_html_opens_in_a_browser_from_the_disk(tmp_path: Path) -> None:
    update_report(write_sweep(tmp_path, grid()))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={tmp_path / 'page.png'}", f"file://{tmp_path}/report.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (tmp_path / "page.png").stat().st_size > 10_000, done.stderr
