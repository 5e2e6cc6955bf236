"""Everything that the page of a run shows, read from its directory.

A missing or damaged file leaves its part out and never raises.
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from common.filesystem import open_regular
from common.ownership import is_alive
from runner.checkpoint.atomic_dir import step_names
from runner.reporting.run_page.series import RunSeries, read_run_series
from runner.reporting.run_page.settings import Setting, read_settings
from runner.reporting.sweep_results.metrics_reader import MAX_METRICS_BYTES, MAX_RECORDS, count_number, iter_records
from runner.run_dir.metadata import RunMetadata

# steps and prompts that are shown; characters of an answer
MAX_SAMPLE_STEPS, MAX_SAMPLES, MAX_SAMPLE_CHARS = 30, 8, 2000
MAX_EVALUATIONS = 1000  # of evaluate.py, the newest
MAX_WARNINGS = 40  # different ones, the newest
LOG_TAIL_BYTES = 1 << 20  # read from the end of train.log
WARNING = re.compile(r"^warning: (.+)$", re.MULTILINE)


@dataclass
class RunReport:
    folder: Path
    fields: dict[str, Any]  # of run.json
    is_running: bool
    series: RunSeries
    samples: dict[str, list[tuple[int, str]]]  # prompt -> (step, answer), in the order of steps
    settings: list[Setting]
    overrides: list[str]
    checkpoints: list[tuple[str, int]]  # name and bytes
    warnings: list[str]
    evaluations: list[dict[str, Any]]  # records of evaluations.jsonl
    total_steps: int | None

    @property
    def status(self) -> str:
        """Status of run.json; a run without its process is interrupted, one that diverged is named so."""
        status = str(self.fields.get("status") or "unknown")
        if status == "failed" and self.fields.get("outcome") == "diverged":
            return "diverged"
        return "interrupted" if status == "running" and not self.is_running else status

    @property
    def name(self) -> str:
        """run.name, or the last two parts of the path."""
        return str(self.fields.get("name") or "/".join(self.folder.parts[-2:]))

    @property
    def attempts(self) -> list[dict[str, Any]]:
        recorded = self.fields.get("attempts")
        return [attempt for attempt in recorded if isinstance(attempt, dict)] if isinstance(recorded, list) else []

    @property
    def step(self) -> int:
        """Newest logged step, or that of run.json."""
        logged = [series.columns["step"][-1] or 0 for series in (self.series.train, self.series.eval) if len(series)]
        return int(max([*logged, count_number(self.fields.get("step")) or 0]))


def read_run_report(folder: Path) -> RunReport:
    fields = RunMetadata.read(folder)
    settings, overrides = read_settings(folder)
    series = read_run_series(islice(iter_records(folder / "metrics.jsonl"), MAX_RECORDS))
    return RunReport(
        folder=folder,
        fields=fields,
        is_running=fields.get("status") == "running" and is_alive(fields),
        series=series,
        samples=_samples(folder / "samples.jsonl"),
        settings=settings,
        overrides=overrides,
        checkpoints=[(name, _size(folder / "checkpoints" / name)) for name in step_names(folder / "checkpoints")],
        warnings=[*_warnings(folder / "train.log"), *_unread(folder / "metrics.jsonl")],
        evaluations=[*deque(islice(iter_records(folder / "evaluations.jsonl"), MAX_RECORDS), maxlen=MAX_EVALUATIONS)],
        total_steps=_total_steps(folder / "train.log"),
    )


def _samples(path: Path) -> dict[str, list[tuple[int, str]]]:
    """Return the newest MAX_SAMPLE_STEPS answers to each of the MAX_SAMPLES prompts that were answered last, cut to
    MAX_SAMPLE_CHARS.
    """
    answers: dict[str, deque[tuple[int, str]]] = {}
    for record in islice(iter_records(path), MAX_RECORDS):
        step, prompt, answer = count_number(record.get("step")), record.get("prompt"), record.get("answer")
        if step is not None and isinstance(prompt, str) and isinstance(answer, str):
            found = answers.pop(prompt, None) or deque(maxlen=MAX_SAMPLE_STEPS)
            found.append((int(step), answer[:MAX_SAMPLE_CHARS]))
            answers[prompt] = found  # the newest is the last
            if len(answers) > MAX_SAMPLES:
                del answers[next(iter(answers))]
    return {prompt: [*found] for prompt, found in answers.items()}


def _size(folder: Path) -> int:
    """Return the bytes of a checkpoint, by its manifest's files."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    except OSError:
        return 0


def _log_text(path: Path) -> str:
    try:
        fd, size = open_regular(path)
        with open(fd, "rb") as log:
            log.seek(max(0, size - LOG_TAIL_BYTES))
            return log.read(LOG_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _warnings(path: Path) -> list[str]:
    return [*dict.fromkeys(WARNING.findall(_log_text(path)))][-MAX_WARNINGS:]


def _unread(metrics: Path) -> list[str]:
    """Return a message if the file is too large to be drawn."""
    with suppress(OSError):
        if metrics.lstat().st_size > MAX_METRICS_BYTES:
            return [f"{metrics.name} is larger than {MAX_METRICS_BYTES >> 20} MiB: its curves and numbers are left out"]
    return []


def _total_steps(path: Path) -> int | None:
    """Return the number of steps that the newest progress line of train.log names."""
    found = re.findall(r"^step \d{1,15}/(\d{1,15}) ", _log_text(path), re.MULTILINE)
    return int(found[-1]) if found else None
