"""Line plots as SVG text, without scripts or libraries. The page's CSS sets the colours: class sN is the N-th series."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.errors import strip_control

WIDTH, HEIGHT = 400, 270  # pixels
LEFT, RIGHT, TOP, BOTTOM = 44, 16, 10, 40
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MAX_VALUE_TICKS = 8  # with more swept values, round numbers are the ticks
SMALLEST_LOG = 1e-30  # smaller values or spans are not drawn on a log axis
PlotPoint = tuple[float, float | None]  # (x, y); None: not finite, the line has a gap
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class PlotLine:
    points: Sequence[PlotPoint]
    style: str  # CSS classes
    title: str  # tooltip
    dot_radius: float = 0.0  # 0: no dots
    deviations: Sequence[float | None] = ()  # per point: half the height of its error bar


@dataclass(frozen=True)
class PlotAxis:
    low: float
    high: float
    log: bool = False
    ticks: Sequence[float] = ()  # empty: round numbers

    def fraction(self, value: float) -> float:
        """Return 0 for the low end, 1 for the high end."""
        value = max(value, self.low / 2) if self.log else value
        low, high, value = (math.log10(part) for part in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (value - low) / (high - low) if high - low > SMALLEST_LOG else 0.5

    def tick_values(self) -> list[float]:
        is_wide = self.log and self.high > 10 * self.low
        ticks = self.ticks or (_decades(self.low, self.high) if is_wide else _round_numbers(self.low, self.high))
        return [tick for tick in ticks if self.low <= tick <= self.high]


def escape_xml(text: str) -> str:
    return html.escape(strip_control(text))


def draw_plot(lines: Sequence[PlotLine], x: PlotAxis, y: PlotAxis, x_title: str, y_title: str, clip_id: str) -> str:
    """Return one <svg>. `clip_id` is unique in its page. Values above y.high leave the plot through its upper edge."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape_xml(f"{y_title} over {x_title}")}">']
    parts.append(f'<clipPath id="{clip_id}"><rect x="{LEFT}" y="{TOP - 4}" width="{INNER_WIDTH + RIGHT}" height="{INNER_HEIGHT + 8}"/></clipPath>')
    parts += _grid(x, y)
    parts.append(f'<text class="axis" x="{LEFT + INNER_WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape_xml(x_title)}</text>')
    parts.append(f'<g clip-path="url(#{clip_id})">')
    for line in lines:
        parts += _line(line, x, y)
    return "".join([*parts, "</g></svg>"])


def _line(line: PlotLine, x: PlotAxis, y: PlotAxis) -> Iterable[str]:
    title = f"<title>{escape_xml(line.title)}</title>"
    pixels = [(_x_pixel(x, value), None if loss is None else _y_pixel(y, loss)) for value, loss in line.points]
    if path := _path(pixels):
        yield f'<path class="{line.style}" d="{path}">{title}</path>'
    finite = [y_pixel for _, y_pixel in pixels if y_pixel is not None]
    if finite and max(finite) < TOP:  # the whole line is above the plot: a cross at its first point
        yield f'<path class="{line.style} lost" d="{_cross(pixels[0][0])}">{title}</path>'
    for index, (x_pixel, y_pixel) in enumerate(pixels):
        if y_pixel is not None and line.dot_radius:
            yield f'<circle class="{line.style}" cx="{x_pixel:.1f}" cy="{y_pixel:.1f}" r="{line.dot_radius}">{title}</circle>'
        deviation, value = line.deviations[index] if line.deviations else None, line.points[index][1]
        if y_pixel is not None and deviation and value is not None:
            yield f'<path class="{line.style} bar" d="M{x_pixel:.1f} {_y_pixel(y, value - deviation):.1f}V{_y_pixel(y, value + deviation):.1f}"/>'
        if y_pixel is None and (index == 0 or pixels[index - 1][1] is not None):  # the first point of a gap
            yield f'<path class="{line.style} lost" d="{_cross(x_pixel)}">{title}</path>'


def _cross(x_pixel: float) -> str:
    return f"M{x_pixel - 4:.1f} {TOP + 2}l8 8m0 -8l-8 8"


def _path(pixels: Iterable[tuple[float, float | None]]) -> str:
    parts, is_drawing = [], False
    for x_pixel, y_pixel in pixels:
        if y_pixel is not None:
            parts.append(f"{'L' if is_drawing else 'M'}{x_pixel:.1f} {y_pixel:.1f}" + ("" if is_drawing else "h0"))  # h0: a single point is drawn as a dot
        is_drawing = y_pixel is not None
    return "".join(parts)


