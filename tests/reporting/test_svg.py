"""Plots hold for every kind of number."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.reporting.sweep_page import svg


def test_loss_axis_is_not_flattened_by_one_diverging_line() -> None:
    calm = [svg.PlotLine([(x, 8 - x / 20) for x in range(100)], "s0", "calm") for _ in range(3)]
    axis = svg.loss_axis([*calm, svg.PlotLine([(x, 8.0 + 10 * x) for x in range(100)], "s1", "diverging")])
    assert axis.high < 9 and axis.fraction(8) - axis.fraction(4) > 0.4
    assert svg.value_axis([2.0, 2.1, 2.2, 900.0]).high < 3


def test_line_above_the_plot_is_drawn_as_a_cross() -> None:
    inside = [svg.PlotLine([(x, 8 - x / 20) for x in range(100)], "s0", "inside")]
    above = svg.PlotLine([(1.0, 50.0), (2.0, 90.0)], "s1", "above")
    x, y = svg.PlotAxis(0.0, 100.0), svg.loss_axis(inside)
    assert svg.draw_plot([*inside, above], x, y, "step", "loss", "c").count("lost") == 1
    assert "lost" not in svg.draw_plot(inside, x, y, "step", "loss", "c")


@settings(max_examples=40)
@given(st.lists(st.none() | st.floats(-1e12, 1e12), min_size=1, max_size=600), st.integers(4, 200))
def test_downsample_keeps_ends_extremes_and_gaps(losses: list[float | None], limit: int) -> None:
    points = list(enumerate(losses))
    chosen = svg.downsample(points, limit)
    assert chosen[0] == points[0] and chosen[-1] == points[-1] and chosen == sorted(chosen)
    assert len(chosen) <= 1.5 * limit + 5
    before, after = ([loss for _, loss in part if loss is not None] for part in (points, chosen))
    assert not before or (min(before), max(before)) == (min(after), max(after))
    assert (None in losses) == (None in [loss for _, loss in chosen])


@settings(max_examples=60)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e100, max_value=1e100) | st.none(), min_size=1, max_size=20))
def test_plot_of_any_finite_numbers_is_valid_xml_without_exponents(values: list[float | None]) -> None:
    finite = [value for value in values if value is not None] or [0.0]
    line = svg.PlotLine(list(enumerate(values)), "s0", "x", dot_radius=2.0, deviations=[1.0] * len(values))
    for y in (svg.loss_axis([line]), svg.value_axis(finite)):
        text = svg.draw_plot([line], svg.swept_axis(finite), y, "<x>", "y", "clip")
        ElementTree.fromstring(text)
        assert not re.search(r"nan|inf\b|e\+", " ".join(re.findall(r'd="([^"]*)"', text)))


@settings(max_examples=60)
@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_axis_has_a_few_ordered_ticks_inside_its_range(a: float, b: float) -> None:
    low, high = sorted((a, b))
    for axis in (svg.PlotAxis(low, high), svg.PlotAxis(low, high, log=True)):
        ticks = axis.tick_values()
        assert ticks == sorted(ticks) and len(ticks) <= 30
        assert all(-1e-9 <= axis.fraction(tick) <= 1 + 1e-9 for tick in ticks)
    if high > low * 1.01:
        assert 2 <= len(svg.PlotAxis(low, high).tick_values()) <= 11


def test_swept_axis_has_a_tick_per_value_while_they_are_few() -> None:
    assert svg.swept_axis([3e-4, 1e-4, 7e-4]).tick_values() == [1e-4, 3e-4, 7e-4]
    assert svg.swept_axis([i / 7 for i in range(50)]).tick_values() == [0, 2, 4, 6]


def test_short_number_has_at_most_four_digits_and_a_unit() -> None:
    written = {0: "0", 1500: "1.5k", 2e6: "2M", 5e-4: "5e-4", 1.5e-5: "1.5e-5", 0.05: "0.05", -2000: "-2k", 8: "8", 0.01: "0.01", 1e30: "1e30", -1e-9: "-1e-9"}
    assert {value: svg.short_number(value) for value in written} == written
