"""What a comparison shows of each run, read from its directory.

A missing or damaged file leaves its part out and never raises.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.errors import UserError
from runner.reporting.page_template import flatten_settings
from runner.reporting.run_folders import run_status, tags_of, text_of
from runner.reporting.sweep_results.metrics_reader import LossPoint, RunMetrics, count_number, read_job_metrics
from runner.run_dir.best_job import comparison_problem
from runner.run_dir.contents import is_sweep_dir
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import CONFIG_FILE, load_saved_config

MAX_COMPARED = 400  # of one comparison
MAX_VALUE = 120  # characters of a setting
# Settings of where and how a run is shown: no difference between two trainings.
NOT_COMPARED = ("hydra.", "run.", "tracker.", "resume", "data.cache")
FINGERPRINTS = {"data": "training data", "tokenizer": "tokenizer", "model": "model shape"}  # of run.json


@dataclass
class ComparedRun:
    folder: Path
    label: str  # unique in the comparison
    status: str
    fields: dict[str, Any]  # of run.json
    metrics: RunMetrics  # with few points
    settings: dict[str, str] = field(default_factory=dict)  # dotted key -> value

    @property
    def name(self) -> str:
        return text_of(self.fields.get("name"), 80)

    @property
    def tags(self) -> list[str]:
        return tags_of(self.fields)

    @property
    def evaluation(self) -> dict[str, Any] | None:
        found = self.fields.get("evaluation")
        return found if isinstance(found, dict) else None

    @property
    def evaluation_loss(self) -> float | None:
        """The newest evaluation loss; infinite if it was not finite."""
        return _loss_of(self.metrics.eval[-1]) if self.metrics.eval else None

    @property
    def best(self) -> tuple[float, float] | None:
        """The lowest evaluation loss and its step."""
        return min(((point.loss, point.step) for point in self.metrics.eval if point.loss is not None), default=None)

    @property
    def training_loss(self) -> float | None:
        """The newest training loss; infinite if it was not finite."""
        return _loss_of(self.metrics.train[-1]) if self.metrics.train else None

    @property
    def step(self) -> float:
        return self.metrics.last.step if self.metrics.last else count_number(self.fields.get("step")) or 0.0

    @property
    def tokens(self) -> float:
        return self.metrics.last.tokens if self.metrics.last else 0.0

    @property
    def seconds(self) -> float | None:
        return self.metrics.last.time if self.metrics.last else None

    @property
    def attempts(self) -> int:
        return int(count_number(self.fields.get("attempt")) or 0)


@dataclass
class Comparison:
    runs: list[ComparedRun]
    problem: str | None  # why the evaluation losses cannot be compared
    notes: list[str]  # what else differs and changes what a loss means

    @property
    def differing(self) -> list[tuple[str, list[str]]]:
        """Settings and facts with more than one value: (key, value of each run); "–": the run does not have it."""
        keys = dict.fromkeys(key for run in self.runs for key in run.settings)
        rows = [(key, [run.settings.get(key, "–") for run in self.runs]) for key in keys]
        rows += [(title, [fact_of(run, title) for run in self.runs]) for title in FACTS]
        return [(key, values) for key, values in rows if len(set(values)) > 1]

    @property
    def best_labels(self) -> set[str]:
        """Labels of the run, or the tied runs, with the lowest evaluation loss; none where the losses cannot be
        compared or only one run has any.
        """
        found = {run.label: run.best[0] for run in self.runs if run.best}
        return (
            set()
            if self.problem or len(found) < 2
            else {label for label, loss in found.items() if loss == min(found.values())}
        )

    @property
    def is_running(self) -> bool:
        return any(run.status == "running" for run in self.runs)


# Facts beside the settings: title -> (field of run.json, name in it). Hashes are shown by their first characters.
FACTS = {
    **{f"{title} (fingerprint)": ("fingerprints", name) for name, title in FINGERPRINTS.items()},
    "commit": ("code", "commit"),
    "uncommitted changes": ("code", "dirty"),
    "torch": ("versions", "torch"),
    "host": ("host", ""),
}


def fact_of(run: ComparedRun, title: str) -> str:
    source, name = FACTS[title]
    value = run.fields.get(source)
    value = value.get(name) if name and isinstance(value, dict) else value
    text = text_of(value)
    return text[:10] if len(text) in (40, 64) and text.isalnum() else text or "–"


def read_comparison(folders: list[Path]) -> Comparison:
    """Read the runs in `folders`. Raises UserError for more than MAX_COMPARED."""
    if len(folders) > MAX_COMPARED:
        raise UserError(
            f"{len(folders)} runs are too many for one comparison, at most {MAX_COMPARED}",
            f"run= with {len(folders)} runs",
            "name fewer runs",
        )
    labels = unique_labels(folders)
    runs = [_read_run(folder, label) for folder, label in zip(folders, labels, strict=True)]
    return Comparison(runs, _problem(runs), [*_notes(runs)])


def _read_run(folder: Path, label: str) -> ComparedRun:
    fields = RunMetadata.read(folder)
    return ComparedRun(
        folder,
        label,
        run_status(fields) if fields else "unknown",
        fields,
        read_job_metrics(folder / "metrics.jsonl"),
        _settings(folder),
    )


def unique_labels(folders: list[Path]) -> list[str]:
    """Return what each run is called, no two alike: run.name, or the end of its path as far as it takes."""
    names = [text_of(RunMetadata.read(folder).get("name"), 80) for folder in folders]
    labels = [_label(folder, name, 1) for folder, name in zip(folders, names, strict=True)]
    for parts in (2, 3, 4):
        repeated = {label for label, count in Counter(labels).items() if count > 1}
        labels = [
            _label(folder, name, parts) if label in repeated else label
            for folder, name, label in zip(folders, names, labels, strict=True)
        ]
    counts = Counter(labels)
    return [
        label if counts[label] == 1 else f"{label} ({folder})" for folder, label in zip(folders, labels, strict=True)
    ]


def _label(folder: Path, name: str, parts: int) -> str:
    """Return run.name, or `10-00-00` of a job and `2026-11-21/10-00-00` of another run; with more `parts` more of the
    path.
    """
    if name:
        return name if parts == 1 else f"{name} ({'/'.join(folder.parts[-parts:])})"
    return "/".join(folder.parts[-(parts if is_sweep_dir(folder.parent) else parts + 1) :])


def _settings(folder: Path) -> dict[str, str]:
    try:
        stat = (folder / CONFIG_FILE).stat()
    except OSError:
        return {}
    return _load_settings(folder, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=2 * MAX_COMPARED)
def _load_settings(folder: Path, signature: tuple[int, int, int]) -> dict[str, str]:
    """Return the settings by dotted key.

    `signature` of the file: parsing YAML is slow, and a page that is served reads it again and again.
    """
    try:
        config = load_saved_config(folder)
    except (UserError, OSError, ValueError):
        return {}
    return {key: _shorten(value) for key, value in flatten_settings(config) if not key.startswith(NOT_COMPARED)}


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]} …"


def _problem(runs: list[ComparedRun]) -> str | None:
    """Return why the evaluation losses of the runs cannot be compared; None if they can."""
    if len(runs) > 1 and (problem := comparison_problem(run.evaluation for run in runs)):
        return f"the runs were judged {problem}"
    unknown = [run.label for run in runs if run.metrics.eval and not run.evaluation]
    return f"run.json does not say what was evaluated: {_listed(unknown)}" if unknown and len(runs) > 1 else None


def _notes(runs: list[ComparedRun]) -> Iterator[str]:
    """Yield what a reader must know before two losses are compared."""
    for name, title in FINGERPRINTS.items():
        groups: dict[str, list[str]] = {}
        for run in runs:
            found = run.fields.get("fingerprints")
            if isinstance(found, dict) and isinstance(found.get(name), str):
                groups.setdefault(found[name], []).append(run.label)
        if len(groups) > 1:
            consequence = ": losses per token of different tokens cannot be compared" if name == "tokenizer" else ""
            yield f"the {title} differs{consequence} ({'; '.join(_listed(labels) for labels in groups.values())})"
    judged = [run for run in runs if run.evaluation]
    if 0 < len(judged) < len(runs):
        yield f"not evaluated, or of an earlier version: {_listed([run.label for run in runs if not run.evaluation])}"
    if on_training := [run.label for run in judged if run.evaluation and run.evaluation.get("on") == "training"]:
        yield f"evaluated on training rows, there are no validation data: {_listed(on_training)}"
    if unfinished := [f"{run.label} ({run.status})" for run in runs if run.status != "completed"]:
        yield f"not completed: {_listed(unfinished)}"


def _listed(labels: list[str]) -> str:
    return ", ".join(labels) if len(labels) <= 4 else f"{', '.join(labels[:3])} and {len(labels) - 3} more"


def _loss_of(point: LossPoint) -> float:
    return math.inf if point.loss is None else point.loss