def _grid(x: PlotAxis, y: PlotAxis) -> Iterable[str]:
    bottom = TOP + INNER_HEIGHT
    for tick in y.tick_values():
        pixel = _y_pixel(y, tick)
        yield f'<path class="grid" d="M{LEFT} {pixel:.1f}h{INNER_WIDTH}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{pixel + 4:.1f}" text-anchor="end">{short_number(tick)}</text>'
    for tick in x.tick_values():
        pixel = _x_pixel(x, tick)
        yield f'<path class="grid" d="M{pixel:.1f} {bottom}v4"/>'
        yield f'<text class="tick" x="{pixel:.1f}" y="{bottom + 16}" text-anchor="middle">{short_number(tick)}</text>'
    yield f'<path class="frame" d="M{LEFT} {TOP}V{bottom}H{LEFT + INNER_WIDTH}"/>'


def _x_pixel(axis: PlotAxis, value: float) -> float:
    return LEFT + INNER_WIDTH * axis.fraction(value)


def _y_pixel(axis: PlotAxis, value: float) -> float:
    return max(TOP + INNER_HEIGHT * (1 - axis.fraction(value)), -9.0 * HEIGHT)  # far outside of the plot, but a number SVG can hold


def loss_axis(lines: Iterable[PlotLine]) -> PlotAxis:
    """Return a y axis that shows the losses of most lines: one diverging job leaves the plot instead of flattening the others.

    Logarithmic where all losses are positive: differences at the end are small compared with the decrease since the start.
    """
    finite = [values for line in lines if (values := [value for _, value in line.points if value is not None])]
    if not finite:
        return PlotAxis(0.0, 1.0)
    low, high = min(map(min, finite)), max(map(max, finite))
    typical = statistics.median(map(max, finite))
    axis = _padded(low, typical if high > low + 1.5 * (typical - low) else high)
    return PlotAxis(low * 0.97, axis.high, log=True) if low > SMALLEST_LOG else axis


def value_axis(values: Sequence[float]) -> PlotAxis:
    """Return a y axis that shows most of `values`; the few far above are drawn at the upper edge."""
    low, high, typical = min(values), max(values), statistics.median(values)
    top = typical + 2 * (typical - low)
    return _padded(low, top if low < top < high else high)


def swept_axis(values: Sequence[float]) -> PlotAxis:
    """Return an x axis for the values of a swept key: logarithmic where all are positive, with a tick at each while they are few."""
    low, high = min(values), max(values)
    if low > SMALLEST_LOG:
        margin = (high / low) ** 0.08 if high > low else 2.0
        axis = PlotAxis(low / margin, high * margin, log=True)
    else:
        axis = _padded(low, high)
    distinct = sorted(set(values))
    return PlotAxis(axis.low, axis.high, axis.log, _without_overlap(distinct, axis) if len(distinct) <= MAX_VALUE_TICKS else ())


def _padded(low: float, high: float) -> PlotAxis:
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return PlotAxis(low - pad, high + pad)


def _without_overlap(values: Sequence[float], axis: PlotAxis) -> list[float]:
    """Return the values whose labels do not overlap that of the value before."""
    ticks: list[float] = []
    for value in values:
        if not ticks or INNER_WIDTH * (axis.fraction(value) - axis.fraction(ticks[-1])) > 6 * (len(short_number(value)) + 1):
            ticks.append(value)
    return ticks


def _round_numbers(low: float, high: float) -> list[float]:
    """Return four to eight round numbers between low and high."""
    raw = (high - low) / 5
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if raw <= power * factor * 1.0001)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    factors = (1, 2, 5) if high < 1e4 * low else (1,)
    return [factor * 10.0**power for power in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1) for factor in factors]


def short_number(value: float) -> str:
    """Return e.g. 1500 as 1.5k, 0.0005 as 5e-4."""
    for size, unit in UNITS if abs(value) < 1e15 else ():
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    if value and not 1e-2 <= abs(value) < 1e15:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def moving_average(points: Sequence[PlotPoint]) -> list[PlotPoint]:
    """Return an exponential mean over about a fortieth of the points; gaps remain."""
    decay = 1 - 1 / max(1.0, len(points) / 40)
    total = weight = 0.0
    smoothed: list[PlotPoint] = []
    for x, y in points:
        if y is not None:
            total, weight = total * decay + y, weight * decay + 1
        smoothed.append((x, None if y is None else total / weight))
    return smoothed


def downsample(points: Sequence[PlotPoint], limit: int) -> list[PlotPoint]:
    """Return about `limit` points that look the same: first, last, and of each span the lowest, the highest and its first gap."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) // max(1, limit // 2))
    chosen = {0, len(points) - 1}
    for start in range(0, len(points), size):
        span = range(start, min(start + size, len(points)))
        finite = [(y, i) for i in span if (y := points[i][1]) is not None]
        chosen.update((min(finite)[1], max(finite)[1]) if finite else ())
        chosen.update([next(i for i in span if points[i][1] is None)] if len(finite) < len(span) else ())
    return [points[i] for i in sorted(chosen)]
