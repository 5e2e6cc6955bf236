"""Backends on other machines: how a worker runs a job, and submitit and Ray themselves where they are installed."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import DIVERGED, SAVES, FakeJobs, read_run, read_sweep, wait_until

from common.errors import UserError
from runner.config.compose import compose_tree
from runner.sweep.backends import SubmititBackend, failed_exit, run_job
from runner.sweep.validation import hydra_options

SUBMITIT = ("hydra/launcher=submitit", "hydra.launcher.cluster=local", "hydra.launcher.gpus_per_node=0")


@pytest.fixture
def submitit(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", "")  # restored at the end: the backend sets it
    return pytest.importorskip("submitit", reason="needs submitit: pip install 'lm-runner[submitit]'")


def test_worker_returns_the_exit_code_and_keeps_the_output_of_its_job(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    assert run_job(["-c", "import os; print('hello', os.environ['NAME'])"], {"NAME": "x"}, log) == (0, [])
    assert run_job(["-c", "raise SystemExit(3)"], {}, log) == (3, [])
    assert run_job(["-c", "import os; os.kill(os.getpid(), 9)"], {}, log) == (-9, [])
    assert log.read_text() == "hello x\n"


def test_worker_forwards_a_signal_and_waits_until_the_job_has_saved(tmp_path: Path, fake_jobs: FakeJobs) -> None:
    fake_jobs.set(default=SAVES)
    (tmp_path / "run").mkdir()

    def send() -> None:
        wait_until((tmp_path / "run" / "ready").exists)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.getsignal(signal.SIGUSR2)
    threading.Thread(target=send).start()
    assert run_job([str(fake_jobs.script), f"resume={tmp_path / 'run'}"], {}, tmp_path / "console.log") == (
        75,
        [signal.SIGUSR2],
    )
    assert read_run(tmp_path / "run")["status"] == "interrupted" and signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.parametrize(
    ("name", "package"), [("launcher=submitit", "submitit"), ("launcher=ray", "ray"), ("sweeper=optuna", "optuna")]
)
def test_plugin_whose_package_is_missing_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr("common.settings.find_spec", lambda package: None)
    with pytest.raises(UserError, match=f"needs the package {package}") as error:
        hydra_options(compose_tree([f"hydra/{name}"]))
    assert error.value.fix == f"pip install 'lm-runner[{package}]'"


@pytest.mark.parametrize(
    ("text", "reason"),
    [  # of submitit/core/core.py
        ("Job failed during processing with trace:\n----\nOSError: full\n\n----\nYou can check full logs with x\n - /log", "OSError: full"),
        ("has not produced any output\nNo error stream produced. Look at stdout: /log\n-----\n", "Look at stdout: /log"),
    ],
)  # fmt: skip
def test_failure_of_a_submitit_worker_has_the_last_line_of_its_trace(text: str, reason: str) -> None:
    assert str(failed_exit(RuntimeError(text), "submitit").reason).endswith(reason)


def test_submitit_on_a_machine_without_slurm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.settings.find_spec", lambda package: object())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="needs the command sbatch"):
        hydra_options(compose_tree(["hydra/launcher=submitit"]))
    with pytest.raises(UserError, match="must be one of slurm, local, debug, got pbs"):
        hydra_options(compose_tree(["hydra/launcher=submitit", "hydra.launcher.cluster=pbs"]))


def test_submitit_runs_jobs_in_its_workers(
    submitit: Any, sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set_all({"seed=2": DIVERGED, "seed=3": "print('hello'); raise KeyError('missing')"})
    assert sweep("seed=1,2,3", *SUBMITIT) == 1
    jobs = read_sweep(tmp_path / "sweep")["jobs"]
    assert [(job["status"], job["error"]) for job in jobs] == [
        ("completed", None),
        ("failed", "the loss is not finite"),
        ("failed", "KeyError: 'missing'"),
    ]
    assert [job["loss"] for job in jobs] == [1.5, "inf", None] and "hello" in jobs[2]["last_lines"]
    fake_jobs.set_all({"seed=3": "write('completed', 'completed', metrics={'loss': 2.0})"})
    assert resume() == 1
    assert [job["attempt"] for job in read_sweep(tmp_path / "sweep")["jobs"]] == [1, 1, 2]
    assert len(list((tmp_path / "sweep" / ".submitit").iterdir())) == 2  # no launch reads the pickles of another


def test_submitit_puts_a_preempted_job_into_the_queue_again(
    submitit: Any, sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    """Slurm sends SIGUSR2 to the worker, which is the parent of the job, before the time limit and before a preemption."""
    fake_jobs.set(
        default=f"if fields['attempt'] > 1: write('completed', 'completed', metrics={{'loss': 2.0}}); sys.exit(0)\n{SAVES}"
    )
    run_dir = tmp_path / "sweep" / "seed=1"

    def preempt() -> None:
        wait_until((run_dir / "ready").exists)
        worker = next(
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_parent_of_a_job_in(pid, run_dir)
        )
        os.kill(worker, signal.SIGUSR2)

    threading.Thread(target=preempt).start()
    assert sweep("seed=choice(1)", *SUBMITIT) == 0
    assert read_run(run_dir)["attempt"] == 2 and read_sweep(tmp_path / "sweep")["jobs"][0]["status"] == "completed"


def is_parent_of_a_job_in(pid: int, run_dir: Path) -> bool:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return any(f"resume={run_dir}" in Path(f"/proc/{child}/cmdline").read_text() for child in children)
    except OSError:
        return False


def test_submitit_stops_its_jobs_after_they_have_saved(
    submitit: Any, sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=SAVES)

    def send() -> None:
        wait_until((tmp_path / "sweep" / "seed=1" / "ready").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert sweep("seed=1,2", *SUBMITIT, "hydra.launcher.workers=1") == 75
    assert [job["status"] for job in read_sweep(tmp_path / "sweep")["jobs"]] == ["interrupted", "new"]


def test_submitit_writes_a_batch_script_for_slurm(
    submitit: Any, fake_jobs: FakeJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("srun", "exit 0"), ("sbatch", "echo Submitted batch job 7")):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    backend = SubmititBackend(
        timeout_min=90, partition="gpu", account="lab", mem_gb=32, gpus_per_node=2, parameters={"slurm_qos": "high"}
    )
    backend.check_available()
    backend.open(tmp_path)
    (tmp_path / "seed=1").mkdir()
    backend.submit(tmp_path / "seed=1", [str(fake_jobs.script)], {})
    script = next(tmp_path.glob(".submitit/*/*.sh")).read_text()
    wanted = (
        "job-name=seed=1",
        "partition=gpu",
        "account=lab",
        "time=90",
        "mem=32GB",
        "gpus-per-node=2",
        "cpus-per-task=4",
        "qos=high",
        "signal=USR2@120",
    )
    assert all(f"#SBATCH --{line}\n" in script for line in wanted), script
    assert sys.executable in script


@pytest.mark.slow
def test_ray_runs_jobs_in_its_workers_and_stops_them_after_they_have_saved(
    sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'lm-runner[ray]'")
    fake_jobs.set_all({"seed=2": DIVERGED, "seed=3": SAVES})

    def send() -> None:
        wait_until(lambda: (tmp_path / "sweep" / "seed=3" / "ready").exists() and all_ended(tmp_path / "sweep", 2))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert sweep("seed=1,2,3", "hydra/launcher=ray", "hydra.launcher.num_cpus=0.1") == 75
    jobs = read_sweep(tmp_path / "sweep")["jobs"]
    assert [(job["status"], job["loss"]) for job in jobs] == [
        ("completed", 1.5),
        ("failed", "inf"),
        ("interrupted", None),
    ]
    fake_jobs.set_all({"seed=3": "write('completed', 'completed', metrics={'loss': 2.0})"})
    assert resume() == 1
    assert [job["attempt"] for job in read_sweep(tmp_path / "sweep")["jobs"]] == [1, 1, 2]


def all_ended(sweep: Path, count: int) -> bool:
    return sum(job["status"] in ("completed", "failed") for job in read_sweep(sweep)["jobs"]) == count
