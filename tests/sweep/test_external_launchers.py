"""Launchers that are not ours: what they are given, how jobs end under them, and (slow) submitit, joblib and Ray themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from runner.sweep import command as command_module
from runner.sweep import scheduler, session, validation
from runner.sweep.plugins import external, remote_job
from runner.sweep.plugins.external import ExternalLauncher
from runner.sweep.plugins.local import SweepJobFailed, SweepStopped
from runner.sweep.plugins.remote_job import RemoteJobFailed, RemoteJobInterrupted
from runner.sweep.state import SweepState

SAVES = """
import os, signal, sys, time
def leave(*_):
    open('run.json', 'w').write('{"status": "interrupted", "attempt": 1}'); sys.exit(75)
signal.signal(signal.SIGTERM, leave)
open('ready', 'w').close()
time.sleep(60)
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Jobs are lines of Python in the place of a training; the words they were started with are kept."""
    started: list[list[str]] = []

    def spawn(words: list[str], slot: scheduler.Slot, out: int) -> subprocess.Popen:
        started.append(words)
        return subprocess.Popen([sys.executable, "-c", words[-1]], cwd=tmp_path / "job", stdout=out, stderr=out)

    monkeypatch.setattr(scheduler, "spawn_job", spawn)
    return started


def test_a_job_elsewhere_ends_as_its_process_ends(scripts: list, tmp_path: Path) -> None:
    remote_job.run_remote_job(tmp_path / "job", ["pass"])
    with pytest.raises(RemoteJobFailed, match="KeyError: 'lost'"):
        remote_job.run_remote_job(tmp_path / "job", ["raise KeyError('lost')"])
    with pytest.raises(RemoteJobFailed, match="killed by SIGKILL"):
        remote_job.run_remote_job(tmp_path / "job", ["import os; os.kill(os.getpid(), 9)"])


def test_a_job_that_was_sent_back_to_the_queue_continues_in_its_folder(scripts: list, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "run.json").write_text('{"status": "interrupted", "attempt": 1}')
    with pytest.raises(RemoteJobFailed):
        remote_job.run_remote_job(tmp_path / "job", ["seed=1", "raise SystemExit(1)"])
    assert scripts == [[f"resume={tmp_path / 'job'}"]]


def test_a_signal_reaches_the_job_and_once_that_has_saved_whoever_else_it_was_for(scripts: list, tmp_path: Path) -> None:
    told: list[str] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: told.append((tmp_path / "job" / "run.json").read_text()))

    def send() -> None:
        until(lambda: (tmp_path / "job" / "ready").exists())
        os.kill(os.getpid(), signal.SIGUSR2)

    threading.Thread(target=send).start()
    try:
        with pytest.raises(RemoteJobInterrupted):
            remote_job.run_remote_job(tmp_path / "job", [SAVES])
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(told) == 1 and "interrupted" in told[0]


class Starter(Launcher):
    """In the place of submitit, joblib or Ray."""

    def __init__(self, act: Callable[[str], Any]) -> None:
        self.act, self.words = act, []

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.task = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.words += job_overrides
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=self.act(words[0].split("'")[1])) for words in job_overrides]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`launched(act)`: a sweep over three seeds through a starter whose jobs do `act(name)`; returns what a sweeper gets."""
    with SweepState.create(tmp_path, overrides=[], swept={"seed": ["0", "1", "2"]}) as state:
        sweep = SimpleNamespace(
            state=state,
            job_of=lambda words: state.add({"seed": words[0].removeprefix("seed=")}),
            child_words=lambda job: ["a", "b"],
            report=lambda: None,
        )
        monkeypatch.setattr(session, "current_sessions", [sweep])

        def launched(act: Callable[[str], Any]) -> tuple[Any, Starter]:
            starter = Starter(act)
            around = ExternalLauncher(starter)
            around.setup(hydra_context=None, task_function=None, config=None)
            return around.launch([[f"seed={n}"] for n in range(3)], 0), starter

        launched.state = state  # type: ignore[attr-defined]  # a function that carries what tests look at
        yield launched


