"""Names of run directories: outputs/<date>/<time>, unique also for two launches in one second, and the directories of a sweep's jobs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path

NAME_LENGTH = 120  # characters of a job's directory name; file systems allow 255 bytes


def create_unique(folder: Path) -> Path:
    """Create the directory `folder`, with a suffix (-2, -3, ...) if it exists: the later of two launches in one second gets one. Return it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        unique = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            unique.mkdir()
        except FileExistsError:
            continue
        return unique
    raise AssertionError("count() ends never")


def job_dirname(swept: Mapping[str, str]) -> str:
    """Return the directory name of a job: its swept values, sorted by key, shortened with a hash where the name is too long or has other characters."""
    values = ",".join(sorted(f"{key}={value}" for key, value in swept.items())) or "job"
    name = re.sub(r"[^\w.=,+-]", "-", values)
    if name == values and len(name) <= NAME_LENGTH:
        return name
    return f"{name[: NAME_LENGTH - 9]}-{hashlib.sha256(values.encode()).hexdigest()[:8]}"


def find_runs(*roots: Path) -> list[Path]:
    """Return the run directories under `roots`: single runs, and jobs of a sweep."""
    return [file.parent for root in roots for pattern in ("*/run.json", "*/*/run.json", "*/*/*/run.json", "*/*/*/*/run.json") for file in root.glob(pattern)]
