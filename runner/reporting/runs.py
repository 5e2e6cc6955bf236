"""Run directories as reports read them: which ones are named, and what is known of each from run.json and `.hydra/`.

No link is followed. A missing or damaged file leaves its part out and never raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from common.errors import UserError
from common.filesystem import read_bounded, read_json_object
from common.limits.parsers import parse_yaml
from common.ownership import is_alive
from runner.config.overrides import is_storable
from runner.config.resolve import resolve_run
from runner.reporting.metrics import Metrics, cached_by_file, read_job_metrics
from runner.run_dir.contents import OWNER_FILE, RUN_FILE, SWEEP_FILE, is_sweep_dir
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import CONFIG_FILE, load_saved_config

MAX_JOBS = 10_000  # of one sweep
MAX_OVERRIDES_BYTES = 1 << 20  # a larger file of overrides is not read
REPORT_FILE = "report.html"


@dataclass
class Run:
    folder: Path
    fields: dict[str, Any]  # of run.json
    status: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        fields = RunMetadata.read(folder)
        return cls(folder, fields, run_status(fields))

    @property
    def is_running(self) -> bool:
        return self.status == "running"

    @property
    def name(self) -> str:
        return self.text("name", 80)

    @property
    def note(self) -> str:
        return self.text("note", 500)

    @property
    def tags(self) -> list[str]:
        return [text_of(tag, 40) for tag in as_list(self.fields.get("tags"))[:20] if isinstance(tag, str)]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return [attempt for attempt in as_list(self.fields.get("attempts")) if isinstance(attempt, dict)]

    @property
    def started(self) -> object:
        """When the run was first started: `started` of run.json is that of the newest attempt. The oldest of many
        attempts are not kept.
        """
        return (self.attempts or [{}])[0].get("started") or self.fields.get("started")

    @property
    def metrics(self) -> Metrics:
        """The losses, with few points."""
        return read_job_metrics(self.folder / "metrics.jsonl")

    @property
    def settings(self) -> dict[str, str]:
        return saved_settings(self.folder / CONFIG_FILE)

    def text(self, field: str, limit: int = 200) -> str:
        return text_of(self.fields.get(field), limit)


def run_status(fields: Mapping[str, Any]) -> str:
    """Return the status of a run from the fields of its run.json: one without its process is interrupted, one that
    diverged is named so.
    """
    status = str(fields.get("status") or "unknown")
    if status == "running" and not is_alive(fields):
        return "interrupted"
    return "diverged" if status == "failed" and fields.get("outcome") == "diverged" else status


def sweep_status(folder: Path, recorded: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the status of a sweep from the fields of its sweep.json, and whether its process is known to be alive.

    One whose process was killed is interrupted. It leaves its owner file.
    """
    status = text_of(recorded.get("status"), 20) or "unknown"
    owner = read_json_object(folder / OWNER_FILE) if status == "running" else {}
    alive = is_alive(owner) if owner else False
    return ("interrupted" if owner and not alive else status), alive


def text_of(value: object, limit: int = 200) -> str:
    """Return text of run.json for a table, "" for anything else."""
    text = value if isinstance(value, str) else ""
    return text if len(text) <= limit else f"{text[:limit]} …"


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def flatten_settings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each setting, values as they are typed: null, true, 0.001."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flatten_settings(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@cached_by_file(1024)
def saved_settings(config: Path) -> dict[str, str]:
    """Return the composed settings in .hydra/config.yaml by key, without Hydra's own; {} if they cannot be read.

    Nothing in the file is resolved.
    """
    try:
        values = load_saved_config(config.parents[1])
    except (UserError, OSError, ValueError):
        return {}
    return {key: value for key, value in flatten_settings(values) if not key.startswith("hydra.")}


def read_override_list(path: Path) -> list[str]:
    """Return the overrides in a YAML file; [] if it holds anything that a run does not store."""
    try:
        content = as_list(parse_yaml(read_bounded(path, MAX_OVERRIDES_BYTES).decode("utf-8")))
    except (OSError, ValueError):
        return []
    return content if all(isinstance(item, str) and is_storable(item) for item in content) else []


# --- which directories --------------------------------------------------------------------------------------------------


def split_names(value: str) -> list[str]:
    """Return the names in `A,B,SWEEP` or `[A,B]`.

    The folder of a job may have commas in its name: the longest part that exists is one name.
    """
    if value.startswith("[") and value.endswith("]") and not Path(value).exists():
        value = value[1:-1]
    parts, names = value.split(","), []
    while parts:
        for count in range(len(parts), 0, -1):
            name = ",".join(parts[:count]).strip()
            if count == 1 or Path(name).expanduser().exists():
                break
        names += [name] if name else []
        del parts[:count]
    return names


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
    names = [as_dict(job).get("name") for job in as_list(read_json_object(sweep / SWEEP_FILE).get("jobs"))]
    order = {name: position for position, name in enumerate(names) if isinstance(name, str)}
    try:
        with os.scandir(sweep) as entries:
            found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    found = sorted(
        (name for name in found if is_file(sweep / name / RUN_FILE)),
        key=lambda name: (order.get(name, len(names)), name),
    )
    return [sweep / name for name in found[:MAX_JOBS]]


def is_file(path: Path) -> bool:
    """Whether there is a regular file and no link to one."""
    return path.is_file() and not path.is_symlink()
