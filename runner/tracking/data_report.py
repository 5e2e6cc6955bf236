"""What a run reports about its data files: counts of rows, detected formats and unused columns, for run.json and the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.batching.mixture import WeightedSource
    from data.sources.files import Source

MAX_LISTED_COLUMNS, MAX_LISTED_FILES = 20, 3  # in one line of the log; run.json has all
DATA_COLUMNS: dict[str, Callable[[dict[str, Any]], int]] = {  # of data_table, from a dict of describe_source
    "read": lambda file: file["read"],
    "kept": lambda file: file["kept"],
    "split": lambda file: file["split"],
    "truncated": lambda file: file["truncated"],
    "dropped": lambda file: sum(file["dropped"].values()),
    "bad": lambda file: sum(file["bad"].values()),
    "tokens": lambda file: file["tokens"],
    "with loss": lambda file: file["loss_tokens"],
    "loss cut off": lambda file: file["lost_loss_tokens"],
}


def describe_source(part: WeightedSource) -> dict[str, Any]:
    """Return file, schema and counts of rows, as JSON values."""
    counts = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(part.store.stats).items() if name != "lost_by_length"}
    return {"file": part.source.name, "schema": part.store.metadata["encoding"]["schema"], **counts}


def reading_notes(sources: list[Source]) -> list[str]:
    """Return a line for the files whose encoding or delimiter was detected."""
    return [f"{files}: {detected}" for detected, files in _grouped((source.detected, Path(source.name).name) for source in sources)]


def unused_columns(files: list[dict[str, Any]]) -> list[str]:
    """Return a line for the files with fields that training ignores; rows in which they are null do not count."""
    named = ((_listed(sorted(file["unused"]), MAX_LISTED_COLUMNS), Path(file["file"]).name) for file in files)
    return [f"unused columns of {where}: {columns}" for columns, where in _grouped(named)]


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return (text, files) for each text that is not empty."""
    groups: dict[str, list[str]] = {}
    for text, file in pairs:
        groups.setdefault(text, []).append(file)
    return [(text, _listed(files, MAX_LISTED_FILES)) for text, files in groups.items() if text]


def _listed(names: list[str], limit: int) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def data_table(files: list[dict[str, Any]]) -> str:
    """Return a text table: one line per file, then the reasons for dropped and bad rows."""
    header = ["rows of", "schema", *DATA_COLUMNS]
    table = [header, *([Path(file["file"]).name, file["schema"], *(f"{count(file):,}" for count in DATA_COLUMNS.values())] for file in files)]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    lines = [
        "  ".join(f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}" for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
    for file in files:
        for kind in ("dropped", "bad"):
            lines += [f"  {kind} {count:,}: {reason} (first: {file['first_seen'][reason]})" for reason, count in file[kind].items()]
    return "\n".join(line.rstrip() for line in lines)
