"""`run.json`: what a run records about itself.

Only the process that holds the lock of the run directory changes it.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import ownership
from common.errors import Outcome, TrainingError, UserError, print_note
from common.filesystem import (
    WEAKER_PROMISES,
    describe_disk_error,
    read_json_object,
    remove_quietly,
    retry_disk,
    sync_path,
    write_json,
)
from common.ownership import is_owner_file
from runner.checkpoint.atomic_dir import remove_temp
from runner.run_dir import contents
from runner.run_dir.contents import (
    DEFAULT_METADATA,
    HYDRA_DIR,
    LOCK_FILE,
    OWN_NAMES,
    RUN_FILE,
    RUN_STATUSES,
    check_no_run,
    check_run_files,
    has_checkpoints,
    has_type,
    holds_run,
    load_fields,
    size_of,
    timestamp,
)
from runner.run_dir.lock import RunLock, acquire_dir, acquire_rank, unusable_error, write_owner

if TYPE_CHECKING:
    from data.sources.splits import DataFiles

MAX_ATTEMPTS = 200  # newest attempts that run.json keeps
RECORDED_AT_THE_END = ("outcome", "error", "ended", "step")  # fields of run.json that its newest attempt gets, too
STATUS_OF_OUTCOME = {Outcome.DIVERGED: Outcome.FAILED, Outcome.PAUSED: Outcome.INTERRUPTED}  # others: the same
MAX_ERROR = 4_000  # characters of an error that are recorded: its beginning and its end
# Fields that describe one process or the newest state: a checkpoint does not store them, or itself knows them.
PASSING_FIELDS = """
    status outcome error degraded ended host pid boot_id start_ticks checkpoint step tokens loss_tokens metrics export
