"""Start a sweep with --multirun, or resume one, and run its jobs on a backend: one starts when a worker is free; how it
ended is recorded; it is retried; all are stopped when asked.

Hydra composes the sweep and calls the sweeper plugin, which calls `run_sweep`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, read_write

from common import paths
from common.errors import INTERRUPTED, OK, USER_ERROR, Outcome, UserError, print_note
from common.guarded_files import last_lines, read_from
from common.registry import PLUGINS_ENV
from runner.config import compose, snapshot
from runner.config.hydra_errors import translating_hydra_errors
from runner.config.literals import hydra_quote
from runner.config.overrides import Flags, is_hydra_override
from runner.engine.device.signals import StopFlag
from runner.launch import torchrun
from runner.launch.fork_server import TRAIN_SCRIPT
from runner.launch.subprocesses import POLL_SECONDS, failure_reason
from runner.run_dir import contents
from runner.run_dir.contents import has_diverged, has_started, size_of, timestamp
from runner.run_dir.lock import is_locked
from runner.run_dir.metadata import RunMetadata
from runner.sweep import extend, validation
from runner.sweep.backends import CONSOLE_LOG, Backend, JobExit
from runner.sweep.comparability import changed_data
from runner.sweep.grid import PointComposer, Search, SweeperOptions, merge_overrides
from runner.sweep.seeds import Budget, BudgetSearch, SeedSearch
from runner.sweep.session import SweepSession
from runner.sweep.state import INFINITE, SweepJob, SweepState
from runner.tracking.lines import SweepLines

RunHydra = Callable[..., Any]  # run_hydra(overrides, flags, config_dir=None): run Hydra once with these arguments
JOB_LOG_LINES, JOB_LOG_BYTES = 12, 1 << 16  # of the end of console.log of a failed job


def start_sweep(overrides: list[str], flags: Flags, run_hydra: RunHydra) -> None:
    """Start the sweep of `overrides`, as typed; `flags` hold --multirun.

    Exits with 75 or 1 unless all jobs complete.
    """
    validation.check_hydra_overrides(overrides)
    with translating_hydra_errors(overrides):
        run_hydra(overrides, flags)


def resume_sweep(folder: Path, overrides: list[str], flags: Flags, run_hydra: RunHydra) -> None:
    """Run the jobs of the sweep in `folder` that are not completed, and what the typed `overrides` add to it."""
    with snapshot.as_config_dir(folder) as conf:
        with SweepState.open(folder) as state:
            additions = extend.parse_additions(state, overrides, conf)
            may_add = state.sweeper != "grid" or any(each.startswith("sweep.seeds=") for each in state.overrides)
            is_complete = not (may_add or any(job.needs_run for job in state.jobs))
            if is_complete and not additions:
                return SweepSession(state).finish(stopped=False)
            changed_files = snapshot.changed_files(folder)
            for line in [*changed_files, *changed_data(state)]:
                print_note(f"resume: {line}")
            if additions:
                extend.apply_additions(state, additions, conf)
                state.write()
        hydra_overrides = [override for override in additions.shared if is_hydra_override(override)]
        stored = merge_overrides(state.overrides, hydra_overrides)
        swept = [f"{key}={','.join(values)}" for key, values in state.swept.items()]
        launch = [validation.SWEEP_DIR_KEY + hydra_quote(str(folder)), "hydra.sweeper.resume=true"]
        # from the copy in the sweep where conf/ has changed: a swept option may be gone from conf/
        with translating_hydra_errors(overrides):
            run_hydra([*stored, *swept, *launch], flags | {"--multirun": True}, conf if changed_files else None)


def run_sweep(config: DictConfig, overrides: list[str]) -> None:
    """Create the sweep that Hydra has composed (`config`, with the typed `overrides`), or open the one to resume; run
    its jobs.

    Everything is checked before the sweep directory exists; sweep.json with all its jobs is written before the first of
    them starts.
    """
    sweeper, backend = validation.hydra_options(config)
    if sweeper.resume:
        state, composer = SweepState.open(Path(config.hydra.sweep.dir).absolute()), None
    else:
        state, composer = _create_state(config, overrides, sweeper, backend)
    with state, snapshot.as_config_dir(state.folder) as conf:
        session = SweepSession(state, conf, composer, config)
        for job in state.jobs if not sweeper.resume else ():
            session.derived_overrides(job)  # init_from=auto is resolved before the first job
        torchrun.set_restart_dir(state.folder)
        try:
            search = sweeper.search(state)
            if config.sweep.budget:
                search = BudgetSearch(
                    search, state, Budget.parse(config.sweep.budget), config.sweep.top, first_seed=config.seed
                )
            elif config.sweep.seeds:
                search = SeedSearch(search, state, config.sweep.seeds, config.sweep.top, first_seed=config.seed)
            backend.start(state.folder)  # before StopFlag: Ray sets a handler of its own for SIGTERM
            state.set_status("running")
            text = f"{f'{len(state.jobs)} jobs' if state.jobs else 'jobs of the sampler'} -> {state.folder}"
            session.lines.show("sweep_start", {"folder": str(state.folder), "jobs": len(state.jobs)}, text)
            if not sweeper.resume:  # a resumed one may have much to read: its first job starts before
                session.page.write()
            with closing(backend), closing(search):
                scheduler = SweepScheduler(session, backend, search)
                is_stopped, problem = scheduler.run(), scheduler.problem
        except KeyboardInterrupt:
            is_stopped, problem = True, None
        session.finish(is_stopped, problem)


def _create_state(
    config: DictConfig, overrides: list[str], sweeper: SweeperOptions, backend: Backend
) -> tuple[SweepState, PointComposer]:
    plan = validation.plan_sweep(config, [*config.hydra.overrides.hydra, *overrides], sweeper)
    folder = Path(config.hydra.sweep.dir).absolute()
    if not any(override.startswith(validation.SWEEP_DIR_KEY) for override in config.hydra.overrides.hydra):
        folder = contents.create_unique(folder)
        with read_write(config.hydra):
            config.hydra.sweep.dir = str(folder)
    state = SweepState.create(
        folder,
        overrides=plan.stored,
        swept=plan.swept,
        sweeper=validation.plugin_name(sweeper),
        launcher=validation.plugin_name(backend),
        base_rows=plan.base.rows,
        base_tokens=plan.base.tokens,
    )
    try:
        for point in plan.points if sweeper.is_grid else ():
            state.add_job(point)
        snapshot.save_snapshot(state.folder, plan.composer.shared)
        for groups in plan.composer.group_choices:
            snapshot.extend_snapshot(state.folder, [*plan.composer.shared, *groups], paths.CONF_DIR)
        state.write()
    except BaseException:
        state.discard()
        state.close()
        raise
    return state, plan.composer


@dataclass
class RunningJob:
    job: SweepJob
    handle: Any
    log: Path
    read: int  # bytes of the log that are printed already, or of an earlier attempt

    def forward_output(self, lines_of_sweep: SweepLines, prefix: str) -> None:
        """Print what the job has written since the last call, complete lines only."""
        if not self.log.exists():  # on another machine nothing may have been written yet
            return
        lines, newline, _ = read_from(self.log, self.read).rpartition(b"\n")
        if newline:
            self.read += len(lines) + 1
            for line in lines.decode("utf-8", "replace").split("\n"):
                lines_of_sweep.job_output(self.job.name, prefix, line)


class SweepScheduler:
    """Runs the jobs that `search` hands out on `backend` until there is none and all have ended."""

    def __init__(self, session: SweepSession, backend: Backend, search: Search) -> None:
        self.session, self.state, self.backend, self.search = session, session.state, backend, search
        self.running: list[RunningJob] = []
        self.waiting: list[SweepJob] = []  # handed out, but locked by another process, or to be tried again
        self.tries: Counter[str] = Counter()
        self.is_stopping = False
        self.problem: UserError | None = None  # why the search cannot go on

    def run(self) -> bool:
        """Run all jobs; return whether a signal has stopped the sweep. Then every running job has saved."""
        with StopFlag(announces=True) as stop, stop.working_on("when the running jobs have saved"):
            while True:
                if stop() or self.search.is_over():
                    self._stop_all()
                while not self.is_stopping and len(self.running) < self.backend.capacity and (job := self._take_job()):
                    self._start(job)
                if not self.running and (self.is_stopping or not self.waiting):
                    return stop()
                self.session.page.write_if_due()
                for running in list(self.running):
                    running.forward_output(self.session.lines, self._prefix(running.job))
                    if exit := self.backend.poll(running.handle):
                        self.running.remove(running)
                        self._record_end(running, exit)
                time.sleep(POLL_SECONDS)

    def _stop_all(self) -> None:
        """Ask every running job to save and start no other, once."""
        if not self.is_stopping:
            self.is_stopping = True
            for running in self.running:
                self.backend.cancel(running.handle)

    def _take_job(self) -> SweepJob | None:
        """Return a job that no other process trains.

        One that a killed sweep has left behind still saves; the others go first.
        """
        for waiting in self.waiting:
            if not is_locked(self.session.run_dir(waiting)):
                self.waiting.remove(waiting)
                if self.search.is_due(waiting):
                    return waiting
                self.state.refresh_job(waiting)  # another process has trained it
                self._report_end(waiting)
                return self._take_job()
        try:
            while (job := self.search.next_job()) and is_locked(self.session.run_dir(job)):
                self.waiting.append(job)
            return job
        except UserError as error:
            self._end_search(error)
            return None

    def _start(self, job: SweepJob) -> None:
        self.tries[job.name] += 1
        self.state.update_job(
            job,
            status="running",
            outcome=None,
            attempt=job.attempt + 1,
            error=None,
            loss=None,
            started=timestamp(),
            ended=None,
            last_lines=[],
        )
        run_dir = self.session.run_dir(job)
        verb, log = "continues" if has_started(RunMetadata.read(run_dir)) else "starts", run_dir / CONSOLE_LOG
        try:
            arguments = [*self.session.prepare(job), *self.search.arguments(job)]
            earlier = size_of(log)
            handle = self.backend.submit(run_dir, [TRAIN_SCRIPT, *arguments], self._environment(job))
        except (UserError, OSError) as error:
            if isinstance(error, UserError):
                self.session.refused_jobs.append(job)
            return self._fail(job, error.message if isinstance(error, UserError) else str(error), [], is_final=True)
        self.running.append(RunningJob(job, handle, log, earlier))
        self.session.lines.job_started(self._number(job), job.name, verb)

    def _environment(self, job: SweepJob) -> dict[str, str]:
        """Return the variables of the job's process, which are added to those of this one."""
        config = self.session.hydra_config
        section = compose.job_environment(config, self.state.jobs.index(job), job.name) if config else {}
        # those the user typed: a worker on another machine does not inherit the environment
        plugins = {PLUGINS_ENV: os.environ[PLUGINS_ENV]} if PLUGINS_ENV in os.environ else {}
        return plugins | torchrun.begin_job() | section

    def _record_end(self, running: RunningJob, exit: JobExit) -> None:
        job, run = running.job, RunMetadata.read(self.session.run_dir(running.job))
        running.forward_output(self.session.lines, self._prefix(job))
        if exit.code in (OK, INTERRUPTED) or (self.is_stopping and run.get("status") != "failed"):
            self.state.refresh_job(job)
            is_applied = exit.code == OK or job.status == "paused"
            self.state.update_job(job, pending_overrides=[] if is_applied else job.pending_overrides)
            self._report_end(job)
        else:
            lines = last_lines(running.log, JOB_LOG_BYTES)[-JOB_LOG_LINES:]
            reason = exit.reason or failure_reason(exit.code, run, lines)
            if exit.code == USER_ERROR and not has_started(run):
                self.session.refused_jobs.append(job)
            self._fail(job, reason, lines, is_final=exit.code == USER_ERROR, diverged=has_diverged(run))

    def _fail(self, job: SweepJob, reason: str, lines: list[str], is_final: bool, diverged: bool = False) -> None:
        """Record a failure.

        A diverged job would diverge again, and a wrong setting (`is_final`) stays wrong: neither is tried again.
        """
        outcome = Outcome.DIVERGED if diverged else Outcome.FAILED
        loss = INFINITE if diverged else None
        self.state.update_job(
            job, status="failed", outcome=outcome, error=reason, last_lines=lines, loss=loss, ended=timestamp()
        )
        self.session.lines.job_failed(self._number(job), job.name, reason)
        if self.tries[job.name] <= self.backend.retries and not (is_final or diverged or self.is_stopping):
            self.waiting.insert(0, job)
            return
        self._report_end(job)
        if self.backend.fail_fast:
            self._stop_all()

    def _report_end(self, job: SweepJob) -> None:
        try:
            self.search.job_ended(job)
        except UserError as error:
            self._end_search(error)

    def _end_search(self, problem: UserError) -> None:
        self.problem = self.problem or problem
        self._stop_all()

    def _prefix(self, job: SweepJob) -> str:
        return "" if self.backend.capacity == 1 else f"[{self._number(job)}] "

    def _number(self, job: SweepJob) -> str:
        return f"{self.state.jobs.index(job) + 1}/{len(self.state.jobs)}"
