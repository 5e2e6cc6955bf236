"""`sweep.json`: the settings of a sweep and the status of its jobs.

Only the process that holds the lock of the sweep directory writes it.

run.json of a job may be newer than sweep.json, which a killed process could not update: `SweepState.open` reads both.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from common.errors import Outcome, UserError, print_note
from common.filesystem import read_bounded, remove_quietly, write_json
from common.guarded_files import check_own_files
from common.limits import parse_json
from common.registry import check_imported
from runner.config.overrides import (
    SEARCHPATH_KEY,
    canonical_value,
    check_stored,
    is_hydra_override,
    is_override_list,
    is_storable,
    key_of,
    plugins_of,
    to_overrides,
)
from runner.run_dir import contents
from runner.run_dir.best_job import is_added_seed
from runner.run_dir.contents import (
    HYDRA_DIR,
    MAX_JSON_BYTES,
    RUN_STATUSES,
    SWEEP_FILE,
    check_run_files,
    enclosing_record,
    exported_loss,
    has_diverged,
    has_paused,
    has_started,
    is_sweep_dir,
    job_dirname,
    timestamp,
)
from runner.run_dir.lock import RunLock, acquire_dir, write_owner
from runner.run_dir.metadata import RunMetadata
from runner.sweep.budget import StepSize

# Hydra settings that sweep.json may store: counts and choices. A sweep.json of another user must not name code, a path,
# or a line of a batch script.
STORED_HYDRA_KEYS = """
    hydra/launcher hydra.launcher.workers hydra.launcher.devices hydra.launcher.fail_fast hydra.launcher.retries
    hydra.launcher.cluster hydra.launcher.timeout_min hydra.launcher.cpus_per_task hydra.launcher.gpus_per_node
    hydra.launcher.mem_gb hydra.launcher.num_cpus hydra.launcher.num_gpus
    hydra/sweeper hydra.sweeper.direction hydra.sweeper.objectives hydra.sweeper.n_trials hydra.sweeper.sampler
    hydra.sweeper.seed hydra.sweeper.pruner hydra.sweeper.eta hydra.sweeper.first_rung
