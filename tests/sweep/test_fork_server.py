"""Jobs of a local sweep as forks of a process that has imported torch: as a cold start, and each by itself."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_fixtures import TINY_RUN
from fake_jobs import SAVES, FakeJobs, read_run, read_sweep, wait_until

from common.registry import PLUGINS_ENV
from runner.config.compose import HYDRA_CONFIG_ENV
from runner.engine.verify_resume import diff_run_dirs
from runner.launch import fork_server
from runner.launch.fork_server import ForkServer
from runner.sweep.backends import CONSOLE_LOG, INTERRUPTED, LocalBackend, LocalJob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux only")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def submit(
    server: ForkServer, fake_jobs: FakeJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[LocalBackend, LocalJob]]:
    """`submit(script)` starts the lines of Python as a job; returns its backend and handle."""
    monkeypatch.setattr(fork_server, "TRAIN_SCRIPT", str(fake_jobs.script))

    def submit(script: str, name: str = "run", forks: ForkServer = server, **env: str) -> tuple[LocalBackend, LocalJob]:
        fake_jobs.set_all({name: script})
        os.environ.pop("PYTEST_CURRENT_TEST", None)  # another for each test: the server has that of the first
        backend, folder = LocalBackend(), tmp_path / name
        backend._forks = forks
        folder.mkdir()
        return backend, backend.submit(folder, [str(fake_jobs.script), f"resume={folder}"], env)

    return submit


def end_of(backend: LocalBackend, job: LocalJob) -> int:
    exits: list[Any] = []
    wait_until(lambda: exits.append(backend.poll(job)) or exits[-1])
    return int(exits[-1].code)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


ENDS: list[tuple[str, int, str]] = [
    ("print('hello', sys.argv[1][:7], __name__)", 0, "hello resume= __main__\n"),
    ("import atexit; atexit.register(print, 'end')", 0, "end\n"),
    ("raise KeyError('missing')", 1, "KeyError: 'missing'\n"),
    ("sys.exit(3)", 3, ""),
    ("sys.exit('refused')", 1, "refused\n"),
    ("os._exit(9)", 9, ""),
    ("os.kill(os.getpid(), 9)", -9, ""),
    ("import ctypes; ctypes.string_at(0)", -11, ""),
    ("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20)); bytearray(1 << 30)", 1, "MemoryError\n"),
    ("pass", 0, ""),
]  # fmt: skip


def test_fork_ends_as_a_cold_start_does_and_the_next_one_starts(submit: Any, tmp_path: Path) -> None:
    for number, (script, code, output) in enumerate(ENDS):
        backend, job = submit(script, f"run{number}")
        assert isinstance(job.process, fork_server.ForkedProcess)
        assert end_of(backend, job) == code, script
        assert (tmp_path / f"run{number}" / CONSOLE_LOG).read_text().endswith(output), script


@pytest.mark.slow
def test_fork_has_what_a_cold_start_has(submit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script = """
import random, threading
import numpy, torch
with open("facts.json", "w") as file:
    json.dump({
        "group": os.getpgid(0) == os.getpid(), "cwd": os.getcwd(), "stdin": os.read(0, 1).decode(),
        "files": sorted(os.readlink(f"/proc/self/fd/{name}") for name in ("0", "1", "2")),
        "sockets": sum(os.path.realpath(f"/proc/self/fd/{name}").startswith("socket") for name in os.listdir("/proc/self/fd")),
        "env": {name: value for name, value in os.environ.items()}, "path": sys.path,
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "unbuffered": sys.stdout.write_through, "signals": [str(signal.getsignal(n)) for n in range(1, 32)],
        "flags": str(sys.flags),
    }, file)
