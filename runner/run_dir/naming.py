"""Directories of runs and sweeps: their names, outputs/<date>/<time>, unique also for two launches in one second; their creation and removal."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from common.filesystem import fs, make_dirs, remove_tree, temp_name
from common.paths import outputs_dir

NAME_LENGTH = 120  # characters of a job's directory name; file systems allow 255 bytes

_created: set[Path] = set()  # directories that this process has created for runs and sweeps


def create_dirs(folder: Path) -> None:
    """Create the directory `folder` and its parents. Those that are new are removed if the launch is refused."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_dirs(folder)
    finally:
        _created.update(path for path in missing if path.is_dir())


def create_unique(folder: Path) -> Path:
    """Create the directory `folder`, with a suffix (-2, -3, ...) if it exists: the later of two launches in one second gets one. Return it."""
    create_dirs(folder.parent)
    for number in itertools.count(1):
        unique = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            unique.mkdir()
        except FileExistsError:
            continue
        _created.add(unique)
        return unique
    raise AssertionError("count() ends never")


def claim(folder: Path) -> bool:
    """Return whether this process has created `folder` for the run or sweep that it opens now."""
    is_new = folder in _created
    _created.discard(folder)
    return is_new


def remove_dir(folder: Path) -> None:
    """Remove `folder` in one rename, then its parents that this process has created, as far as they are empty. The caller holds its lock."""
    with suppress(OSError):  # a broken disk: the refusal is what the user needs to see
        doomed = folder.with_name(temp_name("del", folder.name))
        fs.rename(folder, doomed)
        remove_tree(doomed)
        for parent in itertools.takewhile(lambda parent: parent in _created or outputs_dir() in parent.parents, folder.parents):
            fs.rmdir(parent)  # raises OSError if it holds something else
            _created.discard(parent)


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