def trains(folder: Path) -> Callable[[str], Any]:
    def act(name: str) -> Any:
        (folder / name).mkdir(exist_ok=True)
        if name == "seed=1":
            (folder / name / "run.json").write_text('{"status": "running", "attempt": 1}')
            (folder / name / "console.log").write_text("one\ntwo\n")
            return RemoteJobFailed("killed by SIGKILL (out of memory, or kill -9)")
        (folder / name / "run.json").write_text('{"status": "completed", "attempt": 1, "metrics": {"loss": 2.5}}')
        return None

    return act


def test_how_jobs_ended_is_read_from_their_folders_and_only_those_due_are_started(launched: Any, tmp_path: Path) -> None:
    returns, starter = launched(trains(tmp_path))
    assert [type(found._return_value) for found in returns] == [float, SweepJobFailed, float]
    jobs = launched.state.jobs
    assert [(job["status"], job["loss"]) for job in jobs] == [("completed", 2.5), ("failed", None), ("completed", 2.5)]
    assert jobs[1]["error"].startswith("killed by SIGKILL") and jobs[1]["last_lines"] == ["one", "two"]
    assert starter.task.words == dict.fromkeys(("seed=0", "seed=1", "seed=2"), ["a", "b"])
    assert all("hydra.output_subdir=null" in words for words in starter.words)  # nothing in .hydra/ but what the run itself writes
    _, again = launched(trains(tmp_path))
    assert len(again.words) == 1 and jobs[1]["attempt"] == 2