""".split()
MAX_STORED_ATTEMPTS = 20  # newest records of attempts that a checkpoint stores


@dataclass(eq=False)
class RunMetadata(AbstractContextManager["RunMetadata"]):
    """The metadata of a run directory whose lock this process holds.

    `fields` is the content of run.json; only the methods change it.
    """

    folder: Path
    lock: RunLock | None
    fields: dict[str, Any]
    owns_folder: bool = True
    is_writer: bool = True
    is_new_dir: bool = False  # whether this launch has created the directory
    data_files: DataFiles | None = None  # found by the checks before this launch; None: `build_run` looks for them
    names_before: list[str] | None = None  # names in the directory before this launch; None: it held a run
    stored_files: Mapping[str, Any] | None = None  # what `recovery.read_stored_files` has returned

    @staticmethod
    def read(folder: Path) -> dict[str, Any]:
        """Return the fields of the run.json in `folder` without a lock, those of another type left out; {} where there
        is none or it is damaged.
        """
        fields = read_json_object(folder / RUN_FILE)
        if fields.get("status") not in RUN_STATUSES:
            return {}
        return {name: value for name, value in fields.items() if has_type(name, value)}

    @classmethod
    def open(
        cls, folder: Path, resume: bool = False, recover: Callable[[Path], list[str]] = lambda folder: []
    ) -> RunMetadata:
        """Create `folder` if needed, lock it and read its run.json; that of a new run is not written before
        `record_created`.

        `recover` repairs a damaged run that is resumed and returns messages, which are printed and recorded. Raises
        UserError, having changed nothing, if another process trains there, if it holds a run and `resume` is false, or
        if it holds none and `resume` is true.
        """
        folder = folder.absolute()
        if resume and not holds_run(folder):
            raise UserError(
                "this directory holds no run: there is no run.json",
                folder,
                "give a run directory, e.g. resume=last",
            )
        check_run_files(folder)
        lock, is_new_dir = acquire_dir(folder), contents.claim(folder)
        try:
            names = [name for name in os.listdir(folder) if name != LOCK_FILE and not is_owner_file(LOCK_FILE, name)]
            fields, recovered, held_run = dict(DEFAULT_METADATA), list[str](), False
            if resume or names:  # an empty directory has nothing to read or to remove
                held_run = holds_run(folder)
                recovered = recover(folder) if resume else []
                fields = load_fields(folder / RUN_FILE)
                if not resume:
                    check_no_run(folder, fields)
                for parent in filter(Path.is_dir, (folder, folder / "checkpoints")):
                    remove_temp(parent)
            retry_disk(partial(write_owner, folder))
            metadata = cls(folder, lock, fields, is_new_dir=is_new_dir, names_before=None if held_run else names)
            for message in recovered:
                print_note(f"resume: {message}")
            if recovered:
                metadata.update(recovered=recovered)
        except BaseException as error:
            if is_new_dir:
                contents.remove_dir(folder)
            lock.release()
            if isinstance(error, OSError):
                raise unusable_error(folder, error) from error
            raise
        return metadata

    @classmethod
    def attach(cls, folder: Path, rank: int) -> RunMetadata:
        """Open the directory in a rank of the launch that holds its lock and has called `allow_ranks`.

        Only rank 0 writes.
        """
        return cls(
            folder, acquire_rank(folder, rank), load_fields(folder / RUN_FILE), owns_folder=False, is_writer=rank == 0
        )

    @classmethod
    def detached(cls, folder: Path, attempt: int) -> RunMetadata:
        """Return the metadata for a rank on a node that does not see the directory: nothing is locked or written."""
        return cls(folder, None, {**DEFAULT_METADATA, "attempt": attempt}, owns_folder=False, is_writer=False)

    def allow_ranks(self, keep: int = 1) -> None:
        """Shrink the lock of this process to `keep` bytes, so that ranks can lock theirs with `attach`."""
        assert self.lock is not None
        self.lock.shrink(keep)

    def set_rank_pids(self, pids: list[int]) -> None:
        """Record the processes of the ranks for the error message of a second launch."""
        try:
            ranks = [{**ownership.process_id(), "pid": pid, "start_ticks": ownership.start_ticks(pid)} for pid in pids]
            write_owner(self.folder, ranks=ranks)
        except OSError:
            return  # only the error message of another process loses a detail

    def reread(self) -> None:
        """Read run.json again: rank 0, another process, has written to it."""
        self.fields = load_fields(self.folder / RUN_FILE)

    @property
    def status(self) -> str:
        """Status of the run.

        `running` in run.json while the lock was free means that the process was killed: interrupted.
        """
        is_own = ownership.is_same_process(self.fields, ownership.process_id())
        was_killed = self.fields["status"] == "running" and not is_own
        return "interrupted" if was_killed else self.fields["status"]

    @property
    def attempt(self) -> int:
        return self.fields["attempt"]

    def adopt(self, fields: Mapping[str, Any]) -> None:
        """Begin with the `fields` of another run, which `record_created` writes."""
        self.fields = {**self.fields, **to_json(fields)}

    def record_created(self) -> None:
        """Write the first run.json, from which on the directory is a run: its settings are stored, so that `resume=`
        continues it after a kill.
        """
        try:
            # Hydra has not synced it: after a power cut a checkpoint could not be resumed
            if (hydra_dir := self.folder / HYDRA_DIR).is_dir():
                for path in (*hydra_dir.glob("*.yaml"), hydra_dir, self.folder):
                    sync_path(path)
            self._write({"id": self.fields["id"] or secrets.token_hex(8)})
        except OSError as error:
            raise unusable_error(self.folder, error) from error

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """Mark a completed run as interrupted before settings that train it further are stored: after a kill it must
        not count as completed.

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

    def mark_running(self, **fields: Any) -> None:
        """Begin an attempt: record its number, process, start time and library versions."""
        begun = {"attempt": self.attempt + 1, "started": timestamp(), "versions": contents.library_versions()}
        attempts = [*self.fields["attempts"], begun][-MAX_ATTEMPTS:]
        state = {"status": "running", "outcome": None, "error": None, "degraded": None, **ownership.process_id()}
        try:
            self._write({**state, **begun, "attempts": attempts, **fields})
        except OSError as error:
            raise unusable_error(self.folder, error) from error

    def update(self, **fields: Any) -> None:
        """Set `fields` and write run.json.

        If the disk refuses, the values are kept and written with the next update.

        Reasons in `inexact_because` are added to those of former resumes, and to the record of this attempt; messages
        in `recovered`, too.
        """
        if "inexact_because" in fields:
            fields["attempts"] = self._described(exact=False, inexact_because=fields["inexact_because"])
        for name in {"recovered", "inexact_because"} & fields.keys():
            fields[name] = [*dict.fromkeys([*self.fields[name], *fields[name]])]
        try:
            self._write(fields)
        except OSError:
            return

    def describe_attempt(self, fingerprints: Mapping[str, str], code: Mapping[str, Any], **facts: Any) -> None:
        """Record what this attempt computes with. `code`: commit, uncommitted changes and fingerprint."""
        self.update(fingerprints=fingerprints, code=code, attempts=self._described(code=code, **facts))

    def _described(self, **facts: Any) -> list[dict[str, Any]]:
        """Return `attempts` with `facts` about the newest one."""
        attempts = self.fields["attempts"]
        return [*attempts[:-1], {**attempts[-1], **facts}] if attempts else []

    def revert(self, before: dict[str, Any]) -> None:
        """Write the fields `before` this attempt back: it was refused before it trained."""
        self.fields = {}
        with suppress(OSError):  # the refusal is what the user needs to see
            self._write(before)

    def check_owned(self) -> None:
        """Raise LostRunDirError if the directory was moved, deleted, replaced, or taken by another launch since it was
        opened.
        """
        if self.lock is not None:
            self.lock.check()

    def follow_move(self) -> Path | None:
        """Return where the directory was moved to, if `check_owned` has found that; run.json is written there from now
        on.
        """
        if self.lock is None or (folder := self.lock.follow_move()) is None:
            return None
        self.folder = folder
        return folder

    def finish(self, outcome: Outcome, error: str | None = None, **fields: Any) -> None:
        """End this attempt with `outcome`.

        The status of a diverged run is `failed`, that of a paused one `interrupted`. Raises TrainingError if the disk refuses.
        """
        status = STATUS_OF_OUTCOME.get(outcome, outcome)
        if error is not None and len(error) > MAX_ERROR:  # the command line of a compiler, say
            error = f"{error[: MAX_ERROR // 2]} ... {error[-MAX_ERROR // 2 :]}"
        changed = {"status": status, "outcome": outcome, "error": error, "ended": timestamp(), **fields}
        end = {name: changed[name] for name in RECORDED_AT_THE_END if name in changed}
        changed["attempts"] = self._described(**end)
        try:
            self._write(changed)
        except OSError as failure:
            message = f"the end of the run ({outcome}) could not be recorded: run.json: {describe_disk_error(failure, self.folder)}"
            if status == Outcome.FAILED:  # the error that ended the run is the one to report
                return print_note(f"warning: {message}")
            raise TrainingError(f"{message}; step {self.fields['step']} is saved, and resume= continues") from failure

    def record(self) -> dict[str, Any]:
        """Return the field `run` of state.json, what the run directory is restored from: `stored_files`, and the fields
        as they are now; {} where the files were not read.
        """
        if self.stored_files is None:
            return {}
        fields = {name: value for name, value in self.fields.items() if name not in PASSING_FIELDS}
        return {"fields": fields | {"attempts": fields["attempts"][-MAX_STORED_ATTEMPTS:]}, **self.stored_files}

    def discard_if_empty(self) -> None:
        """Remove the directory of a new run that was refused before it trained.

        If it existed before, or holds other files, what this launch has written.
        """
        if self.names_before is None or self.fields["status"] != "new" or self.lock is None:
            return
        names = os.listdir(self.folder)
        if has_checkpoints(self.folder) or size_of(self.folder / "metrics.jsonl"):
            return
        if self.is_new_dir and OWN_NAMES.issuperset(names):
            return contents.remove_dir(self.folder)
        for name in OWN_NAMES.intersection(names).difference(self.names_before):
            remove_quietly(self.folder / name)

    def close(self) -> None:
        """Release the lock. The operating system releases it too when the process ends."""
        if self.lock is not None:
            self.lock.release(self.owns_folder)
            self.lock = None

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self.discard_if_empty()
        self.close()

    def _write(self, changed: Mapping[str, Any]) -> None:
        self.fields = {**self.fields, **to_json(changed), "weaker_promises": [*WEAKER_PROMISES]}
        if self.is_writer:
            self.check_owned()
            retry_disk(partial(write_json, self.folder / RUN_FILE, self.fields))


def to_json(value: Any) -> Any:
    """Return `value` with paths as text and with null for NaN and infinities, which JSON lacks."""
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
