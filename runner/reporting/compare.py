"""Several runs side by side, as a page and as text for a terminal: their curves, losses, and the settings and data that
differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import UserError, one_line
from runner.reporting.columns import Column, count_text, loss_text
from runner.reporting.metrics import count_number
from runner.reporting.page_kit import RELOAD_SECONDS, loss_curve, render
from runner.reporting.runs import NO_VALUE, Run, as_dict, differing_values, text_of
from runner.run_dir.best_job import comparison_problem
from runner.run_dir.contents import is_sweep_dir
from runner.tracking.bar import shorten_middle, table_lines
from runner.tracking.data_report import listed
from runner.tracking.lines import format_seconds

MAX_COMPARED = 400  # of one comparison
MAX_VALUE = 120  # characters of a setting
# Settings of where and how a run is shown: no difference between two trainings.
NOT_COMPARED = ("run.", "tracker.", "resume", "data.cache", "sweep.")
FINGERPRINTS = {"data": "training data", "tokenizer": "tokenizer", "model": "model shape"}  # of run.json
# Facts beside the settings: title -> (part of run.json, name in it). Hashes are shown by their first characters.
FACTS = {
    **{f"{title} (fingerprint)": ("fingerprints", name) for name, title in FINGERPRINTS.items()},
    "commit": ("code", "commit"),
    "uncommitted changes": ("code", "dirty"),
    "torch": ("versions", "torch"),
    "host": ("", "host"),
}
BRANCH = "branched from"  # another fact
MAX_PAGE_POINTS, MIN_CURVE_POINTS = 14_000, 12  # of all curves; of one curve
MAX_CELLS = 12_000  # of the table of settings that differ
# runs up to which a column per run is shown; on a terminal: settings that differ, characters of a value, of the first
# column
WIDE_RUNS, TERMINAL_SETTINGS, TERMINAL_WIDTH, FIRST_COLUMN = 6, 24, 20, 40
MAX_LABEL_PARTS = 20  # folders of a path in a label
MAX_LISTED_RUNS, MAX_LISTED_VALUES = 4, 6  # in one line of text


@dataclass
class ComparedRun(Run):
    label: str = ""  # unique in the comparison

    @property
    def evaluation(self) -> dict[str, Any]:
        return as_dict(self.fields["evaluation"])

    @property
    def best(self) -> tuple[float, float] | None:
        """The lowest evaluation loss and its step."""
        return self.metrics.eval.lowest()

    @cached_property
    def values(self) -> dict[str, str]:
        """Settings and facts that are compared; NO_VALUE for a fact that run.json does not have."""
        found = {
            key: text_of(value, MAX_VALUE) for key, value in self.settings.items() if not key.startswith(NOT_COMPARED)
        }
        for title, (source, name) in FACTS.items():
            text = text_of((self.fields[source] if source else self.fields).get(name))
            found[title] = text[:10] if len(text) in (40, 64) and text.isalnum() else text or NO_VALUE
        found[BRANCH] = "{} at step {:,}".format(*self.branched_from) if self.branched_from else NO_VALUE
        return found


# The key is the title on a terminal, "" where it is not shown there.
RUN_COLUMNS = (
    Column("status", "status", lambda run: run.status, is_number=False),
    Column("best eval", "best evaluation loss", lambda run: run.best and run.best[0], loss_text),
    Column("at step", "at step", lambda run: run.best and run.best[1], count_text),
    Column("eval", "newest evaluation loss", lambda run: run.metrics.eval.newest_loss(), loss_text),
    Column("train", "newest training loss", lambda run: run.metrics.train.newest_loss(), loss_text),
    Column("", "step", lambda run: run.step, count_text),
    Column("tokens", "tokens", lambda run: run.metrics.last.tokens if run.metrics.last else 0.0, count_text),
    Column("time", "time", lambda run: run.metrics.last and run.metrics.last.time, format_seconds),
    Column("tok/s", "tokens/s", lambda run: run.metrics.tokens_per_second, count_text),
    Column("", "attempts", lambda run: count_number(run.fields["attempt"]) or 0.0, count_text),
)


@dataclass
class Comparison:
    runs: list[ComparedRun]

    def __post_init__(self) -> None:
        _set_labels(self.runs)

    @cached_property
    def problem(self) -> str | None:
        """Why the evaluation losses of the runs cannot be compared; None if they can."""
        if len(self.runs) < 2:
            return None
        if problem := comparison_problem(run.fields["evaluation"] for run in self.runs):
            return f"the runs were judged {problem}"
        unknown = [run.label for run in self.runs if len(run.metrics.eval) and not run.evaluation]
        return f"run.json does not say what was evaluated: {listed(unknown, MAX_LISTED_RUNS)}" if unknown else None

    @cached_property
    def notes(self) -> list[str]:
        """What else differs and changes what a loss means."""
        return [*_notes(self.runs)]

    @cached_property
    def differing(self) -> list[tuple[str, list[str]]]:
        """Settings, then facts, with more than one value: (key, value of each run)."""
        found = differing_values([run.values for run in self.runs])
        return sorted(found.items(), key=lambda row: row[0] in (*FACTS, BRANCH))

    @cached_property
    def best_labels(self) -> set[str]:
        """Labels of the run, or the tied runs, with the lowest evaluation loss; none where the losses cannot be
        compared or only one run has any.
        """
        found = {run.label: run.best[0] for run in self.runs if run.best}
        is_known = self.problem is None and len(found) > 1
        return {label for label, loss in found.items() if loss == min(found.values())} if is_known else set()


def read_comparison(folders: list[Path]) -> Comparison:
    """Read the runs in `folders`. Raises UserError for more than MAX_COMPARED."""
    if len(folders) > MAX_COMPARED:
        raise UserError(
            f"{len(folders)} runs are too many for one comparison, at most {MAX_COMPARED}",
            f"run= with {len(folders)} runs",
            "name fewer runs",
        )
    return Comparison([*map(ComparedRun.read, folders)])


def _set_labels(runs: list[ComparedRun]) -> None:
    """Set what each run is called, no two alike: run.name, or the end of its path as far as it takes."""
    ambiguous = runs
    for parts in range(1, MAX_LABEL_PARTS):
        for run in ambiguous:
            run.label = _label(run, parts)
        counts = Counter(run.label for run in runs)
        ambiguous = [run for run in runs if counts[run.label] > 1]


def _label(run: ComparedRun, parts: int) -> str:
    """Return run.name, or `10-00-00` of a job and `2026-11-21/10-00-00` of another run; with more `parts` more of the
    path.
    """
    path = run.folder.parts
    if run.name:
        return run.name if parts == 1 else f"{run.name} ({'/'.join(path[-parts:])})"
    return "/".join(path[-(parts if is_sweep_dir(run.folder.parent) else parts + 1) :])


def _notes(runs: list[ComparedRun]) -> Iterator[str]:
    """Yield what a reader must know before two losses are compared."""
    for name, title in FINGERPRINTS.items():
        groups: dict[str, list[str]] = {}
        for run in runs:
            if isinstance(found := run.fields["fingerprints"].get(name), str):
                groups.setdefault(found, []).append(run.label)
        if len(groups) > 1:
            consequence = ": losses per token of different tokens cannot be compared" if name == "tokenizer" else ""
            yield f"the {title} differs{consequence} ({'; '.join(listed(group, MAX_LISTED_RUNS) for group in groups.values())})"
    unjudged = [run.label for run in runs if not run.evaluation]
    if 0 < len(unjudged) < len(runs):
        yield f"not evaluated, or of an earlier version: {listed(unjudged, MAX_LISTED_RUNS)}"
    if on_training := [run.label for run in runs if run.evaluation.get("on") == "training"]:
        yield f"evaluated on training rows, there are no validation data: {listed(on_training, MAX_LISTED_RUNS)}"
    if unfinished := [f"{run.label} ({run.status})" for run in runs if run.status != "completed"]:
        yield f"not completed: {listed(unfinished, MAX_LISTED_RUNS)}"


def compare_page(comparison: Comparison, reloads: bool = False) -> str:
    """Return the page. `reloads`: it is served, and is loaded again while a run trains."""
    runs = comparison.runs
    limit = max(MIN_CURVE_POINTS, MAX_PAGE_POINTS // (2 * len(runs)))
    curves = [
        {
            "label": run.label,
            "train": loss_curve(run.metrics.train, limit),
            "eval": loss_curve(run.metrics.eval, limit),
        }
        for run in runs
    ]
    return render(
        "compare",
        {"runs": curves, "reload": RELOAD_SECONDS if reloads and any(run.is_running for run in runs) else None},
        comparison=comparison,
        columns=[column for column in RUN_COLUMNS if any(column.get(run) not in (None, 0, "") for run in runs)],
        wide_runs=WIDE_RUNS,
        max_shown=max(1, MAX_CELLS // len(runs)),
    )


def compare_text(comparison: Comparison) -> str:
    """Return warnings, the table of runs and the settings that differ, for a terminal."""
    runs, best, differing = comparison.runs, comparison.best_labels, comparison.differing
    columns = [column for column in RUN_COLUMNS if column.key and any(map(column.cell, runs))]
    table = [["run", *(column.key for column in columns)]]
    table += [
        [("* " if run.label in best else "") + run.label, *(column.cell(run) for column in columns)] for run in runs
    ]
    lines = shortened_table(table, [False, *(column.is_number for column in columns)])
    lines += ["* lowest evaluation loss (best eval); eval, train: the newest losses"] if best else []
    lines += [f"warning: the evaluation losses cannot be compared: {comparison.problem}"] if comparison.problem else []
    lines += [f"note: {note}" for note in comparison.notes]
    if not differing:
        return "\n".join([*lines, "", "no setting differs"])
    is_cut = len(differing) > TERMINAL_SETTINGS
    lines += ["", "what differs" + (f" (the first {TERMINAL_SETTINGS} of {len(differing)})" if is_cut else "")]
    shown = differing[:TERMINAL_SETTINGS]
    if len(runs) > WIDE_RUNS:
        lines += [
            f"{key}: {listed([*map(_shorten, dict.fromkeys(values))], MAX_LISTED_VALUES)}" for key, values in shown
        ]
    else:
        table = [["", *(run.label for run in runs)], *([key, *values] for key, values in shown)]
        lines += shortened_table(table, [False] * len(table[0]))
    return "\n".join(lines)


def _shorten(text: str, width: int = TERMINAL_WIDTH) -> str:
    return shorten_middle(one_line(text), width)


def shortened_table(table: list[list[str]], is_number: list[bool]) -> list[str]:
    """Return the lines of a table with long cells shortened."""
    return table_lines([[_shorten(line[0], FIRST_COLUMN), *map(_shorten, line[1:])] for line in table], is_number)
