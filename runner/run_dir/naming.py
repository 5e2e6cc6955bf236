"""Names of run directories: outputs/<date>/<time>, unique also for two launches in one second, and the directories of a sweep's jobs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from datetime import datetime
from itertools import count
from pathlib import Path

from common.paths import outputs_dir
from runner.config.compose import register_resolver

NAME_LENGTH = 120  # characters of a job's directory name; file systems allow 255 bytes

_created: list[str] = []  # <date>/<time> of the directory that this process has created


def register_resolvers() -> None:
    """Register the interpolation of conf/config.yaml that places a run or a sweep."""
    register_resolver("run_id", run_id)


def run_id() -> str:
    """Return <date>/<time>: of the directory that `create_unique` has created, otherwise of now."""
    return _created[0] if _created else datetime.now().strftime("%Y-%m-%d/%H-%M-%S")


def create_unique(sweep: bool) -> None:
    """Create a new directory in outputs/ and make it the `run_id`. The later of two launches in one second gets a suffix."""
    root = outputs_dir() / "multirun" if sweep else outputs_dir()
    now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    for number in count(1):
        name = now if number == 1 else f"{now}-{number}"
        os.makedirs((root / name).parent, exist_ok=True)
        try:
            os.mkdir(root / name)
        except FileExistsError:
            continue
        _created[:] = [name]
        return


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
