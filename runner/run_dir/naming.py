"""Where runs go: outputs/<date>/<time>, never twice the same, even for two launches in one second."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import count
from pathlib import Path

from common.paths import outputs_dir

NAME_LENGTH = 120  # of a job's folder; file systems end at 255 bytes

_created: list[str] = []
_swept_keys: set[str] = set()


def run_id() -> str:
    """<date>/<time> of this launch; the same at every call in a process once it is claimed."""
    return _created[0] if _created else datetime.now().strftime("%Y-%m-%d/%H-%M-%S")


def create_unique(sweep: bool) -> None:
    """Take a folder of outputs/ for this launch by making it: of two launches in one second the later gets a suffix."""
    root = outputs_dir() / "multirun" if sweep else outputs_dir()
    now = run_id()
    for n in count(1):
        name = now if n == 1 else f"{now}-{n}"
        os.makedirs((root / name).parent, exist_ok=True)
        try:
            os.mkdir(root / name)
        except FileExistsError:
            continue
        _created[:] = [name]
        return


def set_swept_keys(keys: Iterable[str]) -> None:
    """The words that differ between the jobs of this launch."""
    _swept_keys.update(keys)


def job_dirname(words: Iterable[str]) -> str:
    """The folder of a sweep's job, as Hydra asks for it: `job_name` of those words that set it apart."""
    pairs = (word.partition("=") for word in words)
    return job_dirname_of({key: value for key, _, value in pairs if key in _swept_keys})


def job_dirname_of(words: Mapping[str, str]) -> str:
    """The folder of a job: the words that set it apart, in an order of their own, as one name."""
    apart = ",".join(sorted(f"{key}={value}" for key, value in words.items())) or "job"
    name = re.sub(r"[^\w.=,+-]", "-", apart)
    if name == apart and len(name) <= NAME_LENGTH:
        return name
    return f"{name[: NAME_LENGTH - 9]}-{hashlib.sha256(apart.encode()).hexdigest()[:8]}"


def find_runs(*roots: Path) -> list[Path]:
    """Folders under `roots` that hold a run.json: single runs, and jobs of a sweep."""
    return [
        record.parent for root in roots for pattern in ("*/run.json", "*/*/run.json", "*/*/*/run.json", "*/*/*/*/run.json") for record in root.glob(pattern)
    ]
