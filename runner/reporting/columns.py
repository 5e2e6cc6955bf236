"""Columns of the leaderboard.

An entry in COLUMNS appears in the terminal table, in leaderboard.csv and in report.html.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from runner.inference.evaluate import evaluation_label, headline, results_of
from runner.reporting.statistics import MeanStd, mean_interval, mean_std
from runner.reporting.sweep_results import JobResult, ResultRow, SweepResults
from runner.run_dir.best_job import SEED_KEY, ModelScore, fewest_rows
from runner.tracking.lines import format_seconds

# evaluations with a column of their own; leaderboard.csv has all numbers of all
TERMINAL_EVALUATIONS, PAGE_EVALUATIONS = 3, 12


@dataclass(frozen=True)
class Column:
    """In `key` and `title`, {loss} stands for the kind of loss that rows are ranked by, see LOSS_KINDS."""

    key: str  # heading in leaderboard.csv
    title: str  # heading in the terminal and in report.html; empty: only in leaderboard.csv
    get: Callable[[Any], Any]  # the value of a row
    text: Callable[[Any], str] = str  # the value in the terminal and in report.html, where there is one
    csv: Callable[[Any], Any] = lambda value: value  # the value in leaderboard.csv: a number, text or None
    is_number: bool = True  # aligned to the right
    in_terminal: bool = True
    only_for: str = ""  # shown only where rows are ranked by this kind of loss; `seeds`: only where seeds are swept

    def cell(self, row: Any) -> str:
        value = self.get(row)
        return "" if value is None else self.text(value)

    def csv_value(self, row: Any) -> Any:
        value = self.get(row)
        return None if value is None else self.csv(value)


def table_columns(sweep: SweepResults) -> list[Column]:
    """Return the columns shown for `sweep`, with {loss} filled in."""
    columns = [column for column in COLUMNS if column.only_for in ("", sweep.ranked_by, "seeds" * sweep.has_seeds)]
    fill = {"loss": sweep.ranked_by}
    filled = [
        replace(column, key=column.key.format(**fill).replace("-", "_"), title=column.title.format(**fill))
        for column in columns
    ]
    position = next(index for index, column in enumerate(filled) if column.key == "loss_tokens")
    return [*filled[:position], *evaluation_columns(sweep.jobs), *filled[position:]]


def evaluation_columns(jobs: Iterable[JobResult]) -> list[Column]:
    """Return a column with a title for each evaluation that some job has, and one for leaderboard.csv for each of its
    other numbers.
    """
    found: dict[str, dict[str, dict[str, list[float]]]] = {}  # label -> metric -> name of a job -> of its evaluations
    for job in jobs:
        for record in job.evaluations:
            metrics = found.setdefault(evaluation_label(record), {})
            for name, value in results_of(record).items():
                metrics.setdefault(name, {}).setdefault(job.name, []).append(value)
    columns = []
    for index, (label, metrics) in enumerate(found.items()):
        first = headline(metrics)
        for name in sorted(metrics, key=lambda name: (name != first, name)):
            title = label if label.startswith(f"{name} ") else f"{label} {name}"
            columns.append(
                Column(
                    f"{label}/{name}",
                    title if name == first and index < PAGE_EVALUATIONS else "",
                    partial(_mean_of_jobs, metrics[name]),
                    evaluated_text,
                    _mean,
                    in_terminal=index < TERMINAL_EVALUATIONS,
                )
            )
    return columns


def _mean_of_jobs(values: dict[str, list[float]], row: ResultRow) -> MeanStd | None:
    """Return the mean over the jobs of a row that have values."""
    return mean_std(value for job in row.jobs for value in values.get(job.name, ()))


# --- values as text ---------------------------------------------------------------------------------------------------


def count_text(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def loss_text(value: MeanStd | float | str | None) -> str:
    """Return e.g. `2.3456`, or `2.3456 ± 0.0012 (3)` for a mean over three jobs."""
    if isinstance(value, MeanStd):
        spread = "" if value.deviation is None else f" ± {loss_text(value.deviation)} ({value.n})"
        return loss_text(value.mean) + spread
    if value is None or isinstance(value, str):
        return value or ""
    if math.isinf(value):
        return "not finite"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"


def interval_text(interval: tuple[float, float]) -> str:
    """Return Student's t interval of a mean over seeds, e.g. `2.3436 to 2.3476`."""
    return f"{loss_text(interval[0])} to {loss_text(interval[1])}"


def evaluated_text(value: MeanStd) -> str:
    return f"{value.mean:.4g}" if value.deviation is None else f"{value.mean:.4g} ± {value.deviation:.2g} ({value.n})"


