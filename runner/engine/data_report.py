"""FIXME runner.engine.data_report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.batching.mixture import WeightedSource


DATA_COLUMNS: dict[str, Callable[[dict[str, Any]], int]] = {
    "read": lambda file: file["read"],
    "kept": lambda file: file["kept"],
    "split": lambda file: file["split"],
    "cut": lambda file: file["truncated"],
    "dropped": lambda file: sum(file["dropped"].values()),
    "bad": lambda file: sum(file["bad"].values()),
    "tokens": lambda file: file["tokens"],
    "with loss": lambda file: file["loss_tokens"],
    "loss cut off": lambda file: file["lost_loss_tokens"],
}


def describe_source(part: WeightedSource) -> dict[str, Any]:
    counts = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(part.store.stats).items()}
    return {"file": part.source.name, "shape": part.store.metadata["encoding"]["schema"], **counts}


def data_table(files: list[dict[str, Any]]) -> str:
    """What became of the rows of each file, as lines of text."""
    head = ["rows of", "shape", *DATA_COLUMNS]
    lines = [[Path(file["file"]).name, file["shape"], *(f"{count(file):,}" for count in DATA_COLUMNS.values())] for file in files]
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    told = [
        "  ".join(f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}" for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in [head, *lines]
    ]
    for file in files:
        for kind in ("dropped", "bad"):
            told += [f"  {kind} {count:,}: {reason} (first: {file['first_seen'][reason]})" for reason, count in file[kind].items()]
    return "\n".join(line.rstrip() for line in told)
