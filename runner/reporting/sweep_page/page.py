"""report.html of a sweep: one file without scripts or links to other files. Every text is escaped by the template engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from runner.inference.best_job import parse_number, swept_sort_key
from runner.reporting.page_template import CSS, page_environment
from runner.reporting.sweep_page import svg
from runner.reporting.sweep_results.columns import loss_text, point_label, swept_text, table_columns, with_note
from runner.reporting.sweep_results.metrics_reader import LossPoint
from runner.reporting.sweep_results.results import JobResult, ResultRow, SweepResults

if TYPE_CHECKING:
    import jinja2

TEMPLATE = Path(__file__).with_name("sweep.jinja")
COLORS, DASHES = 8, 4  # classes s0 to s7 and d0 to d3 of page.css
POINTS_PER_CURVE, POINTS_PER_PLOT, MIN_POINTS = 500, 24_000, 60  # at most per curve; at most per plot; at least per curve
TIME_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def sweep_page(sweep: SweepResults) -> str:
    rows = sorted(sweep.rows, key=lambda row: sweep.jobs.index(row.jobs[0]))  # a row keeps its colour when its rank changes
    styles = {id(row): _style(index) for index, row in enumerate(rows)}
    return _load_template().render(
        sweep=sweep,
        columns=[column for column in table_columns(sweep) if column.title],
        styles=styles,
        legend=[(styles[id(row)], point_label(row.overrides) or "all seeds") for row in sweep.rows],
        curves=_curves(sweep, styles),
        final_plot=_final_plot(sweep),
        created=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    )


@cache
def _load_template() -> jinja2.Template:
    from markupsafe import Markup

    environment = page_environment()
    environment.globals |= {
        "css": Markup(CSS.read_text(encoding="utf-8")),
        "svg": Markup,
        "point_label": point_label,
        "swept_text": swept_text,
        "with_note": with_note,
        "id": id,
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _style(index: int) -> str:
    return f"s{index % COLORS} d{index // COLORS % DASHES}"


def _curves(sweep: SweepResults, styles: dict[int, str]) -> list[tuple[str, str]]:
    """Return (title of the x axis, SVG) of the loss over steps, tokens and time; [] if nothing is logged."""
    jobs = [(job, styles[id(row)]) for row in sweep.rows for job in row.jobs if job.metrics.last]
    if not jobs:
        return []
    longest = max(job.metrics.last.time for job, _ in jobs if job.metrics.last)
    unit, unit_name = next((size, name) for size, name in TIME_UNITS if longest >= 2 * size or size == 1.0)
    axes: list[tuple[str, Callable[[LossPoint], float]]] = [
        ("steps", lambda point: point.step),
        ("loss tokens", lambda point: point.loss_tokens),
        (f"time, {unit_name}", lambda point: point.time / unit),
    ]
    plots = []
    for index, (title, x_of) in enumerate(axes):
        lines = [line for job, style in jobs for line in _job_lines(job, style, x_of, len(jobs))]
        x_axis = svg.PlotAxis(0.0, max(x_of(job.metrics.last) for job, _ in jobs if job.metrics.last) or 1.0)
        plots.append((title, svg.draw_plot(lines, x_axis, svg.loss_axis(lines), title, "loss", f"clip{index}")))
    return plots


def _job_lines(job: JobResult, style: str, x_of: Callable[[LossPoint], float], jobs: int) -> Iterable[svg.PlotLine]:
    limit = max(MIN_POINTS, min(POINTS_PER_CURVE, POINTS_PER_PLOT // jobs))
    name = point_label(job.swept) or job.name
    train = svg.downsample(svg.moving_average([(x_of(point), point.loss) for point in job.metrics.train]), limit)
    yield svg.PlotLine(train, f"{style} train", f"{name}: training loss")
    evaluations = svg.downsample([(x_of(point), point.loss) for point in job.metrics.eval], limit)
    yield svg.PlotLine(evaluations, f"{style} eval", f"{name}: validation loss", dot_radius=2.3 if len(evaluations) <= 40 else 0.0)


def _final_plot(sweep: SweepResults) -> tuple[str, str, list[tuple[str, str]]] | None:
    """Return (key, SVG, legend) of the final loss over the numeric swept key with most values, one line per combination of the other keys."""
    key = _x_key(sweep)
    rows = [row for row in sweep.rows if parse_number(row.overrides.get(key or "", "")) is not None and (row.status == "completed" or row.diverged)]
    finals = [row.final.mean for row in rows if row.final and not row.diverged]
    if key is None or not finals:
        return None
    y_axis = svg.value_axis(finals)
    groups: dict[tuple, list[ResultRow]] = {}
    for row in sorted(rows, key=lambda row: parse_number(row.overrides[key]) or 0.0):
        groups.setdefault(tuple((other, row.overrides.get(other, "")) for other in sweep.swept_keys if other != key), []).append(row)
    lines, legend = [], {}
    for index, (others, group) in enumerate(sorted(groups.items(), key=lambda item: swept_sort_key(dict(item[0])))):
        style, name = _style(index), point_label(dict(others))
        points = [(parse_number(row.overrides[key]) or 0.0, min(row.final.mean, y_axis.high) if row.final and not row.diverged else None) for row in group]
        legend[style] = name or "final loss"
        values = "; ".join(f"{row.overrides[key]}: {loss_text(row.final) or 'diverged'}" for row in group)
        deviations = [row.final.deviation if row.final else None for row in group]
        lines.append(svg.PlotLine(points, f"{style} eval", f"{name} {values}".strip(), dot_radius=4.0, deviations=deviations))
    x_axis = svg.swept_axis([x for line in lines for x, _ in line.points])
    return key, svg.draw_plot(lines, x_axis, y_axis, key, f"final {sweep.ranked_by} loss", "clip9"), list(legend.items())


def _x_key(sweep: SweepResults) -> str | None:
    values = {key: {row.overrides[key] for row in sweep.rows if key in row.overrides} for key in sweep.swept_keys}
    numeric = {key: len(found) for key, found in values.items() if len(found) > 1 and all(parse_number(value) is not None for value in found)}
    return max(numeric, key=lambda key: (numeric[key], key.endswith("lr")), default=None)