""".split()
STORED_HYDRA_PREFIX = "hydra.sweeper.params."
INFINITE = "inf"  # JSON has no infinity


@dataclass
class SweepJob:
    """A job of a sweep: the run in the directory `name`, identified by the values of the swept keys."""

    name: str
    overrides: dict[str, str]  # swept key -> value, as Hydra writes it
    status: str = "new"  # new, running, interrupted, paused, failed, completed
    outcome: str | None = None  # of the last attempt: completed, interrupted, paused, diverged, failed
    attempt: int = 0  # processes started for the job
    error: str | None = None
    started: str | None = None
    ended: str | None = None
    # evaluation loss of the weights in model/, else training loss; "inf": diverged, or never finite
    loss: float | str | None = None
    last_lines: list[str] = field(default_factory=list)  # end of the console.log of a failed job
    pending_overrides: list[str] = field(default_factory=list)  # typed after the job began, not trained with yet
    applied_overrides: list[str] = field(default_factory=list)  # all that `resume=SWEEP` has given to the job

    @property
    def is_diverged(self) -> bool:
        return self.status == "failed" and self.outcome == Outcome.DIVERGED

    @property
    def needs_run(self) -> bool:
        """Whether `resume=SWEEP` runs the job. One that diverged would diverge again; of a paused one the search
        decides.
        """
        is_done = self.status == "completed" and not self.pending_overrides
        return not (self.is_diverged or is_done or self.status == "paused")


@dataclass
class SweepState:
    """The content of sweep.json. `create` and `open` hold the lock of the sweep directory until `close`."""

    folder: Path
    overrides: list[str] = field(default_factory=list)  # of all jobs
    swept: dict[str, list[str]] = field(default_factory=dict)  # key -> values
    sweeper: str = "grid"
    launcher: str = "local"
    base_rows: int = 1  # rows of an optimizer step of the smallest job
    base_tokens: int = 0  # its tokens; 0: settings alone do not say
    # what init_from=auto was resolved to, by stage and fingerprints
    init_from: dict[str, str] = field(default_factory=dict)
    status: str = "running"
    spent_seconds: float = 0.0  # of all launches, until `counted_at`
    # time.monotonic(); first when this module is imported: the start of the command counts
    counted_at: ClassVar[float] = time.monotonic()
    created: str = field(default_factory=timestamp)
    jobs: list[SweepJob] = field(default_factory=list)
    lock: RunLock | None = None  # None: read only
    is_stale: bool = False  # whether sweep.json was behind the run.json of a job
    is_new_dir: bool = False  # whether this process has created the directory
    has_begun: bool = True  # False until a sweep that `create` returned is running: a refusal removes its directory

    @classmethod
    def create(cls, folder: Path, **fields: Any) -> SweepState:
        """Lock the directory of a new sweep; sweep.json is not written yet.

        Raises UserError if it holds, or is inside, a sweep or run.
        """
        if found := enclosing_record(folder):
            relation = "already holds" if found == folder else "is inside"
            kind = "sweep" if is_sweep_dir(found) else "run"
            fix = f"resume={found} continues it; hydra.sweep.dir=DIR sets another directory for the new one"
            raise UserError(f"the sweep directory {relation} a {kind}", str(folder), fix)
        return cls(folder, lock=_acquire_lock(folder), is_new_dir=contents.claim(folder), has_begun=False, **fields)

    @classmethod
    def open(cls, folder: Path) -> SweepState:
        """Lock the directory of a sweep and read the current status of its jobs."""
        lock = _acquire_lock(folder)
        try:
            state = cls.open_readonly(folder)
            state.check_files()
        except BaseException:
            lock.release(is_owner=True)
            raise
        state.lock = lock
        return state

    @classmethod
    def open_readonly(cls, folder: Path) -> SweepState:
        """Read the current status of all jobs without taking the lock."""
        state = _read_state(folder)
        state.refresh_from_runs()
        return state

    def check_files(self) -> None:
        """Raise UserError if the study, a job's directory or a file of a job is a link, or neither a regular file nor a
        folder.
        """
        check_own_files(self.folder, (), shallow=("optuna.jsonl", *(job.name for job in self.jobs)))
        for job in self.jobs:
            check_run_files(self.folder / job.name)

    @property
    def base_step(self) -> StepSize:
        return StepSize(self.base_rows, self.base_tokens)

    def is_added_seed(self, job: SweepJob) -> bool:
        """Whether `sweep.seeds` has added the job: its seed is not one of the swept values."""
        return is_added_seed(job.overrides, self.swept)

    def find_job(self, overrides: Mapping[str, str]) -> SweepJob | None:
        """Return the job with these values of the swept keys; 5 and 5.0 are one value where the setting is a number."""
        wanted = _canonical(overrides)
        return next((job for job in self.jobs if _canonical(job.overrides) == wanted), None)

    def add_job(self, overrides: Mapping[str, str]) -> SweepJob:
        """Return the job with these values, a new one if there is none. Nothing is written."""
        job = self.find_job(overrides)
        if job is None:
            job = SweepJob(job_dirname(overrides), dict(overrides))
            self.jobs.append(job)
        return job

    def update_job(self, job: SweepJob, **fields: Any) -> None:
        """Set fields of a job and write sweep.json."""
        vars(job).update(fields)
        self.write()

    def refresh_job(self, job: SweepJob) -> None:
        """Take the status of a job from its run.json."""
        before, run = (job.status, job.loss), RunMetadata.read(self.folder / job.name)
        status, ended = run.get("status", "new"), run.get("ended")
        loss: float | str | None = None
        # run.json of a killed process still says running; or it tells of the attempt before the rejected overrides
        if job.status == "failed" and (status != "completed" or job.pending_overrides):
            return
        if status == "completed":
            loss = exported_loss(run)
        elif status == "failed":
            loss = INFINITE if has_diverged(run) else None
        elif has_paused(run) and self.sweeper != "grid":
            status = "paused"
        else:
            status, ended = "interrupted" if has_started(run) else "new", None
        job.status, job.ended, job.loss = status, ended, loss
        job.outcome, job.error = run.get("outcome"), run.get("error")
        self.is_stale |= before != (job.status, job.loss)

    def refresh_from_runs(self) -> None:
        for job in self.jobs:
            self.refresh_job(job)

    def set_status(self, status: str) -> None:
        self.status, self.has_begun = status, True
        self.write()

    def count_seconds(self) -> float:
        """Return the seconds of all launches until now."""
        now = time.monotonic()
        self.spent_seconds += now - SweepState.counted_at
        SweepState.counted_at = now
        return self.spent_seconds

    def write(self) -> None:
        self.count_seconds()
        fields = {name: getattr(self, name) for name in STORED_FIELDS}
        write_json(self.folder / SWEEP_FILE, {**fields, "jobs": [dataclasses.asdict(job) for job in self.jobs]})

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release(is_owner=True)
            self.lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None and not self.has_begun:
            self.discard()
        self.close()

    def discard(self) -> None:
        """Remove the directory of a sweep that was refused before its first job; one that existed before keeps what
        else it holds.
        """
        if self.is_new_dir:
            return contents.remove_dir(self.folder)
        for name in (SWEEP_FILE, HYDRA_DIR):
            remove_quietly(self.folder / name)


STORED_FIELDS = [
    spec.name
    for spec in dataclasses.fields(SweepState)
    if spec.name not in ("folder", "jobs", "lock", "is_stale", "is_new_dir", "has_begun")
]


def is_safe_override(override: str) -> bool:
    """Whether sweep.json may hold it: a setting of the training, or a count or choice for Hydra's plugins, without
    interpolation.
    """
    key = key_of(override)
    is_allowed = not is_hydra_override(override) or key in STORED_HYDRA_KEYS or key.startswith(STORED_HYDRA_PREFIX)
    return (
        is_storable(override) and is_allowed and key != "resume" and "${" not in override and "_target_" not in override
    )


def storable_overrides(overrides: list[str]) -> list[str]:
    """Return what sweep.json stores.

    Hydra settings that are not stored are named: they must be typed again with resume=.
    """
    for override in overrides:
        if is_safe_override(override):
            continue
        if not is_hydra_override(override):
            raise UserError(
                "a sweep takes no interpolation: it could change between two jobs", override, "write the value itself"
            )
        if key_of(override) != SEARCHPATH_KEY:  # the sweep has copies of the files
            print_note(f"{override} is not stored in sweep.json: type it again with resume=")
    return [override for override in overrides if is_safe_override(override)]


def _canonical(overrides: Mapping[str, str]) -> dict[str, object]:
    return {key: canonical_value(key, value) for key, value in overrides.items()}


def _acquire_lock(folder: Path) -> RunLock:
    lock = acquire_dir(folder, "sweep")
    with suppress(OSError):  # only the error message of another process loses a detail
        write_owner(folder)
    return lock


def _read_state(folder: Path) -> SweepState:
    path = folder / SWEEP_FILE
    try:
        fields = parse_json(read_bounded(path, MAX_JSON_BYTES))
        if missing := next((name for name in ("overrides", "swept", "jobs") if name not in fields), None):
            raise ValueError(f"no field `{missing}`, it was written by an older version of this program")
        state = SweepState(
            folder,
            **{name: fields[name] for name in STORED_FIELDS if name in fields},
            jobs=[SweepJob(**job) for job in fields["jobs"]],
        )
        state.spent_seconds = float(state.spent_seconds)
        if not 0 <= state.spent_seconds < math.inf:
            raise ValueError(f"spent_seconds must be a number of seconds, got {state.spent_seconds}")
        lists: list[Any] = [state.overrides, [*state.init_from.values()]]
        lists += [[key, *values] for key, values in state.swept.items()]
        lists += [[*job.overrides.values(), *job.pending_overrides, *job.applied_overrides] for job in state.jobs]
        for strings in lists:
            if not is_override_list(strings):
                raise ValueError(f"not a list of strings: {strings}")
        for job in state.jobs:
            if job.status not in (*RUN_STATUSES, "paused"):
                raise ValueError(f"unknown status of a job: {job.status}")
            if job.name != job_dirname(job.overrides):  # the directory that is written to
                raise ValueError(f"the name of a job does not belong to its overrides: {job.name}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fix = "restore the file, or continue the jobs one by one with resume=JOB_DIR"
        raise UserError(f"sweep.json cannot be read: {error}", str(path), fix) from error
    stored = dict.fromkeys(_stored_overrides(state))
    check_stored(stored, path, is_safe_override)
    for override in stored:
        check_imported(plugins_of([override]))  # a plugin must have been typed for this command
    return state


def _stored_overrides(state: SweepState) -> list[str]:
    """Return all overrides in sweep.json: of all jobs, the swept values, and those of each job."""
    swept = [f"{key}={value}" for key, values in state.swept.items() for value in values]
    of_jobs = [
        override
        for job in state.jobs
        for override in (*to_overrides(job.overrides), *job.pending_overrides, *job.applied_overrides)
    ]
    return [*state.overrides, *swept, *of_jobs]
