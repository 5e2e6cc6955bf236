"""What a run says about itself in run.json. One launch at a time may change it: the one that holds the lock of its folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from common.errors import UserError
from common.filesystem import read_bounded, sync_dir, sync_file, write_json
from runner.checkpoint.atomic_dir import STEP_NAME, remove_temp
from runner.run_dir import lock as lock_module
from runner.run_dir import provenance
from runner.run_dir.lock import MAX_JSON_BYTES, OWNER_FILE

RUN_FILE, HYDRA_DIR = "run.json", ".hydra"
RUN_STATUSES = ("new", "running", "interrupted", "failed", "completed")
DEFAULT_METADATA: dict[str, Any] = {
    "status": "new",
    "attempt": 0,  # launches into this folder
    "step": 0,
    "tokens": 0,
    "metrics": {},
    "error": None,
    "exact": True,  # every bit is that of a run that was never stopped
    "inexact_because": [],
    "degraded": None,  # the disk trouble training goes on in spite of
    "init_from": None,
    "fingerprints": {},
}


class RunMetadata:
    """A run folder that is ours. `fields` is what run.json says; change it by `running`, `update` and `finish` only."""

    def __init__(self, folder: Path, lock: int, fields: dict[str, Any], owns: bool = True, writes: bool = True):
        self.folder, self.fields, self._lock = folder, fields, lock
        self._owns, self.writes = owns, writes

    @classmethod
    def open(cls, folder: Path, resume: bool = False) -> RunMetadata:
        """Lock `folder`, which is made if need be, and read its run.json.

        Raises ValueError(what, where, fix), having changed nothing, if another process trains there, if a run is there that
        nobody asked to resume, or if there is none to resume.
        """
        folder = folder.absolute()
        if resume and not (folder / RUN_FILE).is_file():
            raise UserError("there is no run here", str(folder), "give the folder of a run: it holds a run.json")
        lock = lock_module.acquire(folder)
        try:
            fields = _read_run_file(folder / RUN_FILE)
            if not resume and (fields["status"] != "new" or _has_checkpoints(folder)):
                raise UserError(
                    f"this folder already holds a run: {fields['status']}, step {fields['step']}",
                    str(folder),
                    f"continue it with resume={folder}, or place this one elsewhere with hydra.run.dir=DIR",
                )
            write_json(folder / OWNER_FILE, {**provenance.process_id(), "since": _now()})
            for place in (folder, folder / "checkpoints"):
                if place.is_dir():
                    remove_temp(place)
            record = cls(folder, lock, fields)
            if not (folder / RUN_FILE).exists():
                record._write()
        except BaseException as error:
            lock_module.release(folder, lock)
            if isinstance(error, OSError):
                raise lock_module.folder_unusable_error(folder, error) from error
            raise
        return record

    @classmethod
    def attach(cls, folder: Path, rank: int) -> RunMetadata:
        """For a rank of the launch that has opened the folder and made room for it. Of all ranks the first alone writes."""
        lock = lock_module.acquire_rank(folder, rank)
        return cls(folder, lock, _read_run_file(folder / RUN_FILE), owns=False, writes=rank == 0)

    @classmethod
    def of_another_node(cls, folder: Path, attempt: int) -> RunMetadata:
        """For a rank that cannot see the folder."""
        return cls(folder, -1, {**DEFAULT_METADATA, "attempt": attempt}, owns=False, writes=False)

    def share(self, keep: int = 1) -> None:
        """Make room for ranks: from here on they hold the folder with us."""
        lock_module.shrink(self._lock, keep)

    def name_ranks(self, pids: list[int]) -> None:
        """So that whoever is refused while they live is told which processes to look for."""
        try:
            write_json(self.folder / OWNER_FILE, {**provenance.process_id(), "since": _now(), "ranks": lock_module.describe_processes(pids)})
        except OSError:
            return  # a courtesy, no reason to stop

    def reread(self) -> None:
        """What the first rank has written since it took the record over."""
        self.fields = _read_run_file(self.folder / RUN_FILE)

    @property
    def status(self) -> str:
        """A run that still says running, though its lock was free for us to take, was cut off: interrupted."""
        cut_off = self.fields["status"] == "running" and not self._is_ours()
        return "interrupted" if cut_off else self.fields["status"]

    @property
    def attempt(self) -> int:
        return self.fields["attempt"]

    def running(self, **fields: Any) -> None:
        """Training begins, for the first time or again: count the attempt and say who, where, with which code."""
        about = {**provenance.process_id(), "started": _now(), "code": provenance.git_state(), "versions": provenance.library_versions()}
        _sync_overrides(self.folder)
        self._put({"status": "running", "attempt": self.attempt + 1, "error": None, "degraded": None, **about, **fields})
        self._write()

    def update(self, **fields: Any) -> None:
        """Put facts into run.json. Where the disk refuses they are kept and written with the next: no reason to stop training."""
        self._put(fields)
        try:
            self._write()
        except OSError:
            return

    def undo(self, before: dict[str, Any]) -> None:
        """Put run.json back to what it was: this launch was refused and has not happened."""
        self.fields = before
        self._write()

    def finish(self, status: str, error: str | None = None, **fields: Any) -> None:
        """The last word of this attempt: interrupted, failed or completed."""
        assert status in RUN_STATUSES[2:], f"a run does not end as {status}"
        self._put({"status": status, "error": error, "ended": _now(), **fields})
        self._write()

    def close(self) -> None:
        """Let go of the folder. The end of the process does the same, however it comes."""
        if self._lock >= 0:
            if self._owns:
                (self.folder / OWNER_FILE).unlink(missing_ok=True)
            lock_module.release(self.folder, self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_ours(self) -> bool:
        return all(self.fields.get(word) == value for word, value in provenance.process_id().items())

    def _put(self, fields: Mapping[str, Any]) -> None:
        self.fields = {**self.fields, **_json_safe(fields)}

    def _write(self) -> None:
        if self.writes:
            write_json(self.folder / RUN_FILE, self.fields)


def _sync_overrides(folder: Path) -> None:
    """Hydra writes the words of a run and syncs nothing: after a power cut there would be checkpoints that no word leads to."""
    words = folder / HYDRA_DIR
    if words.is_dir():
        for path in words.glob("*.yaml"):
            sync_file(path)
        sync_dir(words)
        sync_dir(folder)


def _read_run_file(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_bounded(path, MAX_JSON_BYTES))
        if fields["status"] not in RUN_STATUSES:
            raise ValueError(f"no such status: {fields['status']}")
        return {**DEFAULT_METADATA, **fields, "attempt": int(fields["attempt"]), "step": int(fields["step"])}
    except FileNotFoundError:
        return dict(DEFAULT_METADATA)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"this is no run.json of ours: {error}", str(path), "bring back the file, or start a new run with init_from=DIR") from error


def _has_checkpoints(folder: Path) -> bool:
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(STEP_NAME.fullmatch(name) for name in os.listdir(checkpoints))


def _json_safe(value: Any) -> Any:
    """As JSON can say it: paths as text, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(name): _json_safe(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_safe(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


DIVERGED_MESSAGES = ("not finite", "fp16 overflows", "diverged: ")  # how the engine says it


def read_run_metadata(folder: Path) -> dict[str, Any]:
    """A job's run.json; empty where there is none that can be read: the job itself says so when it is started."""
    try:
        run = json.loads(read_bounded(folder / RUN_FILE, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return run if isinstance(run, dict) and run.get("status") in RUN_STATUSES else {}


def has_started(run: dict[str, Any]) -> bool:
    """Training was entered at least once: the run is continued, not started."""
    return bool(run.get("attempt"))


def has_diverged(run: dict[str, Any]) -> bool:
    return run.get("status") == "failed" and any(sign in str(run.get("error")) for sign in DIVERGED_MESSAGES)


def final_loss(run: dict[str, Any]) -> float | str | None:
    """The loss train.py returns for a completed run."""
    metrics = run.get("metrics")
    if not isinstance(metrics, dict) or not metrics:
        return None  # train.verify_resume trains nothing
    loss = next((metrics[name] for name in ("val_loss", "loss") if isinstance(metrics.get(name), int | float)), None)
    return "inf" if loss is None else float(loss)


def timestamp() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
