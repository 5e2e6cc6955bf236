"""report.html of a sweep: one file without requests, complete from before the first job.

Every text is escaped by the template engine.
"""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.reporting.page_template import CHART_LIBRARY, CHART_STYLE, CSS, json_block, load_template
from runner.reporting.sweep_page.importance import Importance, setting_effects, setting_importance
from runner.reporting.sweep_page.page_data import opens_by_tokens, page_data, row_styles, sweep_progress
from runner.reporting.sweep_results.columns import point_label, swept_text, table_columns, with_note
from runner.reporting.sweep_results.results import JobResult, SweepResults
from runner.reporting.sweep_results.verdict import sweep_verdict

if TYPE_CHECKING:
    import jinja2

SWEEP_FOLDER = Path(__file__).parent
SWEEP_SCRIPTS = (CHART_LIBRARY, SWEEP_FOLDER / "sweep.js")
SWEEP_STYLES = (CSS, SWEEP_FOLDER / "sweep.css", CHART_STYLE)
RUN_PAGE = "report.html"  # of a job
SMOOTHING, SMOOTHED_POINTS = 0.6, 100  # at first, of training curves; where none has more points, they are not smoothed
LEAD_COLUMNS = ("loss", "loss_interval")  # before the settings: they are seen on a narrow screen
# last lines of a failed job; characters of one; of all jobs together
MAX_LINES, MAX_LINE_CHARS, MAX_TAIL_CHARS = 20, 400, 120_000
MIN_PARALLEL_KEYS, MAX_SELECT_KEYS = 3, 12  # settings of the parallel coordinates; settings with a filter


def sweep_page(sweep: SweepResults, is_final: bool = True) -> str:
    """Return the page.

    The importance of settings takes seconds to calculate: it is left out unless `is_final`.
    """
    now = datetime.now().astimezone()
    columns = [column for column in table_columns(sweep) if column.title]
    later = Importance(reason="it is calculated when the sweep ends, and by report.py")
    return _load_template().render(
        sweep=sweep,
        progress=sweep_progress(sweep, now),
        verdict=(verdict := sweep_verdict(sweep)),
        tied={id(row) for row in verdict.ties},
        lead=[column for column in columns if column.key in LEAD_COLUMNS],
        columns=[column for column in columns if column.key not in LEAD_COLUMNS],
        styles=row_styles(sweep),
        pages={job.folder for job in sweep.jobs if job.folder and (sweep.folder / job.folder / RUN_PAGE).is_file()},
        smoothing=SMOOTHING if max((len(job.metrics.train) for job in sweep.jobs), default=0) > SMOOTHED_POINTS else 0,
        opens_by_tokens=opens_by_tokens(sweep),
        has_curves=any(job.metrics.last for job in sweep.jobs),
        effects=setting_effects(sweep),
        importance=setting_importance(sweep) if is_final or sweep.status != "running" else later,
        failed=_failed_jobs(sweep),
        overfitting=[job for job in sweep.jobs if job.overfitting],
        limits={"parallel": MIN_PARALLEL_KEYS, "selects": MAX_SELECT_KEYS},
        data_json=json_block(page_data(sweep)),
        created=now.isoformat(sep=" ", timespec="seconds"),
    )


@cache
def _load_template() -> jinja2.Template:
    template = load_template(SWEEP_FOLDER / "sweep.jinja", SWEEP_SCRIPTS, SWEEP_STYLES)
    template.globals.update(
        {
            "point_label": point_label,
            "swept_text": swept_text,
            "with_note": with_note,
            "id": id,
            "sort_value": _sort_value,
        }
    )
    return template


def _failed_jobs(sweep: SweepResults) -> list[tuple[JobResult, list[str], str]]:
    """Return (job, last lines of its output, the command that trains it alone) of failed jobs."""
    failed, left = [], MAX_TAIL_CHARS
    for job in sweep.jobs:
        if job.status == "failed":
            lines = [line[:MAX_LINE_CHARS] for line in job.last_lines[-MAX_LINES:]]
            left -= sum(map(len, lines))
            failed.append((job, lines if left > 0 else [], sweep.job_command(job)))
    return failed


def _sort_value(value: Any) -> str:
    """Return the number by which a column is sorted; empty for none."""
    return f"{value:.8g}" if isinstance(value, int | float) and not isinstance(value, bool) else ""
