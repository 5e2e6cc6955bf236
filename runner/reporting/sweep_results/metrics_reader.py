"""Read metrics.jsonl and the overrides of a run.

A missing or damaged file gives fewer values, or none, and never raises.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.filesystem import open_regular, read_bounded
from common.limits.parsers import parse_yaml
from runner.config.overrides import is_storable
from runner.diagnostics.overfitting import Evaluation, RecordedEvaluations
from runner.reporting.curve_points import choose_points

MAX_OVERRIDES_BYTES = 1 << 20  # a larger file of overrides is not read
MAX_METRICS_BYTES = 256 << 20  # a larger metrics.jsonl is not read
MAX_RECORDS = 2_000_000  # of metrics.jsonl; a file of MAX_METRICS_BYTES that a run has written has about one million
METRICS_READ_BYTES = 1 << 20  # of metrics.jsonl that are parsed at a time; a longer line is not read
MAX_CURVE_POINTS = 500  # of one kind of record, of a job of a sweep
MAX_NUMBER = 1e100  # larger values count as infinite, so that sums and axes stay finite
# of steps and tokens, exclusive: all smaller whole numbers are exact floats, here and in the scripts of a page
MAX_COUNT = 2**53


class MeanSpeed:
    """The mean of tokens_per_second by tokens: those of all logged steps by the time that the steps took, without
    saves, evaluation and samples.
    """

    def __init__(self) -> None:
        self._timed_from = self._tokens = self._seconds = 0.0

    def add(self, tokens: float, speed: float | None) -> None:
        """Add a record of training with its `tokens` so far and its tokens_per_second."""
        if speed and speed > 0 and tokens > self._timed_from:
            self._tokens += tokens - self._timed_from
            self._seconds += (tokens - self._timed_from) / speed
        self._timed_from = tokens

    @property
    def tokens_per_second(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None


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
    overfitting: tuple[Evaluation, Evaluation] | None = None  # best and newest evaluation of a run that overfits

    @property
    def last(self) -> LossPoint | None:
        return max(
            (points[-1] for points in (self.train, self.eval) if points),
            key=lambda point: (point.step, point.time),
            default=None,
        )


def read_override_list(path: Path) -> list[str]:
    """Return the overrides in a YAML file; [] if it holds anything that a run does not store."""
    try:
        content = parse_yaml(read_bounded(path, MAX_OVERRIDES_BYTES).decode("utf-8"))
    except (OSError, ValueError):
        return []
    return (
        content
        if isinstance(content, list) and all(isinstance(item, str) and is_storable(item) for item in content)
        else []
    )


def read_run_metrics(path: Path) -> RunMetrics:
    """Read metrics.jsonl.

    `time` starts at 0 in each attempt: the time of the attempts before is added to it.
    """
    metrics = RunMetrics()
    series = {"train": metrics.train, "eval": metrics.eval}
    attempt, earlier_attempts, time = None, 0.0, 0.0
    loss_tokens = tokens = 0.0
    speed, evaluations = MeanSpeed(), RecordedEvaluations()
    for record in islice(iter_records(path), MAX_RECORDS):
        record_step = count_number(record.get("step"))
        points = series.get(str(record.get("kind")))
        if record_step is None or points is None:
            continue
        if record.get("attempt") != attempt:
            attempt, earlier_attempts, time = record.get("attempt"), earlier_attempts + time, 0.0
        time = _or_else(finite_number(record.get("time")), time)
        if "loss_tokens" not in record:  # version 0.1.0, whose `tokens` are those with a label
            record = {**record, "loss_tokens": record.get("tokens"), "tokens": None}
        loss_tokens, tokens = (
            _or_else(count_number(record.get("loss_tokens")), loss_tokens),
            _or_else(count_number(record.get("tokens")), tokens),
        )
        points.append(
            LossPoint(
                record_step, loss_tokens, tokens, earlier_attempts + time, loss := finite_number(record.get("loss"))
            )
        )
        if loss is not None:
            evaluations.add(str(record["kind"]), record_step, loss)
        if points is metrics.train:
            speed.add(tokens, finite_number(record.get("tokens_per_second")))
    metrics.tokens_per_second, metrics.overfitting = speed.tokens_per_second, evaluations.overfitting
    return metrics


def read_job_metrics(path: Path) -> RunMetrics:
    """Return `read_run_metrics` with at most about MAX_CURVE_POINTS points per kind: first, last, lowest and highest
    stay. A file that did not change is read once per process: the page of a sweep is written again while its other jobs
    train.
    """
    try:
        stat = path.stat()
    except OSError:
        return RunMetrics()
    return _read_job_metrics(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=640)  # 0.2 MB each at most
def _read_job_metrics(path: Path, signature: tuple[int, int, int]) -> RunMetrics:
    metrics = read_run_metrics(path)
    return RunMetrics(
        _fewer_points(metrics.train), _fewer_points(metrics.eval), metrics.tokens_per_second, metrics.overfitting
    )


def _fewer_points(points: list[LossPoint]) -> list[LossPoint]:
    return [points[index] for index in choose_points([point.loss for point in points], MAX_CURVE_POINTS)]


def iter_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every line that is a JSON object.

    Lines are parsed many at a time, which is faster, and one by one only if that fails.
    """
    try:
        fd, size = open_regular(path)
        with open(fd, "rb") as file:
            while size <= MAX_METRICS_BYTES and (lines := file.readlines(METRICS_READ_BYTES)):
                texts = [
                    line.decode("utf-8", "replace")
                    for line in lines
                    if line.strip() and len(line) <= METRICS_READ_BYTES
                ]
                records = _parse_json(f"[{','.join(texts)}]")
                yield from (
                    record
                    for record in (map(_parse_json, texts) if records is None else records)
                    if isinstance(record, dict)
                )
    except OSError:
        return


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def finite_number(value: object) -> float | None:
    """Return `value` as a float if it is a finite number of at most MAX_NUMBER, else None.

    A bool is not a number.
    """
    if type(value) is not float and type(value) is not int:
        return None
    return float(value) if abs(value) < MAX_NUMBER else None


def count_number(value: object) -> float | None:
    """Return `value` as a float if it can be a step or a number of tokens: from 0 to below MAX_COUNT, else None."""
    number = finite_number(value)
    return number if number is not None and 0 <= number < MAX_COUNT else None


def _or_else(number: float | None, default: float) -> float:
    return default if number is None else number
