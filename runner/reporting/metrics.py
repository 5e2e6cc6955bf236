"""metrics.jsonl as columns: what pages of runs and sweeps, tables and texts show.

A missing or damaged file gives fewer values, or none, and never raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import strip_control
from common.filesystem import open_regular
from common.limits import parse_record
from runner.diagnostics.symptoms import Evaluation, RecordedEvaluations, finite_number

MAX_METRICS_BYTES = 256 << 20  # a larger metrics.jsonl is not read
MAX_RECORDS = 2_000_000  # of metrics.jsonl; a file of MAX_METRICS_BYTES that a run has written has about one million
METRICS_READ_BYTES = 1 << 20  # of metrics.jsonl that are parsed at a time; a longer line is not read
MAX_POINTS, MAX_CURVE_POINTS = 2000, 500  # of one kind of record: of a run's page, of a job or a compared run
MAX_FIELDS, MAX_NAME_CHARS = 60, 60  # of one kind of record, and characters of their names
# of steps and tokens, exclusive: all smaller whole numbers are exact floats, here and in the scripts of a page
MAX_COUNT = 2**53
AXES = ("step", "tokens", "seconds")
NOT_DRAWN = {"kind", "step", "tokens", "loss_tokens", "time", "attempt", "epoch", "nonfinite", "rows_since"}


class Position(NamedTuple):
    """How far a run is at a record."""

    step: float
    loss_tokens: float  # tokens with a label so far
    tokens: float  # all tokens computed so far
    time: float  # seconds of training so far, over all attempts


@dataclass
class Curve:
    """Records of one kind: a column for each axis and field, all of one length.

    None: not logged, or not finite.
    """

    columns: dict[str, list[float | None]] = field(default_factory=dict)
    records: int = 0  # before the reduction

    def __len__(self) -> int:
        return len(self.columns.get("step", ()))

    @property
    def fields(self) -> list[str]:
        return [name for name in self.columns if name not in AXES]

    def last(self, name: str) -> float | None:
        """Return the newest value of a field; None if it was not finite or there is none."""
        return (self.columns.get(name) or [None])[-1]

    def newest_loss(self) -> float | None:
        """Return the newest loss, infinite if it was not finite; None without records."""
        return (math.inf if (loss := self.last("loss")) is None else loss) if len(self) else None

    def lowest(self) -> tuple[float, float] | None:
        """Return the lowest loss and its step."""
        pairs = zip(self.columns.get("loss", ()), self.columns.get("step", ()), strict=False)
        return min(((value, step or 0.0) for value, step in pairs if value is not None), default=None)


@dataclass
class Metrics:
    train: Curve = field(default_factory=Curve)
    eval: Curve = field(default_factory=Curve)
    attempt_starts: list[float] = field(default_factory=list)  # step before which each later attempt began
    nonfinite: dict[str, int] = field(default_factory=dict)  # field -> records in which it was NaN or infinite
    tokens_per_second: float | None = None  # mean over all attempts
    peak_memory: float | None = None  # largest of all attempts, bytes
    # step and seconds of the first and the newest training record of the newest attempt
    attempt_first: tuple[float, float] | None = None
    attempt_last: tuple[float, float] | None = None
    overfitting: tuple[Evaluation, Evaluation] | None = None  # best and newest evaluation of a run that overfits
    last: Position | None = None  # of the newest record


def metrics_of(records: Iterable[Mapping[str, Any]], limit: int = MAX_POINTS, only: Sequence[str] = ()) -> Metrics:
    """Return the columns of the records, with about `limit` points per kind. `only`: the fields to keep, () for all.

    `time` starts at 0 in each attempt: the time of the attempts before is added to it. The mean of tokens_per_second
    is by tokens: all tokens by the time that their steps took, without saves, evaluation and samples.
    """
    metrics, evaluations = Metrics(), RecordedEvaluations()
    kept: dict[str, list[dict[str, float | None]]] = {"train": [], "eval": []}
    attempt, earlier = None, 0.0
    loss_tokens = tokens = time = timed_from = timed_tokens = timed_seconds = 0.0
    for record in records:
        kind, step = str(record.get("kind")), count_number(record.get("step"))
        if kind not in kept or step is None:
            continue
        if record.get("attempt") != attempt:
            attempt, earlier, time = record.get("attempt"), earlier + time, 0.0
            metrics.attempt_first = metrics.attempt_last = None
            metrics.attempt_starts += [step] if metrics.last else []
        time = finite_number(record.get("time")) or time
        tokens = count_number(record.get("tokens")) or tokens
        loss_tokens = count_number(record.get("loss_tokens")) or loss_tokens
        metrics.last = at = Position(step, loss_tokens, tokens, earlier + time)
        values: dict[str, float | None] = {"step": step, "tokens": tokens, "seconds": at.time}
        for name, value in ((name, record.get(name)) for name in only or record):
            if name not in NOT_DRAWN and (value is None or isinstance(value, int | float)):
                name = _column_name(name)
                values[name] = number = finite_number(value)
                if number is None:
                    metrics.nonfinite[name] = metrics.nonfinite.get(name, 0) + 1
        kept[kind].append(values)
        if (loss := values.get("loss")) is not None:
            evaluations.add(kind, step, loss, finite_number(record.get("rows_since")) or 0)
        if kind == "train":
            speed = finite_number(record.get("tokens_per_second")) or 0.0
            if speed > 0 and tokens > timed_from:
                timed_tokens += tokens - timed_from
                timed_seconds += (tokens - timed_from) / speed
            timed_from = tokens
            if (memory := finite_number(record.get("peak_memory"))) is not None:
                metrics.peak_memory = max(memory, metrics.peak_memory or memory)
            metrics.attempt_last = (step, at.time)
            metrics.attempt_first = metrics.attempt_first or metrics.attempt_last
    metrics.train, metrics.eval = (_curve(each, limit) for each in kept.values())
    metrics.tokens_per_second = timed_tokens / timed_seconds if timed_seconds else None
    metrics.overfitting = evaluations.overfitting
    return metrics


@lru_cache(maxsize=1024)
def _column_name(field: str) -> str:
    return strip_control(field)[:MAX_NAME_CHARS]


def _curve(records: Sequence[Mapping[str, float | None]], limit: int) -> Curve:
    names = [*dict.fromkeys(name for record in records for name in record)][:MAX_FIELDS]
    kept = choose_points([record.get("loss") for record in records], limit)
    return Curve({name: [records[index].get(name) for index in kept] for name in names}, len(records))


def choose_points(values: Sequence[float | None], limit: int) -> list[int]:
    """Return the indices of about `limit` points that show the same curve: first, last, and of each span the lowest,
    the highest and its first gap. Points are chosen, never computed.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    size = math.ceil(len(values) / max(1, limit // 3))
    chosen = {0, len(values) - 1}
    for start in range(0, len(values), size):
        span = range(start, min(start + size, len(values)))
        finite = [(value, index) for index in span if (value := values[index]) is not None]
        chosen.update((min(finite)[1], max(finite)[1]) if finite else ())
        chosen.update([next(index for index in span if values[index] is None)] if len(finite) < len(span) else ())
    return sorted(chosen)


def file_signature(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file, as a key of a cache: pages are written again and again."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_job_metrics(path: Path) -> Metrics:
    """Return the losses of a metrics.jsonl, with few points."""
    return _read_job_metrics(path, file_signature(path))


@lru_cache(maxsize=640)  # 0.2 MB each at most
def _read_job_metrics(path: Path, signature: object) -> Metrics:
    return metrics_of(iter_records(path), MAX_CURVE_POINTS, only=("loss",))


def iter_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every line that is a JSON object, at most MAX_RECORDS."""
    return islice(filter(None, map(parse_record, _iter_lines(path))), MAX_RECORDS)


def _iter_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without those that are too long; none of a file that is too large."""
    try:
        fd, size = open_regular(path)
        with open(fd, "rb") as file:
            while size <= MAX_METRICS_BYTES and (lines := file.readlines(METRICS_READ_BYTES)):
                yield from (line for line in lines if len(line) <= METRICS_READ_BYTES)
    except OSError:
        return


def count_number(value: object) -> float | None:
    """Return `value` as a float if it can be a step or a number of tokens: from 0 to below MAX_COUNT, else None."""
    number = finite_number(value)
    return number if number is not None and 0 <= number < MAX_COUNT else None