def status_text(row: ResultRow) -> str:
    """Return e.g. `2 completed, 1 failed, 1 diverged`."""
    counts = Counter(job.status for job in row.jobs)
    parts = [row.progress] if len(counts) == 1 else [f"{n} {status}" for status, n in counts.items()]
    parts += [f"{row.diverged} " * (len(row.jobs) > 1) + "diverged"] if row.diverged else []
    marks = {"extended": "extended", "continued by hand": "manual_overrides", "other data": "differs_from"}
    parts += [mark for mark, name in marks.items() if any(getattr(job, name) for job in row.jobs)]
    return ", ".join(parts)


def with_note(text: str, job: JobResult) -> str:
    return f"{text}, {job.note}" if job.note else text


# --- the table --------------------------------------------------------------------------------------------------------


def _mean(value: MeanStd | str) -> float | None:
    return value.mean if isinstance(value, MeanStd) else None


def _deviation(value: MeanStd | str) -> float | None:
    return value.deviation if isinstance(value, MeanStd) else None


def _final(row: ResultRow) -> MeanStd | str | None:
    return row.final or ("diverged" if row.diverged else None)


def _weights_text(model: ModelScore) -> str:
    """Return e.g. `best, step 40`."""
    return f"{model.weights}, step {model.step:,}"


def trained_value(row: ResultRow, key: str) -> str:
    """Return the value that the jobs of a row were trained with, which sweep.lr_scale may have changed."""
    swept = row.overrides.get(key, "")
    trained = {job.trained.get(key, swept) for job in row.jobs}
    return trained.pop() if len(trained) == 1 else swept


def swept_text(row: ResultRow, key: str) -> str:
    """Return the value that the jobs were trained with, and that of the sweep where it was scaled: `0.004 (0.001
    scaled)`.
    """
    trained, swept = trained_value(row, key), row.overrides.get(key, "")
    return trained + (f" ({swept} scaled)" if swept not in ("", trained) else "")


def _per_job(text: Callable[[JobResult], str]) -> Callable[[ResultRow], str]:
    """Return `text` of the only job, or `seed=1: text; seed=2: text` of the jobs for which it is not empty."""

    def joined(row: ResultRow) -> str:
        if len(row.jobs) == 1:
            return text(row.jobs[0])
        return "; ".join(f"{SEED_KEY}={job.swept.get(SEED_KEY, '?')}: {text(job)}" for job in row.jobs if text(job))

    return joined


COLUMNS = [
    Column("loss", "loss of model/", lambda row: row.score if row.model or row.members else None, loss_text, _mean),
    Column(
        "loss_interval",
        "95 % interval",
        lambda row: mean_interval(row.score) if row.score else None,
        interval_text,
        interval_text,
        only_for="seeds",
    ),
    Column("weights", "weights", lambda row: row.model, _weights_text, _weights_text, is_number=False),
    Column("final_{loss}_loss", "final {loss} loss", _final, loss_text, _mean),
    Column("final_{loss}_loss_deviation", "", _final, csv=_deviation),
    Column("best_{loss}_loss", "best {loss} loss", lambda row: row.best, loss_text, _mean),
    Column("best_{loss}_loss_deviation", "", lambda row: row.best, csv=_deviation),
    Column("best_step", "at step", lambda row: row.best_step, count_text),
    Column(
        "final_training_loss",
        "newest training loss",
        lambda row: row.train,
        loss_text,
        _mean,
        in_terminal=False,
        only_for="validation",
    ),
    Column("loss_tokens", "loss tokens", lambda row: row.loss_tokens, count_text),
    Column("tokens", "tokens", lambda row: row.tokens, count_text, in_terminal=False),
    Column("seconds", "time", lambda row: row.seconds, format_seconds),
    Column("tokens_per_second", "tokens/s", lambda row: row.tokens_per_second, count_text),
    Column("status", "status", lambda row: row, status_text, lambda row: row.status, is_number=False),
    Column("evaluation_rows", "", lambda row: fewest_rows(job.evaluation for job in row.jobs) or None),
    Column("jobs", "", lambda row: len(row.jobs)),
    Column("completed", "", lambda row: sum(job.status == "completed" for job in row.jobs)),
    Column("diverged", "", lambda row: row.diverged),
    Column("folder", "", lambda row: row.jobs[0].name if len(row.jobs) == 1 else ""),
    Column("extended_with", "", _per_job(lambda job: " ".join(job.extended))),
    Column("continued_with", "", _per_job(lambda job: " ".join(job.manual_overrides))),
    Column("other_data_than", "", _per_job(lambda job: job.differs_from)),
    Column("reason", "", _per_job(lambda job: job.reason)),
]
