"""sweep.json: what a sweep says of itself and of its jobs; and the lock that lets one process at a time drive it.

A job's own run.json is nearer to the truth: whatever driver was killed before it could write something down, `open` catches up.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from common.errors import UserError
from common.filesystem import make_dirs, read_bounded, write_json
from runner.config.overrides import canonical_value
from runner.run_dir import provenance
from runner.run_dir.lock import LOCK_FILE, MAX_JSON_BYTES, OWNER_FILE, describe_holder
from runner.run_dir.metadata import RUN_FILE, RUN_STATUSES, final_loss, has_diverged, has_started, read_run_metadata, timestamp
from runner.run_dir.naming import job_dirname_of

SWEEP_STATE_FILE = "sweep.json"
ENDED_STATUSES = ("interrupted", "failed", "completed")
SweepJob = dict[str, Any]


class SweepState:
    """A sweep's folder that is ours. `fields` is what sweep.json says; change it by `add`, `mark` and `finish` only."""

    def __init__(self, folder: Path, lock: int, fields: dict[str, Any]):
        self.folder, self.fields, self._lock = folder, fields, lock
        self.stale = False  # whether a job has got on without this sweep

    @classmethod
    def create(cls, folder: Path, **fields: Any) -> SweepState:
        """A new sweep; nothing is written yet. Raises ValueError(what, where, fix) if there is one, or a run."""
        if found := next((name for name in (SWEEP_STATE_FILE, RUN_FILE) if (folder / name).exists()), None):
            what = "a sweep" if found == SWEEP_STATE_FILE else "a run"
            raise UserError(f"this folder already holds {what}", str(folder), f"continue it with resume={folder}, or choose another hydra.sweep.dir")
        if run := next((place for place in folder.parents if (place / RUN_FILE).is_file()), None):
            raise UserError("this folder lies inside a run", str(folder), f"continue that with resume={run}, or choose another hydra.sweep.dir")
        if other := next((place for place in folder.parents if (place / SWEEP_STATE_FILE).is_file()), None):
            raise UserError("this folder lies inside a sweep", str(folder), f"continue that with resume={other}, or choose another hydra.sweep.dir")
        return cls(folder, _acquire_sweep_lock(folder), {**fields, "status": "running", "created": timestamp(), "jobs": []})

    @classmethod
    def open(cls, folder: Path) -> SweepState:
        """The sweep of `folder`, each job as it stands by now."""
        lock = _acquire_sweep_lock(folder)
        try:
            state = cls(folder, lock, _read_state(folder / SWEEP_STATE_FILE))
            state.refresh_from_runs()
        except BaseException:
            _release_sweep_lock(folder, lock)
            raise
        return state

    @classmethod
    def open_readonly(cls, folder: Path) -> SweepState:
        """The same to look at: no lock is taken, so it is not to be written."""
        state = cls(folder, -1, _read_state(folder / SWEEP_STATE_FILE))
        state.refresh_from_runs()
        return state

    @property
    def jobs(self) -> list[SweepJob]:
        return self.fields["jobs"]

    def find(self, words: Mapping[str, str]) -> SweepJob | None:
        """The job of these swept words, in whatever order, however a number in them is written."""
        asked = _canonical_overrides(words)
        return next((job for job in self.jobs if _canonical_overrides(job["overrides"]) == asked), None)

    def add(self, words: Mapping[str, str]) -> SweepJob:
        """The job of these swept words; a new one where there is none. Nothing is written yet."""
        if known := self.find(words):
            return known
        job: SweepJob = {
            "name": job_dirname_of(words),
            "overrides": dict(words),
            "status": "new",
            "attempt": 0,
            "error": None,
            "started": None,
            "ended": None,
            "loss": None,
        }
        self.jobs.append(job)
        return job

    def update_job(self, job: SweepJob, **fields: Any) -> None:
        job.update(fields)
        self.write()

    def refresh_from_runs(self) -> None:
        for job in self.jobs:
            now_is = job_status(job, read_run_metadata(self.folder / job["name"]))
            self.stale |= any(now_is.get(word, job[word]) != job[word] for word in ("status", "loss"))
            job.update(now_is)

    def set_status(self, status: str) -> None:
        self.fields["status"] = status
        self.write()

    def write(self) -> None:
        write_json(self.folder / SWEEP_STATE_FILE, self.fields)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _release_sweep_lock(self.folder, self._lock)


def _canonical_overrides(words: Mapping[str, str]) -> dict[str, object]:
    return {word: canonical_value(word, value) for word, value in words.items()}


def job_status(job: SweepJob, run: dict[str, Any]) -> dict[str, Any]:
    """What a job's run.json knows better than sweep.json."""
    status = run.get("status", "new")
    refused = job["status"] == "failed" and bool(job.get("pending_overrides"))  # more words for a completed run: it says what it was before
    if status == "completed" and not refused:
        return {"status": status, "error": None, "loss": final_loss(run), "ended": run.get("ended")}
    if job["status"] == "failed":  # a killed job still says running
        return {}
    if status == "failed":
        return {"status": status, "error": run.get("error"), "loss": "inf" if has_diverged(run) else None, "ended": run.get("ended")}
    return {"status": "interrupted" if has_started(run) else "new", "loss": None, "ended": None}


def _acquire_sweep_lock(folder: Path) -> int:
    try:
        make_dirs(folder)
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UserError(f"a sweep cannot live here: {error.strerror or error}", str(folder), "place it elsewhere with hydra.sweep.dir=DIR") from error
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise UserError(f"this sweep is being run by {describe_holder(folder)}", str(folder), "wait for it to end, or stop it") from error
    with suppress(OSError):  # a courtesy to whoever comes next
        write_json(folder / OWNER_FILE, {**provenance.process_id(), "since": timestamp()})
    return lock


def _release_sweep_lock(folder: Path, lock: int) -> None:
    with suppress(OSError):
        (folder / OWNER_FILE).unlink(missing_ok=True)
    os.close(lock)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_bounded(path, MAX_JSON_BYTES))
        words, swept = fields["overrides"], fields["swept"]
        if not (
            _are_overrides(words)
            and _are_overrides([*fields.get("init_from", {}).values()])
            and all(isinstance(key, str) and _are_overrides(values) for key, values in swept.items())
        ):
            raise ValueError("its words are no words")
        for job in fields["jobs"]:
            if job["status"] not in RUN_STATUSES or not _are_overrides([*job["overrides"].values()]):
                raise ValueError(f"no such job: {job}")
            if job["name"] != job_dirname_of(job["overrides"]):  # it is a path we shall write to
                raise ValueError(f"a job has a name that is not its own: {job['name']}")
        return fields
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"this is no sweep.json of ours: {error}", str(path), "bring back the file, or continue its jobs one by one: resume=<a folder in it>"
        ) from error


def _are_overrides(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(word, str) for word in found)
