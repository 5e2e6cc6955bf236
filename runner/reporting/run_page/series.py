"""The columns of metrics.jsonl for the charts of a run, reduced to what a screen can show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import strip_control
from runner.diagnostics.overfitting import Evaluation, RecordedEvaluations
from runner.reporting.curve_points import choose_points
from runner.reporting.sweep_results.metrics_reader import MeanSpeed, count_number, finite_number

MAX_POINTS = 2000  # of one kind of record on the page
MAX_FIELDS, MAX_NAME_CHARS = 60, 60  # of one kind of record, and characters of their names
AXES = ("step", "tokens", "seconds")
NOT_DRAWN = {"kind", "step", "tokens", "loss_tokens", "time", "attempt", "epoch", "nonfinite"}
Numbers = list[float | None]


@dataclass
class Series:
    """Records of one kind: a column for each axis and field, all of one length.

    None: not logged, or not finite.
    """

    columns: dict[str, Numbers] = field(default_factory=dict)
    records: int = 0  # before the reduction

    def __len__(self) -> int:
        return len(self.columns.get("step", ()))

    @property
    def fields(self) -> list[str]:
        return [name for name in self.columns if name not in AXES]

    def last(self, name: str) -> float | None:
        """Return the newest value of a field; None if it was not finite or there is none."""
        column = self.columns.get(name) or [None]
        return column[-1]

    def lowest(self, name: str) -> tuple[float, float] | None:
        """Return the lowest value of a field and its step."""
        values = [
            (value, step or 0.0)
            for value, step in zip(self.columns.get(name, ()), self.columns.get("step", ()), strict=False)
            if value is not None
        ]
        return min(values, default=None)


@dataclass
class RunSeries:
    train: Series
    eval: Series
    attempt_starts: list[float]  # step before which each attempt after the first began
    nonfinite: dict[str, int]  # field -> records in which it was NaN or infinite
    tokens_per_second: float | None = None  # mean over all attempts
    peak_memory: float | None = None  # largest of all attempts, bytes
    # step and seconds of the first training record of the newest attempt
    attempt_first: tuple[float, float] | None = None
    attempt_last: tuple[float, float] | None = None  # of its newest one
    # best and newest evaluation of a run that overfits, as its warning says
    overfitting: tuple[Evaluation, Evaluation] | None = None


def read_run_series(records: Iterable[Mapping[str, Any]]) -> RunSeries:
    """Return the columns of the records of a metrics.jsonl.

    `time` begins at 0 in each attempt: `seconds` adds the attempts before.
    """
    kinds: dict[str, list[dict[str, float | None]]] = {"train": [], "eval": []}
    starts: list[float] = []
    nonfinite: dict[str, int] = {}
    speed, peak_memory = MeanSpeed(), None
    first = last = None
    evaluations = RecordedEvaluations()
    for kind, record, is_new_attempt in _with_seconds(records):
        if is_new_attempt:
            first = last = None
        if kind == "train":
            speed.add(record["tokens"] or 0.0, record.get("tokens_per_second"))
            peak_memory = max(
                (value for value in (peak_memory, record.get("peak_memory")) if value is not None), default=None
            )
            last = (record["step"] or 0.0, record["seconds"] or 0.0)
            first = first or last
        if (loss := record.get("loss")) is not None:
            evaluations.add(kind, record["step"] or 0.0, loss)
        if is_new_attempt and (kinds["train"] or kinds["eval"]):
            starts.append(record["step"] or 0.0)
        kinds[kind].append(record)
        for name, value in record.items():
            if value is None:
                nonfinite[name] = nonfinite.get(name, 0) + 1
    return RunSeries(
        _columns(kinds["train"]),
        _columns(kinds["eval"]),
        starts,
        nonfinite,
        speed.tokens_per_second,
        peak_memory,
        first,
        last,
        evaluations.overfitting,
    )


def _with_seconds(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, float | None], bool]]:
    """Yield (kind, axes and numbers, whether its attempt is another than that of the record before) for each usable
    record.
    """
    attempt, earlier, seconds, tokens = None, 0.0, 0.0, 0.0
    for record in records:
        kind, step = record.get("kind"), count_number(record.get("step"))
        if kind not in ("train", "eval") or step is None:
            continue
        is_new_attempt = record.get("attempt") != attempt
        if is_new_attempt:
            attempt, earlier, seconds = record.get("attempt"), earlier + seconds, 0.0
        seconds = finite_number(record.get("time")) or seconds
        tokens = count_number(record.get("tokens")) or tokens
        values: dict[str, float | None] = {"step": step, "tokens": tokens, "seconds": earlier + seconds}
        for name, value in record.items():
            if name not in NOT_DRAWN and (value is None or isinstance(value, int | float)):
                values[strip_control(str(name))[:MAX_NAME_CHARS]] = finite_number(value)
        yield str(kind), values, is_new_attempt


def _columns(records: Sequence[Mapping[str, float | None]]) -> Series:
    names = [*dict.fromkeys(name for record in records for name in record)][:MAX_FIELDS]
    kept = choose_points([record.get("loss") for record in records], MAX_POINTS)
    return Series({name: [records[index].get(name) for index in kept] for name in names}, len(records))
