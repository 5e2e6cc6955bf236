"""`run.json`: what a run records about itself. Only the process that holds the lock of the run directory changes it."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from common.errors import Outcome, TrainingError, UserError, print_note
from common.filesystem import describe_disk_error, read_bounded, read_json_object, remove_quietly, retry_disk, sync_path, weaker_promises, write_json
from common.guarded_files import DAMAGED_DIR, check_own_files
from common.limits.parsers import parse_json
from common.ownership import processes
from common.ownership.owner_file import is_owner_file
from runner.checkpoint.atomic_dir import remove_temp, step_names
from runner.run_dir import naming, provenance
from runner.run_dir.lock import LOCK_FILE, MAX_JSON_BYTES, OWNER_FILE, RunLock, acquire_rank, acquire_run, describe_processes, unusable_error

RUN_FILE, HYDRA_DIR = "run.json", ".hydra"
RUN_STATUSES = ("new", "running", "interrupted", "failed", "completed")
DEFAULT_METADATA: dict[str, Any] = {
    "status": "new",
    "outcome": None,  # how the last attempt ended: completed, interrupted, diverged, failed
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
    "tokenizer_source": None,  # folder that tokenizer/ was copied from
    "evaluation": None,  # what identifies the evaluation rows
    "export": None,  # the weights in model/: best or last, step, evaluation loss
    "evaluations": [],  # newest results of evaluate.py: a repeated evaluation replaces its record
    "fingerprints": {},
    "id": None,  # of the run: its checkpoints have it, too
    "recovered": [],  # what resumes have repaired, or could not restore
    "weaker_promises": [],  # what the file system of the directory cannot do
}
# Types of the fields that are read again; None is allowed where the default is None, and for those that are absent at first
FIELD_TYPES = {name: type(value) for name, value in DEFAULT_METADATA.items() if value is not None} | {
    "outcome": str, "error": str, "degraded": str, "init_from": str, "tokenizer_source": str, "evaluation": dict, "export": dict, "id": str,
    "checkpoint": str, "stage": str, "model": str, "changed": list, "tracker_id": str, "attempts": list, "loss_tokens": int,
}  # fmt: skip
# What a launch may have written to its directory before it trains
OWN_NAMES = {
    RUN_FILE,
    HYDRA_DIR,
    LOCK_FILE,
    f"{LOCK_FILE}.owner",
    OWNER_FILE,
    "logs",
    "tokenizer",
    "train.log",
    "metrics.jsonl",
    "samples.jsonl",
    "checkpoints",
}
# What is opened by its name, or written into: no links, nothing but regular files and folders. The JSON files and checkpoints are checked as they are read.
GUARDED_NAMES = (
    HYDRA_DIR,
    LOCK_FILE,
    OWNER_FILE,
    DAMAGED_DIR,
    "logs",
    "tokenizer",
    "model",
    "train.log",
    "console.log",
    "evaluations.jsonl",
    "incidents.jsonl",
    "report.html",
    "uninterrupted",
    "resumed",
)
GUARDED_PATTERNS = ("metrics.*jsonl", "samples.*jsonl")


class RunMetadata:
    """The metadata of a run directory whose lock this process holds. `fields` is the content of run.json; only the methods change it."""

    _opened: ClassVar[dict[Path, RunMetadata]] = {}  # of this process, by run directory

    def __init__(self, folder: Path, lock: RunLock | None, fields: dict[str, Any], owns_folder: bool = True, is_writer: bool = True):
        self.folder, self.fields, self._lock = folder, fields, lock
        self._owns_folder, self.is_writer = owns_folder, is_writer
        self._is_new_dir = False  # whether this launch has created the directory
        self._names_before: list[str] | None = None  # names in the directory before this launch; None: it held a run

    @staticmethod
    def read(folder: Path) -> dict[str, Any]:
        """Return the fields of the run.json in `folder` without a lock; {} where there is none or it is damaged."""
        fields = read_json_object(folder / RUN_FILE)
        return fields if fields.get("status") in RUN_STATUSES else {}

    @classmethod
    def open(cls, folder: Path, resume: bool = False, recover: Callable[[Path], list[str]] = lambda folder: []) -> RunMetadata:
        """Create `folder` if needed, lock it and read its run.json; that of a new run is not written before `record_created`.

        `recover` repairs a damaged run that is resumed and returns messages, which are printed and recorded. Raises UserError, having changed
        nothing, if another process trains there, if it holds a run and `resume` is false, or if it holds none and `resume` is true.
        """
        folder = folder.absolute()
        if resume and not holds_run(folder):
            raise UserError("this directory holds no run: there is no run.json", str(folder), "give a run directory, e.g. resume=last")
        check_run_files(folder)
        is_new_run, lock = not holds_run(folder), acquire_run(folder)
        is_new_dir = naming.claim(folder)
        try:
            names = [name for name in os.listdir(folder) if name != LOCK_FILE and not is_owner_file(LOCK_FILE, name)]
            recovered = recover(folder) if resume else []
            fields = _load_fields(folder / RUN_FILE)
            if not resume:
                _check_no_run(folder, fields)
            retry_disk(partial(write_json, folder / OWNER_FILE, {**processes.process_id(), "since": timestamp()}))
            for parent in (folder, folder / "checkpoints"):
                if parent.is_dir():
                    remove_temp(parent)
            metadata = cls(folder, lock, fields)
            metadata._is_new_dir, metadata._names_before = is_new_dir, names if is_new_run else None
            metadata._record_recovery(recovered)
        except BaseException as error:
            if is_new_dir:
                naming.remove_dir(folder)
            lock.release()
            if isinstance(error, OSError):
                raise unusable_error(folder, error) from error
            raise
        cls._opened[folder] = metadata
        return metadata

    @classmethod
    def opened(cls, folder: Path) -> RunMetadata:
        """Return what `open` has returned in this process for `folder`."""
        return cls._opened[folder]

    @classmethod
    def attach(cls, folder: Path, rank: int) -> RunMetadata:
        """Open the directory in a rank of the launch that holds its lock and has called `allow_ranks`. Only rank 0 writes."""
        return cls(folder, acquire_rank(folder, rank), _load_fields(folder / RUN_FILE), owns_folder=False, is_writer=rank == 0)

    @classmethod
    def detached(cls, folder: Path, attempt: int) -> RunMetadata:
        """Return the metadata for a rank on a node that does not see the directory: nothing is locked or written."""
        return cls(folder, None, {**DEFAULT_METADATA, "attempt": attempt}, owns_folder=False, is_writer=False)

    def allow_ranks(self, keep: int = 1) -> None:
        """Shrink the lock of this process to `keep` bytes, so that ranks can lock theirs with `attach`."""
        assert self._lock is not None
        self._lock.shrink(keep)

    def set_rank_pids(self, pids: list[int]) -> None:
        """Record the processes of the ranks for the error message of a second launch."""
        try:
            write_json(self.folder / OWNER_FILE, {**processes.process_id(), "since": timestamp(), "ranks": describe_processes(pids)})
        except OSError:
            return  # only the error message of another process loses a detail

    def reread(self) -> None:
        """Read run.json again: rank 0, another process, has written to it."""
        self.fields = _load_fields(self.folder / RUN_FILE)

    @property
    def status(self) -> str:
        """Status of the run. `running` in run.json while the lock was free means that the process was killed: interrupted."""
        was_killed = self.fields["status"] == "running" and not self._was_written_by_this_process()
        return "interrupted" if was_killed else self.fields["status"]

    @property
    def attempt(self) -> int:
        return self.fields["attempt"]

    def record_created(self) -> None:
        """Write the first run.json, from which on the directory is a run: its settings are stored, so that `resume=` continues it after a kill."""
        try:
            if (hydra_dir := self.folder / HYDRA_DIR).is_dir():  # Hydra has not synced it: after a power cut a checkpoint could not be resumed
                for path in (*hydra_dir.glob("*.yaml"), hydra_dir, self.folder):
                    sync_path(path)
            self._write({"id": self.fields["id"] or secrets.token_hex(8)})
        except OSError as error:
            raise unusable_error(self.folder, error) from error

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """Mark a completed run as interrupted before settings that train it further are stored: after a kill it must not count as completed.

        A UserError inside restores run.json.
        """
        before = self.fields
        if before["status"] != "completed":
            yield
            return
        self._write({"status": "interrupted"})
        try:
            yield
        except UserError:
            self.revert(before)
            raise

    def _record_recovery(self, messages: list[str]) -> None:
        for message in messages:
            print_note(f"resume: {message}")
        if messages:
            self.update(recovered=messages)

    def mark_running(self, **fields: Any) -> None:
        """Begin an attempt: record its number, process, start time and library versions."""
        begun = {**processes.process_id(), **provenance.begin_attempt(self.fields, self.attempt + 1, timestamp())}
        identity = {"id": self.fields["id"] or secrets.token_hex(8)}  # None: of an earlier version
        try:
            self._write({"status": "running", "outcome": None, "error": None, "degraded": None, **identity, **begun, **fields})
        except OSError as error:
            raise unusable_error(self.folder, error) from error

    def update(self, **fields: Any) -> None:
        """Set `fields` and write run.json. If the disk refuses, the values are kept and written with the next update.

        Reasons in `inexact_because` are added to those of former resumes, and to the record of this attempt; messages in `recovered`, too.
        """
        if "recovered" in fields:
            fields |= {"recovered": [*dict.fromkeys([*self.fields["recovered"], *fields["recovered"]])]}
        if "inexact_because" in fields:
            reasons = {"exact": False, "inexact_because": fields["inexact_because"]}
            fields |= {"inexact_because": provenance.merge_reasons(self.fields, fields["inexact_because"]), "attempts": self._described(**reasons)}
        try:
            self._write(fields)
        except OSError:
            return

    def describe_attempt(self, code: Mapping[str, Any], **facts: Any) -> None:
        """Record what this attempt computes with. `code`: commit, uncommitted changes and fingerprint."""
        self.update(code=code, attempts=self._described(code=code, **facts))

    def _described(self, **facts: Any) -> list[dict[str, Any]]:
        return provenance.describe_attempt(self.fields, **facts)

    def revert(self, before: dict[str, Any]) -> None:
        """Write the fields `before` this attempt back: it was refused before it trained."""
        self.fields = {}
        with suppress(OSError):  # the refusal is what the user needs to see
            self._write(before)

    def check_owned(self) -> None:
        """Raise LostRunDirError if the directory was moved, deleted, replaced, or taken by another launch since it was opened."""
        if self._lock is not None:
            self._lock.check()

    def follow_move(self) -> Path | None:
        """Return where the directory was moved to, if `check_owned` has found that; run.json is written there from now on."""
        if self._lock is None or (folder := self._lock.follow_move()) is None:
            return None
        self._opened[folder] = self._opened.pop(self.folder, self)
        self.folder = folder
        return folder

    def finish(self, outcome: Outcome, error: str | None = None, **fields: Any) -> None:
        """End this attempt with `outcome`. The status of a diverged run is `failed`. Raises TrainingError if the disk refuses."""
        status = Outcome.FAILED if outcome == Outcome.DIVERGED else outcome
        changed = {"status": status, "outcome": outcome, "error": error, "ended": timestamp(), **fields}
        end = {name: changed[name] for name in provenance.RECORDED_AT_THE_END if name in changed}
        changed["attempts"] = self._described(**end)
        try:
            self._write(changed)
        except OSError as failure:
            message = f"the end of the run ({outcome}) could not be recorded: run.json: {describe_disk_error(failure, self.folder)}"
            if status == Outcome.FAILED:  # the error that ended the run is the one to report
                return print_note(f"warning: {message}")
            raise TrainingError(f"{message}; step {self.fields['step']} is saved, and resume= continues") from failure

    def discard_if_empty(self) -> None:
        """Remove the directory of a new run that was refused before it trained. If it existed before, or holds other files, what this launch has written."""
        if self._names_before is None or self.fields["status"] != "new" or self._lock is None:
            return
        names = os.listdir(self.folder)
        if has_checkpoints(self.folder) or _size_of(self.folder / "metrics.jsonl"):
            return
        if self._is_new_dir and OWN_NAMES.issuperset(names):
            return naming.remove_dir(self.folder)
        for name in OWN_NAMES.intersection(names).difference(self._names_before):
            remove_quietly(self.folder / name)

    @classmethod
    def discard_opened(cls) -> None:
        """Discard and close the new runs that this process has opened and not closed: Hydra failed before it called the task."""
        for metadata in [*cls._opened.values()]:
            if metadata._names_before is not None:
                metadata.discard_if_empty()
                metadata.close()

    def close(self) -> None:
        """Release the lock. The operating system releases it too when the process ends."""
        if self._lock is not None:
            if self._owns_folder:
                with suppress(OSError):
                    if self._lock.owns_owner_file():
                        (self.folder / OWNER_FILE).unlink(missing_ok=True)
                self._opened.pop(self.folder, None)
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self.discard_if_empty()
        self.close()

    def _was_written_by_this_process(self) -> bool:
        return all(self.fields.get(name) == value for name, value in processes.process_id().items())

    def _write(self, changed: Mapping[str, Any]) -> None:
        self.fields = {**self.fields, **_to_json(changed), "weaker_promises": weaker_promises()}
        if self.is_writer:
            self.check_owned()
            retry_disk(partial(write_json, self.folder / RUN_FILE, self.fields))


def check_run_files(folder: Path) -> None:
    """Raise UserError if a file or folder that a run opens in `folder` is a link, or neither a regular file nor a folder."""
    logs = [path.name for pattern in GUARDED_PATTERNS for path in folder.glob(pattern)]
    check_own_files(folder, (*GUARDED_NAMES, *logs), shallow=("checkpoints",))


def has_started(fields: Mapping[str, Any]) -> bool:
    """Return whether training began at least once: such a run is resumed, not started."""
    return bool(fields.get("attempt"))


def has_diverged(fields: Mapping[str, Any]) -> bool:
    return fields.get("outcome") == Outcome.DIVERGED


def exported_loss(fields: Mapping[str, Any]) -> float | str | None:
    """Return the loss that a completed run hands to a sweep: of the evaluation of the weights in model/, otherwise the last training loss.

    "inf" where none was finite, None where nothing was trained.
    """
    metrics, export = fields.get("metrics"), fields.get("export")
    if not isinstance(metrics, dict) or not metrics:
        return None  # train.verify_resume
    losses = [*([export.get("loss")] if isinstance(export, dict) else []), metrics.get("val_loss"), metrics.get("loss")]
    loss = next((value for value in losses if isinstance(value, int | float)), None)
    return "inf" if loss is None else float(loss)


def timestamp() -> str:
    """Return the local time in ISO format, in seconds."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def holds_run(folder: Path) -> bool:
    """Return whether there is a run: its run.json, or checkpoints from which that can be restored."""
    return (folder / RUN_FILE).is_file() or has_checkpoints(folder)


