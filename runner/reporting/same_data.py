"""Whether the jobs of a sweep that should have had the same data had it: a file may change between two of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.run_dir import saved_config

if TYPE_CHECKING:
    from runner.reporting.results import JobResult

SEED_KEY = "seed"
DATA_PREFIX = ("data", "stage", "experiment", "model")  # swept words that say what is trained on, or how it lies in rows


def data_identity(record: dict[str, Any]) -> tuple[Any, Any]:
    """What run.json says of the data: the fingerprint of what is trained on, and the rows of each file."""
    prints, files = record.get("fingerprints"), record.get("data")
    rows = [file.get("read") for file in files if isinstance(file, dict)] if isinstance(files, list) else None
    return prints.get("data") if isinstance(prints, dict) else None, rows


def compare_data(folder: Path, jobs: Iterable[JobResult]) -> None:
    """Of jobs whose words ask for the same data the first says which that is: a file may have changed before the next began."""
    first: dict[tuple, JobResult] = {}
    drawn: dict[tuple, bool] = {}
    for job in jobs:
        asked = tuple(sorted((word, value) for word, value in job.words.items() if word.startswith(DATA_PREFIX)))
        if job.data[0] is None or job.folder is None:
            continue
        if asked not in drawn:
            drawn[asked] = _is_drawn(folder / job.folder)
        for key, found in (((asked, None), 1), ((asked, job.words.get(SEED_KEY) if drawn[asked] else ""), 0)):
            other = first.setdefault(key, job)
            if None not in (other.data[found], job.data[found]) and other.data[found] != job.data[found]:
                job.unlike = job.unlike or other.name


def _is_drawn(run: Path) -> bool:
    """Whether the seed is part of its rows, as where system prompts are drawn for them."""
    try:
        data = saved_config.load_saved_config(run)["data"]
        return bool(data["system_prob"] or data["empty_think_prob"])
    except (ValueError, KeyError, TypeError):  # nothing is known: no job is blamed for its seed
        return True