"""
    facts = []
    for name, message_bytes in (("cold", 0), ("fork", fork_server.MESSAGE_BYTES)):
        monkeypatch.setattr(fork_server, "MESSAGE_BYTES", message_bytes)
        backend, job = submit(script, name, CUDA_VISIBLE_DEVICES="3")
        assert end_of(backend, job) == 0
        found = json.loads((tmp_path / name / "facts.json").read_text())
        found["files"] = [file.replace(f"/{name}/", "/") for file in found["files"]]
        found["cwd"] = found["cwd"].removesuffix(name)
        found["env"].pop("OMP_WAIT_POLICY", None)  # the command sets it
        found["path"] = found["path"][1:]  # the command sets the first one
        facts.append(found)
    assert facts[0] == facts[1] and facts[0]["group"] and facts[0]["sockets"] == 0
    assert facts[0]["env"]["CUDA_VISIBLE_DEVICES"] == "3"


DIFFERENT: list[dict[str, str]] = [
    {"OMP_NUM_THREADS": "7"},
    {PLUGINS_ENV: "[]"},
    {HYDRA_CONFIG_ENV: json.dumps({"job": {"env_set": {"OMP_NUM_THREADS": "7"}}})},
    {HYDRA_CONFIG_ENV: json.dumps({"callbacks": {"mine": {}}})},
]


@pytest.mark.slow
def test_job_that_would_differ_in_a_fork_starts_cold(submit: Any) -> None:
    assert isinstance(submit("pass", "first")[1].process, fork_server.ForkedProcess)
    for number, env in enumerate(DIFFERENT):
        backend, job = submit("pass", f"run{number}", **env)
        assert not isinstance(job.process, fork_server.ForkedProcess), env
        assert end_of(backend, job) == 0


def test_fork_gets_the_config_of_its_own_job(submit: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert (
            end_of(
                *submit(f"print(os.environ['{HYDRA_CONFIG_ENV}'])", name, **{HYDRA_CONFIG_ENV: f'{{"id": "{name}"}}'})
            )
            == 0
        )
        assert (tmp_path / name / CONSOLE_LOG).read_text() == f'{{"id": "{name}"}}\n'


def test_fork_that_is_canceled_saves(submit: Any, tmp_path: Path) -> None:
    backend, job = submit(SAVES)
    wait_until((tmp_path / "run" / "ready").exists)
    backend.cancel(job)
    assert end_of(backend, job) == INTERRUPTED and read_run(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.slow
def test_job_saves_and_continues_cold_when_its_fork_server_is_killed(submit: Any, tmp_path: Path) -> None:
    """A job that was canceled saves and does not continue."""
    script = f"if fields['attempt'] > 1: write('completed', 'completed'); sys.exit(0)\n{SAVES}"
    forks, jobs = ForkServer(), dict[str, tuple[LocalBackend, LocalJob]]()
    for name in ("continued", "canceled"):
        jobs[name] = submit(script, name, forks)
        wait_until((tmp_path / name / "ready").exists)
    jobs["canceled"][1].is_canceled = True
    os.kill(parent_of(jobs["canceled"][1].process.pid), signal.SIGKILL)
    for name, code, attempts in (("continued", 0, 2), ("canceled", INTERRUPTED, 1)):
        wait_until(lambda name=name: read_run(tmp_path / name)["status"] == "interrupted")
        assert end_of(*jobs[name]) == code
        assert read_run(tmp_path / name)["attempt"] == attempts
    backend, job = submit("pass", "next", forks=forks)
    assert not isinstance(job.process, fork_server.ForkedProcess) and end_of(backend, job) == 0
    backend.close()


@pytest.mark.slow
def test_forked_jobs_end_in_the_bits_of_cold_starts(program: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{number} goats sing in the rain"}) + "\n" for number in range(40)))
    settings = [
        *TINY_RUN,
        "model.dropout=0.1",
        "train.max_steps=6",
        "init_from=scratch",
        f"data.path={rows}",
        "train.log_every=1",
    ]
    settings += ["data.val_fraction=0.2", "train.eval_every=3"]
    ended = program("-m", *settings, "seed=1,2", f"hydra.sweep.dir={tmp_path / 'sweep'}", PYTHONPROFILEIMPORTTIME="1")
    assert ended.returncode == 0, ended.stderr
    logs = [(tmp_path / "sweep" / f"seed={seed}" / CONSOLE_LOG).read_text() for seed in (1, 2)]
    assert [" | torch\n" in log for log in logs] == [True, False]  # the first one shows the imports of the server
    assert {job["status"] for job in read_sweep(tmp_path / "sweep")["jobs"]} == {"completed"}
    # the second fork of the server
    ended = program(*settings, "seed=2", f"hydra.run.dir={tmp_path / 'run'}")
    assert ended.returncode == 0, ended.stderr
    assert diff_run_dirs(tmp_path / "sweep" / "seed=2", tmp_path / "run") == []


@pytest.mark.slow
def test_job_whose_settings_do_not_fit_into_a_message_starts_cold(tmp_path: Path) -> None:
    server = ForkServer()
    try:
        with open(tmp_path / "log", "wb") as out:
            program = [fork_server.TRAIN_SCRIPT, "run.note=" + "x" * fork_server.MESSAGE_BYTES]
            assert server.start(program, dict(os.environ), out.fileno()) is None
    finally:
        server.close()
