"""Folders of runs as a report reads them: the runs that `run=A,B,SWEEP` names, and the jobs of a sweep. No link is
followed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.filesystem import read_json_object
from common.ownership import is_alive
from runner.config.resolve import resolve_run
from runner.run_dir.contents import OWNER_FILE, RUN_FILE, SWEEP_FILE, is_sweep_dir

MAX_JOBS = 10_000  # of one sweep


def split_names(value: str) -> list[str]:
    """Return the names in `A,B,SWEEP` or `[A,B]`.

    The folder of a job may have commas in its name: the longest part that exists is one name.
    """
    if value.startswith("[") and value.endswith("]") and not Path(value).exists():
        value = value[1:-1]
    parts, names = value.split(","), []
    while parts:
        count = next(
            (
                count
                for count in range(len(parts), 1, -1)
                if Path(",".join(parts[:count]).strip()).expanduser().exists()
            ),
            1,
        )
        names.append(",".join(parts[:count]).strip())
        del parts[:count]
    return [name for name in names if name]


def resolve_runs(value: str) -> list[Path]:
    """Return the run and sweep directories that `run=A,B,SWEEP` names, each once."""
    return [*dict.fromkeys(resolve_run(name, "run") for name in split_names(value))]


def expand_sweeps(folders: list[Path]) -> list[Path]:
    """Return the run directories: a sweep stands for its jobs. Raises UserError for a sweep without any."""
    runs: dict[Path, None] = {}
    for folder in folders:
        found = job_folders(folder) if is_sweep_dir(folder) else [folder]
        if not found:
            raise UserError(
                "no job of this sweep has begun", f"run={folder}", "wait for its first job, or leave it out"
            )
        runs.update(dict.fromkeys(found))
    return [*runs]


def job_folders(sweep: Path) -> list[Path]:
    """Return the run directories of the jobs that have begun, in the order of sweep.json; those it does not name are
    last.
    """
    recorded = read_json_object(sweep / SWEEP_FILE).get("jobs")
    names = [job.get("name") for job in recorded if isinstance(job, dict)] if isinstance(recorded, list) else []
    order = {name: position for position, name in enumerate(names) if isinstance(name, str)}
    try:
        with os.scandir(sweep) as entries:
            found = [
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and is_file(sweep / entry.name / RUN_FILE)
            ]
    except OSError:
        return []
    return [sweep / name for name in sorted(found, key=lambda name: (order.get(name, len(order)), name))[:MAX_JOBS]]


def run_status(fields: Mapping[str, Any]) -> str:
    """Return the status of a run from the fields of its run.json: one without its process is interrupted, one that
    diverged is named so.
    """
    status = str(fields.get("status"))
    if status == "running" and not is_alive(fields):
        return "interrupted"
    return "diverged" if status == "failed" and fields.get("outcome") == "diverged" else status


def sweep_status(folder: Path, recorded: Mapping[str, Any]) -> str:
    """Return the status of a sweep from the fields of its sweep.json: one whose process was killed is interrupted. It
    leaves its owner file.
    """
    status = text_of(recorded.get("status"), 20) or "unknown"
    if status == "running" and (owner := read_json_object(folder / OWNER_FILE)) and not is_alive(owner):
        return "interrupted"
    return status


def first_start(fields: Mapping[str, Any]) -> object:
    """Return when a run was first started, from the fields of its run.json: `started` is that of the newest attempt.
    The oldest of many attempts are not kept.
    """
    attempts = fields.get("attempts")
    oldest = attempts[0] if isinstance(attempts, list) and attempts and isinstance(attempts[0], dict) else {}
    return oldest.get("started") or fields.get("started")


def text_of(value: object, limit: int = 200) -> str:
    """Return text of run.json for a table, "" for anything else."""
    return (
        value
        if isinstance(value, str) and len(value) <= limit
        else f"{value[:limit]} …"
        if isinstance(value, str)
        else ""
    )


def tags_of(fields: Mapping[str, Any]) -> list[str]:
    tags = fields.get("tags")
    return [text_of(tag, 40) for tag in tags[:20] if isinstance(tag, str)] if isinstance(tags, list) else []


def is_file(path: Path) -> bool:
    """Whether there is a regular file and no link to one."""
    return path.is_file() and not path.is_symlink()
