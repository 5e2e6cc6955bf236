"""Pictures as SVG text: they need no script, no library and no network. Colours come from the page: class sN is the N-th series."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.tracking.console import strip_control

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 44, 16, 10, 40
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MIN_TICKS = 8  # values of a word that an axis can name
SMALLEST_LOG = 1e-30  # nothing is told apart by less
PlotPoint = tuple[float, float | None]  # None: not finite, the line has a gap
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class PlotLine:
    points: Sequence[PlotPoint]
    style: str  # classes
    title: str  # shown where the mouse rests on it
    dots: float = 0.0  # their radius
    spread: Sequence[float | None] = ()  # of each point, a bar up and down


@dataclass(frozen=True)
class PlotAxis:
    low: float
    high: float
    log: bool = False
    ticks: Sequence[float] = ()  # none given: chosen

    def at(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        value = max(value, self.low / 2) if self.log else value
        low, high, value = (math.log10(part) for part in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (value - low) / (high - low) if high - low > SMALLEST_LOG else 0.5

    def marks(self) -> list[float]:
        wide = self.log and self.high > 10 * self.low
        found = self.ticks or (_decades(self.low, self.high) if wide else _nice(self.low, self.high))
        return [tick for tick in found if self.low <= tick <= self.high]


def escape_xml(text: str) -> str:
    """Text of any origin, to be shown by a browser and not obeyed."""
    return html.escape(strip_control(text))


def draw_plot(lines: Sequence[PlotLine], x: PlotAxis, y: PlotAxis, x_title: str, y_title: str, name: str) -> str:
    """One picture; `name` tells it from the others of its page. What lies above y.high leaves through the upper edge."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape_xml(f"{y_title} over {x_title}")}">']
    parts.append(f'<clipPath id="{name}"><rect x="{LEFT}" y="{TOP - 4}" width="{INNER_WIDTH + RIGHT}" height="{INNER_HEIGHT + 8}"/></clipPath>')
    parts += _grid(x, y)
    parts.append(f'<text class="axis" x="{LEFT + INNER_WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape_xml(x_title)}</text>')
    parts.append(f'<g clip-path="url(#{name})">')
    for line in lines:
        parts += _line(line, x, y)
    return "".join([*parts, "</g></svg>"])


def _line(line: PlotLine, x: PlotAxis, y: PlotAxis) -> Iterable[str]:
    title = f"<title>{escape_xml(line.title)}</title>"
    placed = [(_across(x, here), None if value is None else _down(y, value)) for here, value in line.points]
    if path := _path(placed):
        yield f'<path class="{line.style}" d="{path}">{title}</path>'
    shown = [down for _, down in placed if down is not None]
    if shown and max(shown) < TOP:  # never in the picture: where it would have begun
        yield f'<path class="{line.style} lost" d="{_cross(placed[0][0])}">{title}</path>'
    for place, (across, down) in enumerate(placed):
        if down is not None and line.dots:
            yield f'<circle class="{line.style}" cx="{across:.1f}" cy="{down:.1f}" r="{line.dots}">{title}</circle>'
        spread, value = line.spread[place] if line.spread else None, line.points[place][1]
        if down is not None and spread and value is not None:
            yield f'<path class="{line.style} bar" d="M{across:.1f} {_down(y, value - spread):.1f}V{_down(y, value + spread):.1f}"/>'
        if down is None and (place == 0 or placed[place - 1][1] is not None):  # where the gap begins
            yield f'<path class="{line.style} lost" d="{_cross(across)}">{title}</path>'


def _cross(across: float) -> str:
    return f"M{across - 4:.1f} {TOP + 2}l8 8m0 -8l-8 8"


def _path(points: Iterable[tuple[float, float | None]]) -> str:
    out, drawing = [], False
    for across, down in points:
        if down is not None:
            out.append(f"{'L' if drawing else 'M'}{across:.1f} {down:.1f}" + ("" if drawing else "h0"))  # h0: a point by itself is a dot
        drawing = down is not None
    return "".join(out)


