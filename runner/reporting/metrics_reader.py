"""What a job has written down about itself, as far as it can be read: a file that is missing, torn or damaged says less and stops nobody."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from common.filesystem import read_bounded

MAX_FILE_BYTES = 256 << 20  # bytes of a file we believe
MAX_NUMBER = 1e100


class LossPoint(NamedTuple):
    """One logged loss."""

    step: float
    tokens: float
    time: float  # seconds of training that led here, over all attempts
    loss: float | None  # None: not finite


@dataclass
class RunMetrics:
    train: list[LossPoint] = field(default_factory=list)
    eval: list[LossPoint] = field(default_factory=list)
    tokens_per_second: float | None = None

    @property
    def last(self) -> LossPoint | None:
        return max((marks[-1] for marks in (self.train, self.eval) if marks), key=lambda mark: (mark.step, mark.time), default=None)


def read_json_object(path: Path) -> dict[str, Any]:
    """Empty where there is nothing to read."""
    try:
        found = json.loads(read_bounded(path, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_override_list(path: Path) -> list[str]:
    """A list of words in YAML; empty where there is none."""
    try:
        found = yaml.safe_load(read_bounded(path, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    return found if isinstance(found, list) and all(isinstance(word, str) for word in found) else []


def read_run_metrics(path: Path) -> RunMetrics:
    """`time` begins anew with each attempt: what the attempts before have kept in the file is added."""
    logged = RunMetrics()
    series = {"train": logged.train, "eval": logged.eval}
    before = time = pace = 0.0  # pace: seconds a token took, each line counting for the steps since the one before
    attempt, step, paced, tokens = None, 0.0, 0.0, 0.0
    for line in _read_lines(path):
        now = finite_number(line.get("step"))
        marks = series.get(str(line.get("kind")))
        if now is None or marks is None:
            continue
        if line.get("attempt") != attempt:
            attempt, before, time = line.get("attempt"), before + time, 0.0
        time = _or(finite_number(line.get("time")), time)
        tokens = _or(finite_number(line.get("tokens")), tokens)
        marks.append(LossPoint(now, tokens, before + time, finite_number(line.get("loss"))))
        rate = finite_number(line.get("tokens_per_second"))
        if marks is logged.train and rate and rate > 0 and now > step:
            pace, paced = pace + (now - step) / rate, paced + now - step
        if marks is logged.train:
            step = now
    logged.tokens_per_second = paced / pace if pace else None
    return logged


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Every line that can be read. A sweep has many: they are parsed at once, and one by one only where that fails."""
    try:
        lines = [line for line in read_bounded(path, MAX_FILE_BYTES).decode("utf-8", "replace").split("\n") if line]
    except OSError:
        return []
    found = _parse_line(f"[{','.join(lines)}]")
    return [line for line in (map(_parse_line, lines) if found is None else found) if isinstance(line, dict)]


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def finite_number(value: object) -> float | None:
    """A finite number, or None; what no training comes to counts as infinite, so that sums and pictures stay finite too."""
    if type(value) is not float and type(value) is not int:  # True is no number
        return None
    return float(value) if abs(value) < MAX_NUMBER else None


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
