"""Files and folders of a run directory, and the fields of its run.json.

outputs/<date>/<time> is unique also for two launches in one second. Facts about the process, the git commit and the
libraries that are unknown are None; reading them raises nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import re
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from common.errors import Outcome, UserError
from common.filesystem import fs, make_dirs, read_bounded, read_json_object, remove_tree, temp_name
from common.guarded_files import DAMAGED_DIR, check_own_files
from common.limits import parse_json
from common.paths import REPO_ROOT, outputs_dir
from runner.checkpoint.atomic_dir import step_names

RUN_FILE, HYDRA_DIR = "run.json", ".hydra"
LOCK_FILE, OWNER_FILE = ".lock", ".owner.json"
# What a launch may have written to its directory before it trains
OWN_NAMES = {RUN_FILE, HYDRA_DIR, LOCK_FILE, f"{LOCK_FILE}.owner", OWNER_FILE}
OWN_NAMES |= set("logs tokenizer train.log metrics.jsonl samples.jsonl checkpoints".split())
# What is opened by its name, or written into: no links, nothing but regular files and folders. The JSON files and
# checkpoints are checked as they are read.
GUARDED_NAMES = [HYDRA_DIR, LOCK_FILE, OWNER_FILE, DAMAGED_DIR]
GUARDED_NAMES += """
    logs tokenizer model train.log console.log evaluations.jsonl incidents.jsonl profile.json report.html
    uninterrupted resumed
""".split()
GUARDED_PATTERNS = ("metrics.*jsonl", "samples.*jsonl")
SWEEP_FILE = "sweep.json"


def check_run_files(folder: Path) -> None:
    """Raise UserError if a file or folder that a run opens in `folder` is a link, or neither a regular file nor a
    folder.
    """
    logs = [path.name for pattern in GUARDED_PATTERNS for path in folder.glob(pattern)]
    check_own_files(folder, (*GUARDED_NAMES, *logs), shallow=("checkpoints",))


def holds_run(folder: Path) -> bool:
    """Return whether there is a run: its run.json, or checkpoints from which that can be restored."""
    return (folder / RUN_FILE).is_file() or has_checkpoints(folder)


def is_sweep_dir(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


def sweep_of(run: Path) -> Path:
    """Return the sweep that the run is a job of, or the run itself."""
    return run.parent if is_sweep_dir(run.parent) else run


def enclosing_run(path: Path) -> Path | None:
    """Return the innermost run or sweep directory that is `path` or contains it."""
    return next((folder for folder in (path, *path.parents) if holds_run(folder) or is_sweep_dir(folder)), None)


def enclosing_record(path: Path) -> Path | None:
    """Return the innermost directory with a run.json or sweep.json that is `path` or contains it.

    Folders above may belong to others: nothing in them is listed.
    """
    return next(
        (folder for folder in (path, *path.parents) if (folder / RUN_FILE).is_file() or is_sweep_dir(folder)), None
    )


def has_checkpoints(folder: Path) -> bool:
    """Return whether the run has checkpoints, whole or not."""
    return bool(step_names(folder / "checkpoints"))


def check_no_run(folder: Path, fields: Mapping[str, Any]) -> None:
    """Raise UserError if the directory of a new run holds one, or what is left of one."""
    if fields["status"] != "new" or has_checkpoints(folder):
        raise UserError(
            f"this directory already holds a run ({fields['status']}, step {fields['step']})",
            folder,
            f"resume={folder} continues it; hydra.run.dir=DIR places the new run in another directory",
        )
    if not (folder / RUN_FILE).exists() and size_of(folder / "metrics.jsonl"):
        fix = f"restore run.json or checkpoints/ and type resume={folder}; hydra.run.dir=DIR places a new run in another directory"
        raise UserError("this directory holds records of a run whose run.json and checkpoints are gone", folder, fix)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


NAME_LENGTH = 120  # characters of a job's directory name; file systems allow 255 bytes

_created: set[Path] = set()  # directories that this process has created for runs and sweeps


def create_dirs(folder: Path) -> None:
    """Create the directory `folder` and its parents.

    Those that are new are removed if the launch is refused.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_dirs(folder)
    finally:
        _created.update(path for path in missing if path.is_dir())


def create_unique(folder: Path) -> Path:
    """Create the directory `folder`, with a suffix (-2, -3, ...) if it exists: the later of two launches in one second
    gets one. Return it.
    """
    unique = folder
    with suppress(OSError):  # to lock the directory is refused then, with a fix
        create_dirs(folder.parent)
        for number in itertools.count(1):
            unique = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
            with suppress(FileExistsError):
                unique.mkdir()
                _created.add(unique)
                break
    return unique


def claim(folder: Path) -> bool:
    """Return whether this process has created `folder` for the run or sweep that it opens now."""
    is_new = folder in _created
    _created.discard(folder)
    return is_new