def _grid(x: PlotAxis, y: PlotAxis) -> Iterable[str]:
    bottom = TOP + INNER_HEIGHT
    for tick in y.marks():
        down = _down(y, tick)
        yield f'<path class="grid" d="M{LEFT} {down:.1f}h{INNER_WIDTH}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{short_number(tick)}</text>'
    for tick in x.marks():
        across = _across(x, tick)
        yield f'<path class="grid" d="M{across:.1f} {bottom}v4"/>'
        yield f'<text class="tick" x="{across:.1f}" y="{bottom + 16}" text-anchor="middle">{short_number(tick)}</text>'
    yield f'<path class="frame" d="M{LEFT} {TOP}V{bottom}H{LEFT + INNER_WIDTH}"/>'


def _across(x: PlotAxis, value: float) -> float:
    return LEFT + INNER_WIDTH * x.at(value)


def _down(y: PlotAxis, value: float) -> float:
    return max(TOP + INNER_HEIGHT * (1 - y.at(value)), -9.0 * HEIGHT)  # far outside is far enough


def curve_y(lines: Iterable[PlotLine]) -> PlotAxis:
    """Room for the losses of most lines: one that explodes leaves the picture and does not flatten the others.

    A log axis where it can be: what lines differ by at their end is small beside what all have come down.
    """
    finite = [found for line in lines if (found := [value for _, value in line.points if value is not None])]
    if not finite:
        return PlotAxis(0.0, 1.0)
    low, high = min(map(min, finite)), max(map(max, finite))
    usual = statistics.median(map(max, finite))
    axis = _padded(low, usual if high > low + 1.5 * (usual - low) else high)
    return PlotAxis(low * 0.97, axis.high, log=True) if low > SMALLEST_LOG else axis


def nearest_index(values: Sequence[float]) -> PlotAxis:
    """Room for most of these values; the few far above stand at the upper edge."""
    low, high, usual = min(values), max(values), statistics.median(values)
    top = usual + 2 * (usual - low)
    return _padded(low, top if low < top < high else high)


def _padded(low: float, high: float) -> PlotAxis:
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return PlotAxis(low - pad, high + pad)


def tick_positions(values: Sequence[float]) -> PlotAxis:
    """The values of a swept word: on a log axis where all are positive, a tick at each while they are few."""
    low, high = min(values), max(values)
    if low > SMALLEST_LOG:
        room = (high / low) ** 0.08 if high > low else 2.0
        axis = PlotAxis(low / room, high * room, log=True)
    else:
        axis = _padded(low, high)
    distinct = sorted(set(values))
    return PlotAxis(axis.low, axis.high, axis.log, _apart(distinct, axis) if len(distinct) <= MIN_TICKS else ())


def _apart(values: Sequence[float], axis: PlotAxis) -> list[float]:
    """As many as there is room to write."""
    kept: list[float] = []
    for value in values:
        if not kept or INNER_WIDTH * (axis.at(value) - axis.at(kept[-1])) > 6 * (len(short_number(value)) + 1):
            kept.append(value)
    return kept


def _nice(low: float, high: float) -> list[float]:
    """Four to eight round numbers from low to high."""
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
    """1500 as 1.5k, 0.0005 as 5e-4."""
    for size, unit in UNITS if abs(value) < 1e15 else ():
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    if value and not 1e-2 <= abs(value) < 1e15:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def moving_average(points: Sequence[PlotPoint]) -> list[PlotPoint]:
    """A running mean over about a fortieth of the points; gaps stay gaps."""
    keep = 1 - 1 / max(1.0, len(points) / 40)
    total = weight = 0.0
    out: list[PlotPoint] = []
    for x, y in points:
        if y is not None:
            total, weight = total * keep + y, weight * keep + 1
        out.append((x, None if y is None else total / weight))
    return out


def downsample(points: Sequence[PlotPoint], limit: int) -> list[PlotPoint]:
    """About `limit` points that look the same: the lowest and the highest of each stretch, its gap, and both ends."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) // max(1, limit // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        finite = [(y, i) for i in stretch if (y := points[i][1]) is not None]
        kept.update((min(finite)[1], max(finite)[1]) if finite else ())
        kept.update([next(i for i in stretch if points[i][1] is None)] if len(finite) < len(stretch) else ())
    return [points[i] for i in sorted(kept)]
