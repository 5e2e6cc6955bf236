"""The processes of a sweep: each job is one, several run side by side, and none outlives us without saving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.exit_codes import INTERRUPTED, OK, USER_ERROR
from common.filesystem import make_dirs
from common.paths import REPO_ROOT
from runner.launch import torchrun
from runner.launch.signals import StopFlag
from runner.launch.subprocesses import POLL_SECONDS, THREADS_ENV, child_env, failure_reason, last_lines, spawn
from runner.run_dir import lock, metadata
from runner.sweep.state import SweepJob, SweepState

CONSOLE_LOG = "console.log"  # what a job says, all its attempts


@dataclass
class Slot:
    threads: int | None  # None: as torch chooses
    devices: list[str] | None


@dataclass
class RunningJob:
    job: SweepJob
    slot: Slot
    process: subprocess.Popen
    log: Path
    read: int  # bytes of the log that are told or not ours

    def tell(self, prefix: str) -> None:
        """Pass on what the job has said since, whole lines only."""
        with open(self.log, "rb") as log:
            log.seek(self.read)
            lines, newline, _ = log.read().rpartition(b"\n")
        if newline:
            self.read += len(lines) + 1
            for line in lines.decode("utf-8", "replace").split("\n"):
                print(f"{prefix}{line}", flush=True)


class LocalScheduler:
    """Runs the jobs of a sweep. `words_of(job)` is the command line of a job, `report` is called when one has ended."""

    def __init__(self, state: SweepState, words_of: Callable[[SweepJob], list[str]], report: Callable[[], None]) -> None:
        self.state, self.words_of, self.report = state, words_of, report
        self.running: list[RunningJob] = []
        self.tries: Counter[str] = Counter()

    def run(self, jobs: list[SweepJob], slots: list[Slot], fail_fast: bool, retries: int) -> bool:
        """Every job until it ends; returns whether we were asked to stop, and then each running one has saved."""
        waiting, free, told, lost = deque(jobs), list(slots), False, False
        with StopFlag() as stop:
            while waiting or self.running:
                if not told and (stop() or (fail_fast and lost)):
                    told = True
                    waiting.clear()
                    for child in self.running:
                        child.process.send_signal(signal.SIGTERM)
                while free and (job := self._next(waiting)):
                    self.running.append(self._start(job, free.pop(0)))
                for child in list(self.running):
                    child.tell(f"[{self._number(child.job)}] " if len(slots) > 1 else "")
                    if (code := child.process.poll()) is not None:
                        self.running.remove(child)
                        free.append(child.slot)
                        if self._ended(child, code, told) and self.tries[child.job["name"]] <= retries and not told:
                            waiting.appendleft(child.job)
                        elif child.job["status"] == "failed":
                            lost = True
                time.sleep(POLL_SECONDS)
            return stop()

    def _next(self, waiting: deque[SweepJob]) -> SweepJob | None:
        """The next job to start. One that an earlier, killed driver has left behind is still saving: the others go first."""
        for job in list(waiting):
            if not lock.is_locked(self.state.folder / job["name"]):
                waiting.remove(job)
                return job
        return None

    def _start(self, job: SweepJob, slot: Slot) -> RunningJob:
        folder = self.state.folder / job["name"]
        begun = metadata.has_started(metadata.read_run_metadata(folder))
        words = self.words_of(job)
        make_dirs(folder)
        self.tries[job["name"]] += 1
        job.pop("last_lines", None)
        self.state.update_job(job, status="running", attempt=job["attempt"] + 1, error=None, started=metadata.timestamp(), ended=None, loss=None)
        log = folder / CONSOLE_LOG
        with open(log, "ab") as out:
            child = RunningJob(job, slot, spawn_job(words, slot, out.fileno()), log, out.tell())
        print(f"[{self._number(job)}] {job['name']} {'continues' if begun else 'starts'}", flush=True)
        return child

    def _ended(self, child: RunningJob, code: int, told: bool) -> bool:
        """Write down how a job ended; returns whether trying again could help."""
        job, run = child.job, metadata.read_run_metadata(self.state.folder / child.job["name"])
        child.tell(f"[{self._number(job)}] ")
        torchrun.end_job()
        ended = {"ended": metadata.timestamp()}
        if code == OK:
            job.pop("pending_overrides", None)
            self.state.update_job(job, status="completed", loss=metadata.final_loss(run), **ended)
        elif code == INTERRUPTED or (told and code in (-signal.SIGTERM, -signal.SIGKILL)):
            self.state.update_job(job, status="interrupted" if metadata.has_started(run) else "new", **ended)
        else:
            lines = last_lines(child.log)
            diverged = metadata.has_diverged(run)
            self.state.update_job(job, status="failed", error=failure_reason(code, run, lines), last_lines=lines, loss="inf" if diverged else None, **ended)
            print(f"[{self._number(job)}] {job['name']} failed: {job['error']}", file=sys.stderr, flush=True)
            self.report()
            return code != USER_ERROR and not diverged
        self.report()
        return False

    def _number(self, job: SweepJob) -> str:
        return f"{self.state.jobs.index(job) + 1}/{len(self.state.jobs)}"


def make_slots(workers: int | None, devices: list[str] | None) -> list[Slot]:
    """A place for each job that runs at the same time, and what of the machine it gets. Raises ValueError(what, where, fix)."""
    count = workers or len(devices or "1")
    if devices and len(devices) > count and len(devices) % count:  # one worker with more GPUs would train unlike the others
        raise UserError(
            f"{len(devices)} devices cannot be dealt out evenly among {count} workers",
            f"hydra.launcher.devices=[{','.join(devices)}] hydra.launcher.workers={count}",
            f"hydra.launcher.workers={len(devices)}, or give {len(devices) // count * count} devices",
        )
    each = max(1, len(devices or []) // count)
    dealt = [[devices[(place * each + i) % len(devices)] for i in range(each)] for place in range(count)] if devices else [None] * count
    # torch takes every core for itself: two jobs that do so wait for each other
    threads = None if count == 1 or "OMP_NUM_THREADS" in os.environ else max(1, len(os.sched_getaffinity(0)) // count)
    return [Slot(threads, given) for given in dealt]


def spawn_job(words: list[str], slot: Slot, out: int) -> subprocess.Popen:
    """train.py with these words as a process; what it says goes to the descriptor `out`."""
    environment = child_env() | {"PYTHONUNBUFFERED": "1"} | torchrun.begin_job()
    if slot.threads:
        environment |= {"OMP_NUM_THREADS": str(slot.threads), THREADS_ENV: str(slot.threads)}
    if slot.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot.devices)
    return spawn([str(REPO_ROOT / "runner" / "train.py"), *words], environment, out)