def remove_dir(folder: Path) -> None:
    """Remove `folder` in one rename, then its parents that this process has created, as far as they are empty. The
    caller holds its lock.
    """
    with suppress(OSError):  # a broken disk: the refusal is what the user needs to see
        doomed = folder.with_name(temp_name("del", folder.name))
        fs.rename(folder, doomed)
        remove_tree(doomed)
        for parent in itertools.takewhile(
            lambda parent: parent in _created or outputs_dir() in parent.parents, folder.parents
        ):
            fs.rmdir(parent)  # raises OSError if it holds something else
            _created.discard(parent)


def job_dirname(swept: Mapping[str, str]) -> str:
    """Return the directory name of a job: its swept values, sorted by key, shortened with a hash where the name is too
    long or has other characters.
    """
    values = ",".join(sorted(f"{key}={value}" for key, value in swept.items())) or "job"
    name = re.sub(r"[^\w.=,+-]", "-", values)
    if name == values and len(name) <= NAME_LENGTH:
        return name
    return f"{name[: NAME_LENGTH - 9]}-{hashlib.sha256(values.encode()).hexdigest()[:8]}"


def find_runs(*roots: Path) -> list[Path]:
    """Return the run directories under `roots`: single runs, and jobs of a sweep."""
    return [file.parent for root in roots for depth in range(1, 5) for file in root.glob("*/" * depth + RUN_FILE)]


MAX_JSON_BYTES = 16 << 20  # bytes; larger JSON files are not read
RUN_STATUSES = ("new", "running", "interrupted", "failed", "completed")
DEFAULT_METADATA: dict[str, Any] = {
    "status": "new",
    "outcome": None,  # how the last attempt ended: completed, interrupted, paused, diverged, failed
    "attempt": 0,  # launches that began to train in this directory
    "step": 0,  # optimizer steps
    "tokens": 0,
    "metrics": {},
    "error": None,
    "exact": True,  # every resume so far was bitwise equal to a run without interruption
    "inexact_because": [],
    "attempts": [],  # of each: when and how it ran, with what code, libraries, processor, ranks, threads and settings
    "degraded": None,  # message of a disk problem that training survives
    "model": None,  # name of its architecture, for reports
    "name": "",  # run.name, run.tags and run.note
    "tags": [],
    "note": "",
    "init_from": None,
    "branched_from": None,  # run, step and checksum of the checkpoint whose state a branch has continued
    "tokenizer_source": None,  # folder that tokenizer/ was copied from
    "evaluation": None,  # what identifies the evaluation rows
    "export": None,  # the weights in model/: best or last, step, evaluation loss
    "evaluations": [],  # newest results of evaluate.py: a repeated evaluation replaces its record
    "fingerprints": {},
    "id": None,  # of the run: its checkpoints have it, too
    "recovered": [],  # what resumes have repaired, or could not restore
    "weaker_promises": [],  # what the file system of the directory cannot do
}
# Types of the fields that are read again; None is allowed where the default is None, and for those that are absent at
# first
FIELD_TYPES = {name: type(value) for name, value in DEFAULT_METADATA.items() if value is not None}
FIELD_TYPES |= dict.fromkeys(
    "outcome error degraded init_from tokenizer_source id checkpoint stage model tracker_id".split(), str
)
FIELD_TYPES |= dict.fromkeys(("evaluation", "export", "branched_from", "code"), dict)
FIELD_TYPES |= {"changed": list, "data": list, "loss_tokens": int}


# Fields that are read of sweep.json and of a job in it, with their defaults; see `typed`.
SWEEP_FIELDS = {"jobs": [], "swept": {}, "overrides": [], "status": "", "created": "", "sweeper": "grid"}
JOB_FIELDS = {
    **dict.fromkeys(("name", "status", "error", "started", "ended", "outcome", "loss"), ""),
    **{"overrides": {}, "last_lines": [], "applied_overrides": []},
}
OBJECT_LISTS = ("attempts", "data", "evaluations", "jobs")