def check_fields(fields: Any) -> dict[str, Any]:
    """Return the content of run.json with defaults for a new run. Raises ValueError if it is damaged or of an older version."""
    if not isinstance(fields, dict) or fields.get("status") not in RUN_STATUSES:
        raise ValueError(f"unknown status {fields.get('status') if isinstance(fields, dict) else ''}")
    if "outcome" not in fields:
        raise ValueError("no field `outcome`, it was written by an older version of this program")
    for name, kind in FIELD_TYPES.items():
        value = fields.get(name, DEFAULT_METADATA.get(name))
        if type(value) is not kind and not (value is None and DEFAULT_METADATA.get(name) is None):
            raise ValueError(f"{name} is not of type {kind.__name__}")
    return {**DEFAULT_METADATA, **fields}


def _load_fields(path: Path) -> dict[str, Any]:
    """Return the fields of run.json with defaults for a new run. Raises UserError if the file is damaged or of an older version."""
    try:
        return check_fields(parse_json(read_bounded(path, MAX_JSON_BYTES)))
    except FileNotFoundError:
        return check_fields(dict(DEFAULT_METADATA))
    except (OSError, ValueError) as error:
        fix = f"resume={path.parent} restores it from a checkpoint; or start a new run with init_from=DIR"
        raise UserError(f"run.json cannot be read: {error}", str(path), fix) from error


def _check_no_run(folder: Path, fields: Mapping[str, Any]) -> None:
    """Raise UserError if the directory of a new run holds one, or what is left of one."""
    if fields["status"] != "new" or has_checkpoints(folder):
        raise UserError(
            f"this directory already holds a run ({fields['status']}, step {fields['step']})",
            str(folder),
            f"resume={folder} continues it; hydra.run.dir=DIR places the new run in another directory",
        )
    if not (folder / RUN_FILE).exists() and _size_of(folder / "metrics.jsonl"):
        fix = f"restore run.json or checkpoints/ and type resume={folder}; hydra.run.dir=DIR places a new run in another directory"
        raise UserError("this directory holds records of a run whose run.json and checkpoints are gone", str(folder), fix)


def has_checkpoints(folder: Path) -> bool:
    """Return whether the run has checkpoints, whole or not."""
    return bool(step_names(folder / "checkpoints"))


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _to_json(value: Any) -> Any:
    """Return `value` with paths as text and with null for NaN and infinities, which JSON lacks."""
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
