"""The table of faults.py: one line per kind of fault."""

from __future__ import annotations

from collections.abc import Callable

from runner.fault_injection.config import FAULT_KINDS
from runner.fault_injection.rig import FaultResult

TABLE_COLUMNS: dict[str, Callable[[list[FaultResult]], str]] = {
    "injected": lambda results: f"{sum(result.injected for result in results)} of {len(results)}",
    "acknowledged within": lambda results: _seconds(
        [result.acknowledged for result in results if result.acknowledged is not None], "{:.2f} s"
    ),
    "resumed": lambda results: str(sum(len(result.codes) > 1 and not result.started_again for result in results)),
    "started again": lambda results: str(sum(result.started_again > 0 for result in results)),
    "needed a hand": lambda results: _count(results, "hand"),
    "different bits": lambda results: _count(results, "bits"),
    "tracebacks": lambda results: _count(results, "tracebacks"),
    "untrue exits": lambda results: _count(results, "exits"),
    "left behind": lambda results: _count(results, "leftovers"),
    "longest": lambda results: _seconds([result.seconds for result in results], "{:.1f} s"),
}


def fault_table(results: list[FaultResult]) -> str:
    """Return the table as text, also readable as Markdown."""
    rows = [["fault", *TABLE_COLUMNS], ["---", *["---:"] * len(TABLE_COLUMNS)]]
    for kind in FAULT_KINDS:
        if of_kind := [result for result in results if result.kind == kind]:
            rows.append([kind, *(column(of_kind) for column in TABLE_COLUMNS.values())])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "| "
        + " | ".join(f"{cell:{'<' if index == 0 else '>'}{widths[index]}}" for index, cell in enumerate(row))
        + " |"
        for row in rows
    )


def _count(results: list[FaultResult], promise: str) -> str:
    """Return how many faults broke a promise."""
    return str(sum(bool(getattr(result, promise)) for result in results))


def _seconds(values: list[float], text: str) -> str:
    return text.format(max(values)) if values else ""