def test_a_launcher_that_gives_up_ends_no_sweep(launched: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def act(name: str) -> Any:
        if name == "seed=2":
            raise RuntimeError("the cluster is gone")
        return trains(tmp_path)(name)

    returns, _ = launched(act)
    assert [job["status"] for job in launched.state.jobs] == ["completed", "failed", "failed"] and len(returns) == 3
    assert launched.state.jobs[2]["error"] == "the launcher gave up: the cluster is gone"
    assert "the cluster is gone" in capsys.readouterr().err


def test_sigterm_and_ctrl_c_stop_the_sweep(launched: Any, tmp_path: Path) -> None:
    def act(name: str) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    with pytest.raises(SweepStopped):
        launched(act)
    assert "PYTHONPATH" not in os.environ or str(tmp_path) not in os.environ["PYTHONPATH"]


def test_what_is_not_installed_is_refused_with_the_line_to_type() -> None:
    with pytest.raises(ValueError) as refused:
        external.check_plugins(["hydra/launcher=basic"])
    assert refused.value.args[2] == "choose one of local, submitit_slurm, submitit_local, joblib, ray"
    external.check_plugins(["hydra/launcher=local", "hydra/sweeper=grid", "seed=1,2"])
    for word, line in (("hydra/launcher=ray", "pip install -e '.[ray]'"), ("hydra/sweeper=optuna", "--no-deps hydra-optuna-sweeper")):
        if not installed({"ray": "hydra_ray_launcher", "optuna": "hydra_optuna_sweeper"}[word.partition("=")[2]]):
            with pytest.raises(ValueError) as refused:
                external.check_plugins([word])
            assert line in refused.value.args[2]


def test_no_job_of_a_sweep_is_trained_inside_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hydra's own sweeper asks a foreign launcher itself: neither sweep.json nor a lock would know of the jobs."""
    monkeypatch.setattr(external, "find_spec", lambda name: object())
    external.check_plugins(["hydra/sweeper=basic"])
    for words in (["hydra/sweeper=basic", "hydra/launcher=joblib"], ["hydra/launcher=ray", "hydra/sweeper=basic"]):
        with pytest.raises(ValueError, match="past the books") as refused:
            external.check_plugins(words)
        assert refused.value.args[2] == "leave out hydra/sweeper=basic"
    told = {"overrides": [], "swept": {"seed": ["1"]}, "sweeper": "basic", "launcher": "local", "status": "interrupted", "base_rows": 1, "jobs": []}
    (tmp_path / "sweep.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="past the books"):
        command_module.resume_sweep(tmp_path, ["hydra/launcher=joblib"], [], lambda: pytest.fail("it went on"))


def test_a_sweep_keeps_counts_and_choices_and_nothing_that_could_run_code() -> None:
    for word in ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=9", "hydra.sweeper.sampler.seed=1", "hydra.launcher.gpus_per_node=2", "seed=1"):
        assert validation.is_safe_override(word), word
    for word in (
        "hydra.sweeper.custom_search_space=os.system",
        "hydra.sweeper.storage=sqlite:////etc/x",
        "hydra.launcher.setup=[reboot]",
        "hydra.job.env_set.A=b",
    ):
        assert not any(validation.is_safe_override(sign + word) for sign in ("", "+", "++")), word
    with pytest.raises(ValueError, match="pickles"):
        external.check_plugins(["hydra/sweeper/sampler=cmaes"])


# Slow: the real ones. What stands above must hold where they are installed and where they are not.

TINY = ("train.max_steps=8", "train.eval_every=0", "train.sample_every=0", "train.batch_size=2", "data.max_length=64")
PACKAGES = {"submitit_local": "hydra_submitit_launcher", "joblib": "hydra_joblib_launcher", "ray": "hydra_ray_launcher"}


def installed(package: str) -> bool:
    return find_spec("hydra_plugins") is not None and find_spec(f"hydra_plugins.{package}") is not None


def need(launcher: str) -> None:
    if not installed(PACKAGES[launcher]):
        pytest.skip(f"hydra/launcher={launcher} is not installed: {external.LAUNCHERS[launcher][1]}")


def books(sweep: Path) -> list[dict]:
    return json.loads((sweep / "sweep.json").read_text())["jobs"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", PACKAGES)
def test_under_a_foreign_launcher_jobs_are_what_they_are_under_ours(launcher: str, program: Any, tmp_path: Path) -> None:
    """One diverges and ends no other; nothing that is finished runs again."""
    need(launcher)
    words = ("--multirun", "optimizer.lr=1e-3,1e30", *TINY)
    ran = program(*words, f"hydra/launcher={launcher}", "hydra.sweep.dir=theirs")
    assert ran.returncode == 1 and "1 failed" in ran.stdout, ran.stdout + ran.stderr
    program(*words, "hydra.sweep.dir=ours")
    theirs, ours = books(tmp_path / "theirs"), books(tmp_path / "ours")
    assert [job["status"] for job in theirs] == ["completed", "failed"] and "not finite" in theirs[1]["error"]
    assert [(job["name"], job["loss"], job["attempt"]) for job in theirs] == [(job["name"], job["loss"], job["attempt"]) for job in ours]
    for job in ours:
        assert (tmp_path / "theirs" / job["name"] / ".hydra" / "config.yaml").read_text() == (
            tmp_path / "ours" / job["name"] / ".hydra" / "config.yaml"
        ).read_text()
    more = program("resume=theirs", "optimizer.lr=1e-3,2e-3")
    assert [(job["status"], job["attempt"]) for job in books(tmp_path / "theirs")] == [("completed", 1), ("failed", 1), ("completed", 1)], more.stderr


@pytest.mark.slow
def test_preempted_under_submitit_a_job_saves_goes_back_to_the_queue_and_continues_in_its_folder(checkout: Path, program: Any, tmp_path: Path) -> None:
    need("submitit_local")
    words = ("optimizer.lr=1e-3", "train.max_steps=120", *TINY[1:])
    program(*words, "hydra.run.dir=undisturbed")
    with begun(checkout, tmp_path, "hydra/launcher=submitit_local", "seed=choice(42)", *words) as driver:
        job = tmp_path / "sweep" / "seed=42"
        until(lambda: (job / "metrics.jsonl").exists(), driver)
        task = next(child for controller in children_of(driver.pid) for child in children_of(controller))
        os.kill(task, signal.SIGUSR2)  # as Slurm does before the time is up
        assert driver.wait(timeout=100) == 0, (tmp_path / "said").read_text()
    record, undisturbed = (json.loads((folder / "run.json").read_text()) for folder in (job, tmp_path / "undisturbed"))
    assert record["attempt"] == 2 and record["exact"] and record["metrics"] == undisturbed["metrics"]
    assert [path.name for path in (tmp_path / "sweep").iterdir() if path.name.startswith("seed")] == ["seed=42"]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "number"), [("joblib", signal.SIGTERM), ("ray", signal.SIGINT)])  # a SIGTERM Ray takes for itself
def test_a_driver_that_is_asked_to_stop_leaves_a_sweep_that_continues(launcher: str, number: int, checkout: Path, program: Any, tmp_path: Path) -> None:
    need(launcher)
    one = {"joblib": "hydra.launcher.n_jobs=1", "ray": "+hydra.launcher.ray.init.num_cpus=1"}[launcher]
    with begun(checkout, tmp_path, f"hydra/launcher={launcher}", one, "seed=1,2", "train.max_steps=120", *TINY[1:]) as driver:
        until(lambda: (tmp_path / "sweep" / "seed=2" / "metrics.jsonl").exists(), driver)
        driver.send_signal(number)
        driver.wait(timeout=100)
    said = (tmp_path / "said").read_text()
    assert driver.returncode == 75 and "continue with" in said, said
    assert [job["status"] for job in books(tmp_path / "sweep")] == ["completed", "interrupted"], said
    again = program("resume=sweep", one)
    assert again.returncode == 0, again.stderr
    assert [(job["status"], job["attempt"]) for job in books(tmp_path / "sweep")] == [("completed", 1), ("completed", 2)]


@contextmanager
def begun(checkout: Path, here: Path, *words: str) -> Iterator[subprocess.Popen]:
    command = [sys.executable, str(checkout / "runner" / "train.py"), "--multirun", *words, "hydra.sweep.dir=sweep"]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(here / "said", "w") as said:
        driver = subprocess.Popen(command, cwd=here, env=surroundings, stdout=said, stderr=said)
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition: Callable[[], bool], driver: subprocess.Popen | None = None) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end and (driver is None or driver.poll() is None)
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("hydra.launcher.worker=2", "did you mean hydra.launcher.workers?"),
        ("hydra.launcher.devices=0,1", "write 'hydra.launcher.devices=[0,1]'"),
        ("hydra.launcher.devices=0", "write 'hydra.launcher.devices=[0]'"),
        ("hydra.launcher.devices=[]", "give a list in brackets, e.g. [0,1]"),
        ("hydra.launcher.fail_fast=no", "give true or false"),
        ("hydra.launcher.fail_fast=true,false", "only words of the training can be swept"),
        ("hydra.launcher.workers=true", "give a whole number, 1 or more"),
        ("hydra.launcher.retries=-1", "give a whole number, 0 or more"),
    ],
)
def test_a_word_our_launcher_cannot_use_is_refused_before_a_folder_is_made(word: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refusal:
        command_module.start_sweep(["seed=1,2", word, f"hydra.sweep.dir={tmp_path / 'sweep'}"], ["-m"], lambda: pytest.fail("it went on"))
    assert len(refusal.value.args) == 3 and refusal.value.args[2] == fix and not (tmp_path / "sweep").exists()


def test_words_our_launcher_can_use_pass() -> None:
    external.check_plugins(
        ["hydra.launcher.workers=null", "hydra.launcher.devices=[0,GPU-1a,'2']", "hydra.launcher.fail_fast=true", "hydra.launcher.retries=0"]
    )
