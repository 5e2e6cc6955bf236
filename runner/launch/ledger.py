"""sweep.json: what a sweep says of itself and of its jobs; and the lock that lets one process at a time drive it.

A job's own run.json is nearer to the truth: whatever driver was killed before it could write something down, `open` catches up.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from runner.engine.disk import make_folder, read_file, write_json
from runner.launch import origin
from runner.launch.folders import job_name
from runner.launch.lock import LIMIT, LOCK, OWNER, holder
from runner.launch.record import RECORD, STATUSES
from runner.launch.words import meant

SWEEP = "sweep.json"
ENDED = ("interrupted", "failed", "completed")
DIVERGED = ("not finite", "fp16 overflows", "diverged: ")  # how the engine says it
Job = dict[str, Any]


class Ledger:
    """A sweep's folder that is ours. `fields` is what sweep.json says; change it by `add`, `mark` and `finish` only."""

    def __init__(self, folder: Path, lock: int, fields: dict[str, Any]):
        self.folder, self.fields, self._lock = folder, fields, lock
        self.behind = False  # whether a job has got on without this sweep

    @classmethod
    def create(cls, folder: Path, **fields: Any) -> Ledger:
        """A new sweep; nothing is written yet. Raises ValueError(what, where, fix) if there is one, or a run."""
        if found := next((name for name in (SWEEP, RECORD) if (folder / name).exists()), None):
            what = "a sweep" if found == SWEEP else "a run"
            raise ValueError(f"this folder already holds {what}", str(folder), f"continue it with resume={folder}, or choose another hydra.sweep.dir")
        if run := next((place for place in folder.parents if (place / RECORD).is_file()), None):
            raise ValueError("this folder lies inside a run", str(folder), f"continue that with resume={run}, or choose another hydra.sweep.dir")
        if other := next((place for place in folder.parents if (place / SWEEP).is_file()), None):
            raise ValueError("this folder lies inside a sweep", str(folder), f"continue that with resume={other}, or choose another hydra.sweep.dir")
        return cls(folder, _locked(folder), {**fields, "status": "running", "created": now(), "jobs": []})

    @classmethod
    def open(cls, folder: Path) -> Ledger:
        """The sweep of `folder`, each job as it stands by now."""
        lock = _locked(folder)
        try:
            ledger = cls(folder, lock, _read(folder / SWEEP))
            ledger.catch_up()
        except BaseException:
            _let_go(folder, lock)
            raise
        return ledger

    @classmethod
    def peek(cls, folder: Path) -> Ledger:
        """The same to look at: no lock is taken, so it is not to be written."""
        ledger = cls(folder, -1, _read(folder / SWEEP))
        ledger.catch_up()
        return ledger

    @property
    def jobs(self) -> list[Job]:
        return self.fields["jobs"]

    def find(self, words: Mapping[str, str]) -> Job | None:
        """The job of these swept words, in whatever order, however a number in them is written."""
        asked = _meant(words)
        return next((job for job in self.jobs if _meant(job["words"]) == asked), None)

    def add(self, words: Mapping[str, str]) -> Job:
        """The job of these swept words; a new one where there is none. Nothing is written yet."""
        if known := self.find(words):
            return known
        job: Job = {"name": job_name(words), "words": dict(words), "status": "new", "attempt": 0, "error": None, "started": None, "ended": None, "loss": None}
        self.jobs.append(job)
        return job

    def mark(self, job: Job, **fields: Any) -> None:
        job.update(fields)
        self.write()

    def catch_up(self) -> None:
        for job in self.jobs:
            now_is = standing(job, read_run(self.folder / job["name"]))
            self.behind |= any(now_is.get(word, job[word]) != job[word] for word in ("status", "loss"))
            job.update(now_is)

    def finish(self, status: str) -> None:
        self.fields["status"] = status
        self.write()

    def write(self) -> None:
        write_json(self.folder / SWEEP, self.fields)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _let_go(self.folder, self._lock)


def _meant(words: Mapping[str, str]) -> dict[str, object]:
    return {word: meant(word, value) for word, value in words.items()}


def standing(job: Job, run: dict[str, Any]) -> dict[str, Any]:
    """What a job's run.json knows better than sweep.json."""
    status = run.get("status", "new")
    refused = job["status"] == "failed" and bool(job.get("pending"))  # more words for a completed run: it says what it was before
    if status == "completed" and not refused:
        return {"status": status, "error": None, "loss": loss_of(run), "ended": run.get("ended")}
    if job["status"] == "failed":  # a killed job still says running
        return {}
    if status == "failed":
        return {"status": status, "error": run.get("error"), "loss": "inf" if diverged(run) else None, "ended": run.get("ended")}
    return {"status": "interrupted" if begun(run) else "new", "loss": None, "ended": None}


def read_run(folder: Path) -> dict[str, Any]:
    """A job's run.json; empty where there is none that can be read: the job itself says so when it is started."""
    try:
        run = json.loads(read_file(folder / RECORD, LIMIT))
    except (OSError, ValueError, RecursionError):
        return {}
    return run if isinstance(run, dict) and run.get("status") in STATUSES else {}


def begun(run: dict[str, Any]) -> bool:
    """Training was entered at least once: the run is continued, not started."""
    return bool(run.get("attempt"))


def diverged(run: dict[str, Any]) -> bool:
    return run.get("status") == "failed" and any(sign in str(run.get("error")) for sign in DIVERGED)


def loss_of(run: dict[str, Any]) -> float | str | None:
    """The loss train.py returns for a completed run."""
    metrics = run.get("metrics")
    if not isinstance(metrics, dict) or not metrics:
        return None  # train.verify_resume trains nothing
    loss = next((metrics[name] for name in ("val_loss", "loss") if isinstance(metrics.get(name), int | float)), None)
    return "inf" if loss is None else float(loss)


def is_held(run: Path) -> bool:
    """Whether a process still trains there, one that an earlier driver has left behind."""
    try:
        lock = os.open(run / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    finally:
        os.close(lock)
    return False


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _locked(folder: Path) -> int:
    try:
        make_folder(folder)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ValueError(f"a sweep cannot live here: {error.strerror or error}", str(folder), "place it elsewhere with hydra.sweep.dir=DIR") from error
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ValueError(f"this sweep is being run by {holder(folder)}", str(folder), "wait for it to end, or stop it") from error
    with suppress(OSError):  # a courtesy to whoever comes next
        write_json(folder / OWNER, {**origin.process(), "since": now()})
    return lock


def _let_go(folder: Path, lock: int) -> None:
    with suppress(OSError):
        (folder / OWNER).unlink(missing_ok=True)
    os.close(lock)


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_file(path, LIMIT))
        words, swept = fields["words"], fields["swept"]
        if not (
            _are_words(words)
            and _are_words([*fields.get("init_from", {}).values()])
            and all(isinstance(key, str) and _are_words(values) for key, values in swept.items())
        ):
            raise ValueError("its words are no words")
        for job in fields["jobs"]:
            if job["status"] not in STATUSES or not _are_words([*job["words"].values()]):
                raise ValueError(f"no such job: {job}")
            if job["name"] != job_name(job["words"]):  # it is a path we shall write to
                raise ValueError(f"a job has a name that is not its own: {job['name']}")
        return fields
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"this is no sweep.json of ours: {error}", str(path), "bring back the file, or continue its jobs one by one: resume=<a folder in it>"
        ) from error


def _are_words(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(word, str) for word in found)
