"""Runs the jobs of a sweep on a backend: starts one when a worker is free, records how it ended, retries, stops all
when asked.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import INTERRUPTED, OK, USER_ERROR, Outcome, UserError
from common.guarded_files import last_lines, read_from
from common.paths import REPO_ROOT
from common.registry import PLUGINS_ENV
from runner.config import compose
from runner.launch import torchrun
from runner.launch.signals import StopFlag
from runner.launch.subprocesses import POLL_SECONDS, failure_reason
from runner.run_dir.contents import has_diverged, has_started, size_of, timestamp
from runner.run_dir.lock import is_locked
from runner.run_dir.metadata import RunMetadata
from runner.sweep.backends.base import CONSOLE_LOG, Backend, JobExit
from runner.sweep.grid import Search
from runner.sweep.session import SweepSession
from runner.sweep.state import INFINITE, SweepJob
from runner.tracking.console.sweep_lines import SweepLines

JOB_LOG_LINES, JOB_LOG_BYTES = 12, 1 << 16  # of the end of console.log of a failed job
TRAIN_SCRIPT = str(REPO_ROOT / "runner" / "train.py")


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

    def run(self) -> bool:
        """Run all jobs; return whether a signal has stopped the sweep. Then every running job has saved."""
        self.backend.open(self.state.folder)  # before StopFlag: Ray sets a handler of its own for SIGTERM
        with StopFlag(announces=True) as stop, stop.working_on("when the running jobs have saved"):
            while True:
                if stop():
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
                return waiting
        while (job := self.search.next_job()) and is_locked(self.session.run_dir(job)):
            self.waiting.append(job)
        return job

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
            arguments = self.session.prepare(job)
            earlier = size_of(log)
            handle = self.backend.submit(run_dir, [TRAIN_SCRIPT, *arguments], self._environment(job))
        except (UserError, OSError) as error:
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
        torchrun.end_job()
        if exit.code in (OK, INTERRUPTED) or (self.is_stopping and run.get("status") != "failed"):
            self.state.refresh_job(job)
            self.state.update_job(job, pending_overrides=[] if exit.code == OK else job.pending_overrides)
            self.search.job_ended(job)
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
        self.search.job_ended(job)
        if self.backend.fail_fast:
            self._stop_all()

    def _prefix(self, job: SweepJob) -> str:
        return "" if self.backend.capacity == 1 else f"[{self._number(job)}] "

    def _number(self, job: SweepJob) -> str:
        return f"{self.state.jobs.index(job) + 1}/{len(self.state.jobs)}"
