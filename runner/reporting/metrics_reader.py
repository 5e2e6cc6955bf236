"""Read metrics.jsonl and the overrides of a run. A missing or damaged file gives fewer values, or none, and never raises."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from common.filesystem import read_bounded
from runner.config.overrides import is_storable

MAX_FILE_BYTES = 256 << 20  # larger files are not read
MAX_NUMBER = 1e100  # larger values count as infinite, so that sums and axes stay finite


class LossPoint(NamedTuple):
    """One logged loss."""

    step: float
    loss_tokens: float  # tokens with a label so far
    tokens: float  # all tokens computed so far
    time: float  # seconds of training so far, over all attempts
    loss: float | None  # None: not finite


@dataclass
class RunMetrics:
    train: list[LossPoint] = field(default_factory=list)
    eval: list[LossPoint] = field(default_factory=list)
    tokens_per_second: float | None = None

    @property
    def last(self) -> LossPoint | None:
        return max((points[-1] for points in (self.train, self.eval) if points), key=lambda point: (point.step, point.time), default=None)


def read_override_list(path: Path) -> list[str]:
    """Return the overrides in a YAML file; [] if it holds anything that a run does not store."""
    try:
        content = yaml.safe_load(read_bounded(path, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    return content if isinstance(content, list) and all(isinstance(item, str) and is_storable(item) for item in content) else []


def read_run_metrics(path: Path) -> RunMetrics:
    """Read metrics.jsonl. `time` starts at 0 in each attempt: the time of the attempts before is added to it."""
    metrics = RunMetrics()
    series = {"train": metrics.train, "eval": metrics.eval}
    attempt, earlier_attempts, time = None, 0.0, 0.0
    loss_tokens = tokens = timed_from = timed_tokens = seconds = 0.0  # timed_tokens / seconds: the mean of tokens_per_second, by tokens
    for record in _read_records(path):
        record_step = finite_number(record.get("step"))
        points = series.get(str(record.get("kind")))
        if record_step is None or points is None:
            continue
        if record.get("attempt") != attempt:
            attempt, earlier_attempts, time = record.get("attempt"), earlier_attempts + time, 0.0
        time = _finite_or(record.get("time"), time)
        if "loss_tokens" not in record:  # version 0.1.0, whose `tokens` are those with a label
            record = {**record, "loss_tokens": record.get("tokens"), "tokens": None}
        loss_tokens, tokens = _finite_or(record.get("loss_tokens"), loss_tokens), _finite_or(record.get("tokens"), tokens)
        points.append(LossPoint(record_step, loss_tokens, tokens, earlier_attempts + time, finite_number(record.get("loss"))))
        if points is metrics.train:
            speed = finite_number(record.get("tokens_per_second"))
            if speed and speed > 0 and tokens > timed_from:
                timed_tokens += tokens - timed_from
                seconds += (tokens - timed_from) / speed
            timed_from = tokens
    metrics.tokens_per_second = timed_tokens / seconds if seconds else None
    return metrics


def _read_records(path: Path) -> list[dict[str, Any]]:
    """Return every line that is a JSON object. All lines are parsed in one call, which is faster, and one by one only if that fails."""
    try:
        lines = [line for line in read_bounded(path, MAX_FILE_BYTES).decode("utf-8", "replace").split("\n") if line]
    except OSError:
        return []
    records = _parse_json(f"[{','.join(lines)}]")
    return [record for record in (map(_parse_json, lines) if records is None else records) if isinstance(record, dict)]


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def finite_number(value: object) -> float | None:
    """Return `value` as a float if it is a finite number of at most MAX_NUMBER, else None. A bool is not a number."""
    if type(value) is not float and type(value) is not int:
        return None
    return float(value) if abs(value) < MAX_NUMBER else None


def _finite_or(value: object, default: float) -> float:
    number = finite_number(value)
    return default if number is None else number
