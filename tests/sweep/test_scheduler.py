"""The scheduler and the local backend, with a few lines of Python in place of a training: how a process ends is how its
job ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import BUG, DIVERGED, FLAKY, GOOD, KILLED, REFUSED, SAVES, FakeJobs, read_sweep, wait_until

from common.errors import UserError
from runner.engine.device.cpu import THREADS_ENV
from runner.reporting.live import RepeatedPage
from runner.sweep import command
from runner.sweep.backends import Backend, JobExit, LocalBackend, make_slots
from runner.sweep.grid import Search
from runner.sweep.state import SweepJob, SweepState
from runner.tracking.lines import SweepLines


class FakeSession:
    """A session whose run directories need no config."""

    hydra_config = None

    def __init__(self, state: SweepState) -> None:
        self.state = state
        self.refused_jobs: list[SweepJob] = []
        self.page = RepeatedPage(lambda: None, print)
        self.lines = SweepLines("auto")

    def run_dir(self, job: SweepJob) -> Path:
        return self.state.folder / job.name

    def prepare(self, job: SweepJob) -> list[str]:
        self.run_dir(job).mkdir(exist_ok=True)
        return [f"resume={self.run_dir(job)}", *job.pending_overrides]


@pytest.fixture
def run_jobs(tmp_path: Path, fake_jobs: FakeJobs) -> Callable[..., tuple[bool, list[SweepJob]]]:
    """`run_jobs([script, ...], workers=2)` runs a job for each script; returns (whether it was stopped, the jobs)."""

    def run(scripts: list[str], **options: Any) -> tuple[bool, list[SweepJob]]:
        fake_jobs.set_all({f"seed={number}": script for number, script in enumerate(scripts)})
        with SweepState.create(
            tmp_path / "sweep", swept={"seed": [str(number) for number in range(len(scripts))]}
        ) as state:
            for number in range(len(scripts)):
                state.add_job({"seed": str(number)})
            run = command.SweepScheduler(FakeSession(state), LocalBackend(**options), Search(state)).run
            return run(), state.jobs

    return run


@pytest.mark.slow
def test_scheduler_records_every_kind_of_failure_and_goes_on(
    run_jobs: Any, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    stopped, jobs = run_jobs([DIVERGED, REFUSED, BUG, KILLED, GOOD])
    assert not stopped and [job.status for job in jobs] == ["failed"] * 4 + ["completed"]
    assert [job.outcome for job in jobs] == ["diverged", "failed", "failed", "failed", "completed"]
    assert [job.error for job in jobs[:4]] == [
        "the loss is not finite",
        "a row is wrong (rows.jsonl:3)",
        "KeyError: 'missing'",
        "killed by SIGKILL (out of memory, or kill -9)",
    ]
    assert [job.loss for job in jobs] == ["inf", None, None, None, 1.5]
    assert "hello" in jobs[2].last_lines and not jobs[4].last_lines
    console = capfd.readouterr()
    assert "[2/5] seed=1 failed: a row is wrong" in console.err and "hello" in console.out
    assert read_sweep(tmp_path / "sweep")["jobs"] == [vars(job) for job in jobs]


@pytest.mark.slow
def test_scheduler_retries_only_jobs_that_may_succeed(run_jobs: Any) -> None:
    _, jobs = run_jobs([DIVERGED, REFUSED, KILLED, FLAKY], retries=2)
    assert [job.attempt for job in jobs] == [1, 1, 3, 2]
    assert [job.status for job in jobs] == ["failed", "failed", "failed", "completed"]


def test_scheduler_fail_fast_stops_the_others_after_they_have_saved(run_jobs: Any) -> None:
    wait = "while not os.path.exists('../seed=0/ready'): time.sleep(0.01)\n"
    stopped, jobs = run_jobs([SAVES, wait + KILLED, GOOD], workers=2, fail_fast=True)
    assert not stopped and [job.status for job in jobs] == ["interrupted", "failed", "new"]


@pytest.mark.slow
def test_scheduler_fail_fast_waits_for_the_retries_of_a_job(run_jobs: Any) -> None:
    _, jobs = run_jobs([FLAKY, KILLED, GOOD], fail_fast=True, retries=1)
    assert [(job.status, job.attempt) for job in jobs] == [("completed", 2), ("failed", 2), ("new", 0)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_scheduler_forwards_a_signal_and_starts_no_further_job(run_jobs: Any, tmp_path: Path, number: int) -> None:
    def send() -> None:
        wait_until(lambda: all((tmp_path / "sweep" / f"seed={seed}" / "ready").exists() for seed in (0, 1)))
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    stopped, jobs = run_jobs([SAVES, SAVES, GOOD], workers=2)
    assert stopped and [job.status for job in jobs] == ["interrupted", "interrupted", "new"]


def test_scheduler_waits_for_a_job_that_a_killed_sweep_left_running(run_jobs: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "sweep" / "seed=0"
    run_dir.mkdir(parents=True)
    hold = "import fcntl, os, time; fd = os.open('.lock', os.O_RDWR | os.O_CREAT); fcntl.lockf(fd, fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", hold], cwd=run_dir, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout
    holder.stdout.readline()

    def release() -> None:
        wait_until((tmp_path / "sweep" / "seed=1" / "run.json").exists)
        holder.communicate(b"\n")

    threading.Thread(target=release).start()
    _, jobs = run_jobs([GOOD, GOOD])
    assert [job.status for job in jobs] == ["completed"] * 2 and jobs[1].started <= jobs[0].started
    assert (tmp_path / "sweep" / "seed=1" / "run.json").stat().st_mtime_ns < (run_dir / "run.json").stat().st_mtime_ns


def test_scheduler_fails_a_job_whose_run_directory_cannot_be_written(
    run_jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = FakeSession.prepare

    def refuse(self: FakeSession, job: SweepJob) -> list[str]:
        if job.name == "seed=0":
            raise UserError("the disk is full", "somewhere", "delete files")
        return prepare(self, job)

    monkeypatch.setattr(FakeSession, "prepare", refuse)
    _, jobs = run_jobs([GOOD, GOOD], retries=3)
    assert [(job.status, job.error, job.attempt) for job in jobs] == [
        ("failed", "the disk is full", 1),
        ("completed", None, 1),
    ]


class InstantBackend(Backend):
    """Ends every job at once, on another machine: only `JobExit` tells how."""

    def __init__(self, exits: dict[str, JobExit]) -> None:
        super().__init__()
        self.exits, self.running, self.most = exits, 0, 0

    def submit(self, run_dir: Path, command: list[str], env: dict[str, str]) -> Path:
        self.running += 1
        self.most = max(self.most, self.running)
        return run_dir

    def poll(self, handle: Path) -> JobExit | None:
        self.running -= 1
        return self.exits[handle.name]

    def cancel(self, handle: Path) -> None: ...


def test_scheduler_takes_the_reason_of_a_backend_and_has_no_limit(tmp_path: Path) -> None:
    backend = InstantBackend({"seed=0": JobExit(0), "seed=1": JobExit(1, "the node has failed"), "seed=2": JobExit(75)})
    with SweepState.create(tmp_path / "sweep") as state:
        jobs = [state.add_job({"seed": str(seed)}) for seed in range(3)]
        for job, status in zip(jobs, ("completed", "running", "interrupted"), strict=True):
            (tmp_path / "sweep" / job.name).mkdir()
            run = {"status": status, "outcome": None, "attempt": 1, "metrics": {"loss": 2.0}}
            (tmp_path / "sweep" / job.name / "run.json").write_text(json.dumps(run))
        command.SweepScheduler(FakeSession(state), backend, Search(state)).run()
    assert [(job.status, job.error) for job in jobs] == [
        ("completed", None),
        ("failed", "the node has failed"),
        ("interrupted", None),
    ]
    assert backend.most == 3


# Local backend


def test_slots_divide_cores_and_devices_among_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert make_slots(None, None) == [{}]
    assert make_slots(3, None) == [{"OMP_NUM_THREADS": "2", THREADS_ENV: "2"}] * 3
    assert make_slots(16, None)[0]["OMP_NUM_THREADS"] == "1"
    assert {slot["OMP_NUM_THREADS"] for slot in make_slots(None, [0, 1])} == {"4"}
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(None, [0, 1])] == ["0", "1"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(2, [0, 1, 2, 3])] == ["0,1", "2,3"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(3, [0, 1])] == ["0", "1", "0"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert make_slots(2, None) == [{}, {}]


def test_slots_have_visible_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA reads the variable: a job whose device is hidden would train on the CPU silently."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-a,-1,3")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(None, [1, 0])] == ["GPU-a", "2"]
    for visible, device in (("2, GPU-a,-1,3", 2), ("-1", 0), ("", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(UserError, match="leaves"):
            make_slots(None, [device])


def test_slots_number_the_devices_that_the_sweep_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a1b2")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(None, [0, 1])] == ["4", "GPU-a1b2"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(None, ["GPU-a1b2"])] == ["GPU-a1b2"]
    with pytest.raises(UserError, match="has device 2, but CUDA_VISIBLE_DEVICES=4,GPU-a1b2 leaves 2"):
        make_slots(None, [2])


def test_slots_refuse_devices_that_cannot_be_divided() -> None:
    with pytest.raises(UserError, match="3 devices cannot be divided evenly among 2 workers") as error:
        LocalBackend(workers=2, devices=[0, 1, 2])
    assert error.value.args[1:] == (
        "hydra.launcher.devices=[0,1,2] hydra.launcher.workers=2",
        "hydra.launcher.workers=3, or give 2 devices",
    )


def test_local_backend_passes_the_slot_to_the_job_but_not_hydra_full_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    backend = LocalBackend(workers=2, devices=[2, 5, 6, 7])
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HYDRA_FULL_ERROR", "EXTRA")
    script = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {names}}}))"
    handle = backend.submit(tmp_path, ["-c", script], {"EXTRA": "1"})
    wait_until(lambda: backend.poll(handle))
    assert json.loads((tmp_path / "console.log").read_text()) == {
        "CUDA_VISIBLE_DEVICES": "2,5",
        "OMP_NUM_THREADS": "3",
        "HYDRA_FULL_ERROR": None,
        "EXTRA": "1",
    }


@pytest.mark.slow
def test_local_backend_job_saves_when_its_sweep_is_killed(tmp_path: Path, fake_jobs: FakeJobs) -> None:
    fake_jobs.set(default=SAVES)
    (tmp_path / "run").mkdir()
    code = f"""
import pathlib, sys, time
from runner.sweep.backends import LocalBackend
handle = LocalBackend().submit(pathlib.Path({str(tmp_path / "run")!r}), [{str(fake_jobs.script)!r}, "resume={tmp_path / "run"}"], {{}})
print(handle.process.pid, flush=True)
time.sleep(60)
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout
    child = int(driver.stdout.readline())
    wait_until((tmp_path / "run" / "ready").exists)
    driver.kill()
    driver.wait()
    wait_until(
        lambda: not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"


def test_sweep_whose_launcher_cannot_start_leaves_nothing_behind(
    sweep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(backend: Backend, sweep_dir: Path) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(LocalBackend, "open", refuse)
    monkeypatch.setattr(LocalBackend, "START_ERRORS", (ConnectionError,))
    with pytest.raises(UserError, match="Could not find any running Ray instance"):
        sweep("seed=1,2")
    assert not (tmp_path / "sweep").exists()
