"""What a run says about itself in run.json. One launch at a time may change it: the one that holds the lock of its folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from runner.engine.disk import read_file, sync_file, sync_folder, write_json
from runner.engine.durable import STEP_NAME, sweep_litter
from runner.launch import lock as locks
from runner.launch import origin
from runner.launch.lock import LIMIT, OWNER

RECORD, HYDRA = "run.json", ".hydra"
STATUSES = ("new", "running", "interrupted", "failed", "completed")
FRESH: dict[str, Any] = {
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


class Record:
    """A run folder that is ours. `fields` is what run.json says; change it by `running`, `update` and `finish` only."""

    def __init__(self, folder: Path, lock: int, fields: dict[str, Any], owns: bool = True, writes: bool = True):
        self.folder, self.fields, self._lock = folder, fields, lock
        self._owns, self.writes = owns, writes

    @classmethod
    def open(cls, folder: Path, resume: bool = False) -> Record:
        """Lock `folder`, which is made if need be, and read its run.json.

        Raises ValueError(what, where, fix), having changed nothing, if another process trains there, if a run is there that
        nobody asked to resume, or if there is none to resume.
        """
        folder = folder.absolute()
        if resume and not (folder / RECORD).is_file():
            raise ValueError("there is no run here", str(folder), "give the folder of a run: it holds a run.json")
        lock = locks.take(folder)
        try:
            fields = _read(folder / RECORD)
            if not resume and (fields["status"] != "new" or _has_steps(folder)):
                raise ValueError(
                    f"this folder already holds a run: {fields['status']}, step {fields['step']}",
                    str(folder),
                    f"continue it with resume={folder}, or place this one elsewhere with hydra.run.dir=DIR",
                )
            write_json(folder / OWNER, {**origin.process(), "since": _now()})
            for place in (folder, folder / "checkpoints"):
                if place.is_dir():
                    sweep_litter(place)
            record = cls(folder, lock, fields)
            if not (folder / RECORD).exists():
                record._write()
        except BaseException as error:
            locks.release(folder, lock)
            if isinstance(error, OSError):
                raise locks.unusable(folder, error) from error
            raise
        return record

    @classmethod
    def attach(cls, folder: Path, rank: int) -> Record:
        """For a rank of the launch that has opened the folder and made room for it. Of all ranks the first alone writes."""
        lock = locks.join(folder, rank)
        return cls(folder, lock, _read(folder / RECORD), owns=False, writes=rank == 0)

    @classmethod
    def of_another_node(cls, folder: Path, attempt: int) -> Record:
        """For a rank that cannot see the folder."""
        return cls(folder, -1, {**FRESH, "attempt": attempt}, owns=False, writes=False)

    def share(self, keep: int = 1) -> None:
        """Make room for ranks: from here on they hold the folder with us."""
        locks.narrow(self._lock, keep)

    def name_ranks(self, pids: list[int]) -> None:
        """So that whoever is refused while they live is told which processes to look for."""
        try:
            write_json(self.folder / OWNER, {**origin.process(), "since": _now(), "ranks": locks.about(pids)})
        except OSError:
            return  # a courtesy, no reason to stop

    def reread(self) -> None:
        """What the first rank has written since it took the record over."""
        self.fields = _read(self.folder / RECORD)

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
        about = {**origin.process(), "started": _now(), "code": origin.code(), "versions": origin.versions()}
        _sync_words(self.folder)
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
        assert status in STATUSES[2:], f"a run does not end as {status}"
        self._put({"status": status, "error": error, "ended": _now(), **fields})
        self._write()

    def close(self) -> None:
        """Let go of the folder. The end of the process does the same, however it comes."""
        if self._lock >= 0:
            if self._owns:
                (self.folder / OWNER).unlink(missing_ok=True)
            locks.release(self.folder, self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_ours(self) -> bool:
        return all(self.fields.get(word) == value for word, value in origin.process().items())

    def _put(self, fields: Mapping[str, Any]) -> None:
        self.fields = {**self.fields, **_plain(fields)}

    def _write(self) -> None:
        if self.writes:
            write_json(self.folder / RECORD, self.fields)


def _sync_words(folder: Path) -> None:
    """Hydra writes the words of a run and syncs nothing: after a power cut there would be checkpoints that no word leads to."""
    words = folder / HYDRA
    if words.is_dir():
        for path in words.glob("*.yaml"):
            sync_file(path)
        sync_folder(words)
        sync_folder(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_file(path, LIMIT))
        if fields["status"] not in STATUSES:
            raise ValueError(f"no such status: {fields['status']}")
        return {**FRESH, **fields, "attempt": int(fields["attempt"]), "step": int(fields["step"])}
    except FileNotFoundError:
        return dict(FRESH)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"this is no run.json of ours: {error}", str(path), "bring back the file, or start a new run with init_from=DIR") from error


def _has_steps(folder: Path) -> bool:
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(STEP_NAME.fullmatch(name) for name in os.listdir(checkpoints))


def _plain(value: Any) -> Any:
    """As JSON can say it: paths as text, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
