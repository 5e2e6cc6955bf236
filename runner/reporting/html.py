"""report.html of a sweep: one file that needs nothing beside it, with every text escaped. Hand-written, so that it opens anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from runner.reporting import svg
from runner.reporting.metrics_reader import LossPoint
from runner.reporting.results import JobResult, MeanStd, ResultRow, SweepResults, number_in
from runner.reporting.same_data import SEED_KEY
from runner.reporting.svg import escape_xml
from runner.tracking.console import format_seconds

STYLE = Path(__file__).with_name("report.css")
CURVE_COLORS, CURVE_DASHES = 8, 4  # as page.css has them
POINTS_PER_CURVE, POINTS_PER_PLOT, MIN_POINTS = 500, 24_000, 60  # of a curve; of a panel; of a curve in a crowd
LEGEND_ENTRIES = 24  # more entries are folded away
MAX_ROWS = 160  # characters of a reason
LOSS_FACTOR = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def sweep_page(sweep: SweepResults) -> str:
    styles = {
        id(row): f"s{place % CURVE_COLORS} d{place // CURVE_COLORS % CURVE_DASHES}"
        for place, row in enumerate(sorted(sweep.rows, key=lambda row: _folder(sweep, row)))
    }
    parts = [_page_head(sweep), _leaderboard_table(sweep, styles), _curves(sweep, styles), _against(sweep)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape_xml(f'{sweep.status}: sweep {sweep.folder.name}')}</title>"
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _folder(sweep: SweepResults, row: ResultRow) -> int:
    """A point keeps its colour while its rank changes."""
    return next(place for place, job in enumerate(sweep.jobs) if job is row.jobs[0])


def _page_head(sweep: SweepResults) -> str:
    made = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    lines = [f"<h1>Sweep over {escape_xml(', '.join(sweep.words) or 'the seed')}</h1>"]
    lines.append(f'<p><b class="{escape_xml(sweep.status)}">{escape_xml(sweep.status)}</b> · {escape_xml(status_counts(sweep))}</p>')
    lines.append(f'<p class="dim">{escape_xml(str(sweep.folder))}<br>begun {escape_xml(sweep.created or "at an unknown time")} · this page was made {made}</p>')
    if sweep.status == "running":
        lines.append(_command("If it runs no longer, continue it with", sweep.continued))
    elif sweep.unfinished:
        lines.append(_command("Continue it with", sweep.continued))
    if sweep.best:
        about = f"{point_label(sweep.best.words) or sweep.best.name}{marked_value(sweep.best)}"
        lines.append(_command(f"The best job again ({about})", sweep.again(sweep.best)))
    return f"<header>{''.join(lines)}</header>"


def _command(title: str, line: str) -> str:
    return f"<p>{escape_xml(title)}</p><pre><code>{escape_xml(line)}</code></pre>"


def _leaderboard_table(sweep: SweepResults, styles: dict[int, str]) -> str:
    kind, seeds = sweep.judged, any(SEED_KEY in job.words for job in sweep.jobs)
    losses = [f"final {kind} loss", f"best {kind} loss", "at step", *(["newest training loss"] if kind == "validation" else [])]
    titles = ["", *sweep.words, *["seed"] * seeds, *losses, "tokens", "time", "tokens/s", "status"]
    words = 1 + len(sweep.words) + seeds
    head = "".join(f"<th{' class=n' if words <= i < len(titles) - 1 else ''}>{_breakable(title)}</th>" for i, title in enumerate(titles))
    body = "".join(_table_rows(sweep, row, place, styles[id(row)], seeds) for place, row in enumerate(sweep.rows, start=1))
    note = f"Ordered by the best {kind} loss; what failed or is unfinished stands last."
    if kind == "training":
        note += " No job has evaluated, so the training loss of single steps is compared."
    if any(row.members for row in sweep.rows):
        note += " Jobs that differ only in their seed are one point: the mean over its completed jobs ± the standard deviation (number of jobs)."
    if any(job.unlike for job in sweep.jobs):
        note += " The file of some jobs had changed when they began: they were trained on other rows, and are marked."
    if any(job.by_hand for job in sweep.jobs):
        note += " What was continued by hand with other words is not like the others: its losses stand here as they are."
    note += " Time is that of training, over all attempts, without steps that were lost; tokens are those that carry loss, tokens/s counts all that are read."
    return f'<section><h2>Points</h2><div class="wide"><table><thead><tr>{head}</tr></thead>{body}</table></div><p class="dim">{escape_xml(note)}</p></section>'


def _table_rows(sweep: SweepResults, row: ResultRow, place: int, style: str, seeds: bool) -> str:
    cells = [
        f'<th class="rank">{_swatch(style)}{place if row.ranked else "–"}</th>',
        *(f"<td>{escape_xml(row.words.get(word, ''))}</td>" for word in sweep.words),
    ]
    cells += [f'<td class="rank">{len(row.jobs)} seeds</td>' if row.members else f"<td>{escape_xml(row.jobs[0].words.get(SEED_KEY, ''))}</td>"] * seeds
    out = [f'<tr class="point">{"".join(cells)}{_cells(sweep, row)}{_status_cell(row)}</tr>']
    for job in row.members:
        line = sweep.row_of(job)
        blank = "<td></td>" * (1 + len(sweep.words))
        out.append(f'<tr class="job">{blank}<td>{escape_xml(job.words.get(SEED_KEY, ""))}</td>{_cells(sweep, line)}{_status_cell(line)}</tr>')
    return f"<tbody>{''.join(out)}</tbody>"


def _cells(sweep: SweepResults, row: ResultRow) -> str:
    cells = [mean_std_text(row.final) or ("diverged" if row.diverged else ""), mean_std_text(row.best), count_text(row.best_step)]
    cells += [mean_std_text(row.train)] if sweep.judged == "validation" else []
    cells += [count_text(row.tokens), "" if row.seconds is None else format_seconds(row.seconds), count_text(row.tokens_per_second)]
    return "".join(f'<td class="n">{escape_xml(cell)}</td>' for cell in cells)


def _status_cell(row: ResultRow) -> str:
    if row.members:
        return f'<td class="status">{_colour(row)}</td>'
    job = row.jobs[0]
    begun = job.folder and job.status != "new"
    parts = [_colour(row), f' · <a href="./{quote(job.folder or "", errors="backslashreplace")}/">folder</a>' if begun else ""]
    parts += [_folded(why) for why in (job.mark, job.reason) if why]
    if job.last_lines:
        parts.append(f"<details><summary>its last lines</summary><pre>{escape_xml(chr(10).join(job.last_lines))}</pre></details>")
    return f'<td class="status">{"".join(parts)}</td>'


def _folded(why: str) -> str:
    """A reason that fits, or its beginning and the whole where it is asked for."""
    if len(why) <= MAX_ROWS:
        return f'<div class="why">{escape_xml(why)}</div>'
    return f'<details class="why"><summary>{escape_xml(why[:MAX_ROWS])} …</summary>{escape_xml(why)}</details>'


def _colour(row: ResultRow) -> str:
    return f'<b class="{"diverged" if row.status == "completed" and row.diverged else row.status}">{escape_xml(status_text(row))}</b>'


def _curves(sweep: SweepResults, styles: dict[int, str]) -> str:
    shown = [(job, styles[id(row)]) for row in sweep.rows for job in row.jobs if job.logged.last]
    if not shown:
        return ""
    longest = max(job.logged.last.time for job, _ in shown if job.logged.last)
    unit, unit_name = next((size, name) for size, name in LOSS_FACTOR if longest >= 2 * size or size == 1.0)
    panels = []
    for place, (title, across) in enumerate((("steps", _by_step), ("tokens", _by_tokens), (f"time, {unit_name}", lambda mark: mark.time / unit))):
        lines = [line for job, style in shown for line in _both(job, style, across, len(shown))]
        y = svg.curve_y(lines)
        x = svg.PlotAxis(0.0, max(across(job.logged.last) for job, _ in shown if job.logged.last) or 1.0)
        panels.append(f"<figure><figcaption>loss over {escape_xml(title)}</figcaption>{svg.draw_plot(lines, x, y, title, 'loss', f'clip{place}')}</figure>")
    note = "Thick with dots: validation loss. Thin: training loss, smoothed. A cross: the loss was not finite, or never low enough for the picture. Lines may leave through the upper edge."
    legend = _legend((styles[id(row)], point_label(row.words) or "all seeds") for row in sweep.rows)
    return f'<section><h2>Curves</h2>{legend}<div class="panels">{"".join(panels)}</div><p class="dim">{note}</p></section>'


def _by_step(mark: LossPoint) -> float:
    return mark.step


def _by_tokens(mark: LossPoint) -> float:
    return mark.tokens


def _both(job: JobResult, style: str, across: Callable[[LossPoint], float], jobs: int) -> Iterable[svg.PlotLine]:
    limit = max(MIN_POINTS, min(POINTS_PER_CURVE, POINTS_PER_PLOT // jobs))
    name = point_label(job.words) or job.name
    train = svg.downsample(svg.moving_average([(across(mark), mark.loss) for mark in job.logged.train]), limit)
    yield svg.PlotLine(train, f"{style} train", f"{name}: training loss")
    marks = svg.downsample([(across(mark), mark.loss) for mark in job.logged.eval], limit)
    yield svg.PlotLine(marks, f"{style} eval", f"{name}: validation loss", dots=2.3 if len(marks) <= 40 else 0.0)


def _against(sweep: SweepResults) -> str:
    """The final loss against the numeric word with most values; a line for each combination of the others."""
    word = _abscissa(sweep)
    rows = [row for row in sweep.rows if word in row.words and number_in(row.words[word]) is not None and (row.status == "completed" or row.diverged)]
    finals = [row.final.mean for row in rows if row.final and not row.diverged]
    if word is None or not finals:
        return ""
    y, lines, names = svg.nearest_index(finals), [], {}
    groups: dict[tuple, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(tuple((other, row.words.get(other, "")) for other in sweep.words if other != word), []).append(row)
    for place, (others, same) in enumerate(sorted(groups.items(), key=lambda group: [(number_in(value) or 0.0, value) for _, value in group[0]])):
        style, name = f"s{place % CURVE_COLORS} d{place // CURVE_COLORS % CURVE_DASHES}", point_label(dict(others))
        same = sorted(same, key=lambda row: number_in(row.words[word]) or 0.0)
        points = [(number_in(row.words[word]) or 0.0, min(row.final.mean, y.high) if row.final and not row.diverged else None) for row in same]
        deviations = [row.final.deviation if row.final else None for row in same]
        names[style] = name or "final loss"
        told = "; ".join(f"{row.words[word]}: {mean_std_text(row.final) or 'diverged'}" for row in same)
        lines.append(svg.PlotLine(points, f"{style} eval", f"{name} {told}".strip(), dots=4.0, spread=deviations))
    x = svg.tick_positions([here for line in lines for here, _ in line.points])
    picture = svg.draw_plot(lines, x, y, word, f"final {sweep.judged} loss", "clip9")
    note = "Jobs that came to their end. A cross: it diverged. A dot at the upper edge: it lies above. A bar: the standard deviation over seeds."
    title = f"Final {sweep.judged} loss against {_breakable(word)}"
    return f'<section><h2>{title}</h2>{_legend(names.items())}<div class="panels one"><figure>{picture}</figure></div><p class="dim">{note}</p></section>'


def _abscissa(sweep: SweepResults) -> str | None:
    values = {word: {row.words[word] for row in sweep.rows if word in row.words} for word in sweep.words}
    numeric = {word: len(found) for word, found in values.items() if len(found) > 1 and all(number_in(value) is not None for value in found)}
    return max(numeric, key=lambda word: (numeric[word], word.endswith("lr")), default=None)


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = [f"<li>{_swatch(style)}{escape_xml(name)}</li>" for style, name in entries]
    legend = f'<ul class="legend">{"".join(items)}</ul>'
    return legend if len(items) <= LEGEND_ENTRIES else f"<details><summary>{len(items)} colours</summary>{legend}</details>"


def _swatch(style: str) -> str:
    return f'<svg class="swatch" viewBox="0 0 26 8" aria-hidden="true"><path class="{style}" d="M1 4h24"/></svg>'


def _breakable(word: str) -> str:
    """A long dotted word may break after its dots."""
    return escape_xml(word).replace(".", ".<wbr>").replace("_", "_<wbr>")


def point_label(words: dict[str, str]) -> str:
    return " ".join(f"{word}={value}" for word, value in words.items())


def status_counts(sweep: SweepResults) -> str:
    """4 jobs: 3 completed, 1 failed."""
    return f"{len(sweep.jobs)} job{'s' * (len(sweep.jobs) != 1)}: " + ", ".join(f"{n} {status}" for status, n in sweep.counts.items())


def status_text(row: ResultRow) -> str:
    found: dict[str, int] = {}
    for job in row.jobs:
        found[job.status] = found.get(job.status, 0) + 1
    text = row.status if len(found) == 1 else ", ".join(f"{n} {status}" for status, n in found.items())
    lost = f"{row.diverged} " * (len(row.jobs) > 1) + "diverged"
    text = f"{text}, {lost}" if row.diverged else text
    text = f"{text}, continued by hand" if any(job.by_hand for job in row.jobs) else text
    return f"{text}, other data" if any(job.unlike for job in row.jobs) else text


def marked_value(job: JobResult) -> str:
    return f", {job.mark}" if job.mark else ""


def over_jobs(row: ResultRow, text: Callable[[JobResult], str]) -> str:
    """What `text` says of the one job, or of each of several that it says anything of."""
    if len(row.jobs) == 1:
        return text(row.jobs[0])
    return "; ".join(f"{SEED_KEY}={job.words.get(SEED_KEY, '?')}: {said}" for job in row.jobs if (said := text(job)))


def mean_std_text(found: MeanStd | None) -> str:
    """2.3456, or 2.3456 ± 0.0012 (3)."""
    if found is None:
        return ""
    return _loss_cell(found.mean) if found.deviation is None else f"{_loss_cell(found.mean)} ± {_loss_cell(found.deviation)} ({found.n})"


def _loss_cell(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"


def count_text(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:,.0f}"