def typed(found: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `found` with the default in place of a field that is missing or of another type. None: of any type.

    Of a list of OBJECT_LISTS only the objects are kept.
    """
    fields = {**defaults, **found}
    for name, default in defaults.items():
        if default is not None and not isinstance(fields[name], type(default)):
            fields[name] = default
        if name in OBJECT_LISTS:
            fields[name] = [each for each in fields[name] if isinstance(each, dict)]
    return fields


def read_sweep_file(folder: Path) -> dict[str, Any]:
    """Return the fields of sweep.json, typed as SWEEP_FIELDS, and of its jobs, typed as JOB_FIELDS."""
    sweep = typed(read_json_object(folder / SWEEP_FILE), SWEEP_FIELDS)
    sweep["jobs"] = [typed(job, JOB_FIELDS) for job in sweep["jobs"]]
    for job in sweep["jobs"]:
        job["overrides"] = {str(key): str(value) for key, value in job["overrides"].items()}
    return sweep


def has_started(fields: Mapping[str, Any]) -> bool:
    """Return whether training began at least once: such a run is resumed, not started."""
    return bool(fields.get("attempt"))


def has_diverged(fields: Mapping[str, Any]) -> bool:
    return fields.get("outcome") == Outcome.DIVERGED


def has_paused(fields: Mapping[str, Any]) -> bool:
    """Return whether train.stop_at has ended the run."""
    return fields.get("status") == "interrupted" and fields.get("outcome") == Outcome.PAUSED


def lacks_model(folder: Path, fields: Mapping[str, Any]) -> bool:
    """Return whether the run has completed, and its model/ is gone: a resume writes it again."""
    return fields.get("status") == "completed" and bool(fields.get("export")) and not (folder / "model").is_dir()


def exported_loss(fields: Mapping[str, Any]) -> float | str | None:
    """Return the loss that a completed run hands to a sweep: of the evaluation of the weights in model/, otherwise the
    last training loss.

    "inf" where none was finite, None where nothing was trained.
    """
    metrics, export = fields.get("metrics"), fields.get("export") or {}
    if not metrics:
        return None  # train.verify_resume
    losses = (export.get("loss"), metrics.get("val_loss"), metrics.get("loss"))
    loss = next((value for value in losses if isinstance(value, int | float)), None)
    return "inf" if loss is None else float(loss)


def timestamp() -> str:
    """Return the local time in ISO format, in seconds."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def parse_time(text: object) -> float | None:
    """Return the seconds since 1970 of a time in ISO format; None if it is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def has_type(name: str, value: object) -> bool:
    """Return whether a field of run.json may have this value: one of its type, or None where that is the default."""
    if value is None and DEFAULT_METADATA.get(name) is None:
        return True
    if name in ("attempts", "data"):
        return isinstance(value, list) and all(isinstance(each, dict) for each in value)
    return name not in FIELD_TYPES or type(value) is FIELD_TYPES[name]


def check_fields(fields: Any) -> dict[str, Any]:
    """Return the content of run.json with defaults for a new run.

    Raises ValueError if it is damaged or of an older version.
    """
    if not isinstance(fields, dict) or fields.get("status") not in RUN_STATUSES:
        raise ValueError(f"unknown status {fields.get('status') if isinstance(fields, dict) else ''}")
    if "outcome" not in fields:
        raise ValueError("no field `outcome`, it was written by an older version of this program")
    if wrong := next((name for name, value in fields.items() if not has_type(name, value)), None):
        raise ValueError(f"{wrong} is not of type {FIELD_TYPES[wrong].__name__}, or holds other values than objects")
    return {**DEFAULT_METADATA, **fields}


def load_fields(path: Path) -> dict[str, Any]:
    """Return the fields of run.json with defaults for a new run.

    Raises UserError if the file is damaged or of an older version.
    """
    try:
        return check_fields(parse_json(read_bounded(path, MAX_JSON_BYTES)))
    except FileNotFoundError:
        return check_fields(dict(DEFAULT_METADATA))
    except (OSError, ValueError) as error:
        fix = f"resume={path.parent} restores it from a checkpoint; or start a new run with init_from=DIR"
        raise UserError(f"run.json cannot be read: {error}", path, fix) from error


RECORDED_LIBRARIES = "torch numpy safetensors tokenizers transformers hydra-core omegaconf swanlab".split()
GIT_SECONDS = 1.0  # that a run waits for git after everything else is built


def git_state(root: Path = REPO_ROOT) -> dict[str, str | None]:
    """Return the commit of this checkout, and the sha256 of the difference of tracked files to it (None: there is
    none).
    """
    lines = (_git(root, "rev-parse", "--show-toplevel", "HEAD") or b"").decode("utf-8", "replace").splitlines()
    # no repository, or installed inside of another one
    if len(lines) != 2 or Path(lines[0]).resolve() != root.resolve():
        return {"commit": None, "dirty": None}
    changes = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    return {"commit": lines[1], "dirty": hashlib.sha256(changes).hexdigest() if changes else None}


class GitReader(threading.Thread):
    """`git_state`, read by a thread: in a large repository git takes seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._git_state: dict[str, str | None] = {"commit": None, "dirty": None}
        self.start()

    def run(self) -> None:
        self._git_state = git_state()

    def result(self, seconds: float = GIT_SECONDS) -> dict[str, str | None]:
        """Return `git_state`, unknown if git does not answer within `seconds` from now."""
        self.join(seconds)
        return self._git_state


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries, without importing them."""
    versions = {"python": platform.python_version()}
    for name in RECORDED_LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments],
            check=False,
            capture_output=True,
            timeout=5,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout if result.returncode == 0 else None


def recorded_precision(fields: Mapping[str, Any]) -> str | None:
    """Return what the newest attempt has computed in, by run.json: `precision=auto` does not say it."""
    attempts = reversed(fields.get("attempts", ()))
    return next((text for each in attempts if isinstance(text := each.get("precision"), str)), None)
