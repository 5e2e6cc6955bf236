"""Run directories as reports read them: which ones are named, and what is known of each from run.json and `.hydra/`.

No link is followed. A missing or damaged file leaves its part out and never raises.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from common.errors import UserError
from common.filesystem import read_json_object
from common.ownership import is_alive
from common.settings import as_typed, flat_settings
from runner.config.overrides import is_override_list, is_storable
from runner.config.resolve import resolve_run
from runner.reporting.metrics import Metrics, count_number, file_signature, read_job_metrics
from runner.run_dir.contents import (
    DEFAULT_METADATA,
    OWNER_FILE,
    RUN_FILE,
    has_paused,
    is_sweep_dir,
    read_sweep_file,
    recorded_precision,
    typed,
)
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import CONFIG_FILE, OVERRIDES_FILE, load_saved_config, load_yaml

MAX_TRUNK = 1000  # characters of the path of the run that a branch continues
STEP_DIGITS = 15  # of a number of steps
MAX_JOBS = 10_000  # of one sweep
REPORT_FILE = "report.html"
NO_VALUE = "–"
NO_STATUS = "unknown"  # status of a run or sweep whose file cannot be read
# Fields that are read of run.json, with their defaults; see `typed`.
RUN_FIELDS = {
    **DEFAULT_METADATA,
    **dict.fromkeys(("stage", "model", "init_from", "error", "degraded", "host", "started", "ended"), ""),
    **{"data": [], "changed": [], "versions": {}, "code": {}},
}


@dataclass
class Run:
    folder: Path
    fields: dict[str, Any]  # of run.json, typed as RUN_FIELDS
    status: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        found = RunMetadata.read(folder)
        return cls(folder, typed(found, RUN_FIELDS), run_status(found))

    @property
    def is_running(self) -> bool:
        return self.status == "running"

    @property
    def name(self) -> str:
        return text_of(self.fields["name"], 80)

    @property
    def note(self) -> str:
        return text_of(self.fields["note"], 500)

    @property
    def tags(self) -> list[str]:
        return [text_of(tag, 40) for tag in self.fields["tags"][:20] if isinstance(tag, str)]

    @property
    def branched_from(self) -> tuple[str, int] | None:
        """Return run directory and step of the checkpoint that the run continues; None: it is no branch."""
        found = as_dict(self.fields["branched_from"])
        step = count_number(found.get("step"))
        return None if step is None else (text_of(found.get("run"), MAX_TRUNK), int(step))

    @property
    def began(self) -> str:
        """What the run began from; empty where run.json does not say."""
        if self.branched_from:
            return "branched from {} at step {:,}".format(*self.branched_from)
        start = text_of(self.fields["init_from"], MAX_TRUNK)
        return "from random weights" if start == "scratch" else f"from {start}" if start else ""

    @property
    def started(self) -> str:
        """When the run was first started: `started` of run.json is that of the newest attempt. The oldest of many
        attempts are not kept.
        """
        first = self.fields["attempts"][0].get("started") if self.fields["attempts"] else None
        return str(first or self.fields["started"])

    @property
    def metrics(self) -> Metrics:
        """The losses, with few points."""
        return read_job_metrics(self.folder / "metrics.jsonl")

    @property
    def step(self) -> int:
        """The newest step that is logged or in run.json."""
        logged = self.metrics.last.step if self.metrics.last else 0
        return int(max(logged, count_number(self.fields["step"]) or 0))

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole run; None: no attempt knew them before it was stopped."""
        totals = (count_number(attempt.get("total_steps")) for attempt in reversed(self.fields["attempts"]))
        return next((int(total) for total in totals if total), None)

    @property
    def settings(self) -> dict[str, str]:
        return saved_settings(self.folder)

    @property
    def overrides(self) -> list[str]:
        return read_override_list(self.folder / OVERRIDES_FILE)


def run_status(fields: Mapping[str, Any]) -> str:
    """Return the status of a run from the fields of its run.json: one without its process is interrupted, one that
    diverged or paused is named so.
    """
    status = str(fields.get("status") or NO_STATUS)
    if status == "running" and not is_alive(fields):
        return "interrupted"
    if has_paused(fields):
        return "paused"
    return "diverged" if status == "failed" and fields.get("outcome") == "diverged" else status


def sweep_status(folder: Path, recorded: str) -> tuple[str, bool]:
    """Return the status of a sweep whose sweep.json says `recorded`, and whether its process is known to be alive.

    One whose process was killed is interrupted. It leaves its owner file.
    """
    owner = read_json_object(folder / OWNER_FILE) if recorded == "running" else {}
    alive = bool(owner) and is_alive(owner)
    return ("interrupted" if owner and not alive else text_of(recorded, 20) or NO_STATUS), alive


def text_of(value: object, limit: int = 200) -> str:
    """Return text of run.json for a table, "" for anything else."""
    text = value if isinstance(value, str) else ""
    return text if len(text) <= limit else f"{text[:limit]} …"


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def saved_settings(run_dir: Path) -> dict[str, str]:
    """Return the composed settings in .hydra/config.yaml by key, without Hydra's own; {} if they cannot be read.

    Nothing in the file is resolved but precision=auto.
    """
    settings = _saved_settings(run_dir, file_signature(run_dir / CONFIG_FILE))
    if settings.get("precision.name") == "auto" and (precision := recorded_precision(RunMetadata.read(run_dir))):
        return settings | {"precision.name": precision}
    return settings


@lru_cache(maxsize=1024)
def _saved_settings(run_dir: Path, signature: object) -> dict[str, str]:
    try:
        values = load_saved_config(run_dir)
    except (UserError, OSError, ValueError):
        return {}
    return {key: as_typed(value) for key, value in flat_settings(values) if not key.startswith("hydra.")}


def read_override_list(path: Path) -> list[str]:
    """Return the overrides in a YAML file; [] if it holds anything that a run does not store."""
    try:
        content = load_yaml(path)
    except (OSError, ValueError):
        return []
    return content if is_override_list(content) and all(map(is_storable, content)) else []


def differing_values(settings: list[dict[str, str]]) -> dict[str, list[str]]:
    """Return the values of the keys that are not the same everywhere; NO_VALUE where one has no such key."""
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = {key: [each.get(key, NO_VALUE) for each in settings] for key in keys}
    return {key: values for key, values in rows.items() if len({*values}) > 1}


def longer_override(settings: Mapping[str, str]) -> str | None:
    """Return the override that doubles a training; None if its length is not known."""
    for key in ("train.max_steps", "train.epochs"):
        if value := whole_number(settings.get(key, "")):
            return f"{key}={2 * value}"
    return None


def whole_number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= STEP_DIGITS else None


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
    names = [job["name"] for job in read_sweep_file(sweep)["jobs"]]
    order = {name: position for position, name in enumerate(names)}
    found = [name for name in subfolders(sweep) if is_file(sweep / name / RUN_FILE)]
    found.sort(key=lambda name: (order.get(name, len(names)), name))
    return [sweep / name for name in found[:MAX_JOBS]]


def subfolders(folder: Path) -> set[str]:
    """Return the names of the folders in `folder`, without links."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
    except OSError:
        return set()


def is_file(path: Path) -> bool:
    """Whether there is a regular file and no link to one."""
    return os.path.isfile(path) and not path.is_symlink()
