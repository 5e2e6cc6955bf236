"""The processes of a sweep, with a few lines of Python in the place of a training: how they end is how jobs end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import Interrupted
from runner.cli import entrypoint
from runner.sweep import scheduler
from runner.sweep.command import _finish
from runner.sweep.plugins import local
from runner.sweep.scheduler import LocalScheduler, Slot, make_slots
from runner.sweep.session import SweepSession
from runner.sweep.state import SweepJob, SweepState

GOOD = "says(status='completed', attempt=1, metrics={'loss': 1.5})"
DIVERGED = "says(status='failed', attempt=1, error='3 steps in a row were not finite'); sys.exit(1)"
REFUSED = "print('error: a row is wrong\\n  where: rows.jsonl:3\\n  fix:   mend it', file=sys.stderr); sys.exit(2)"
BUG = "says(status='running', attempt=1); print('hello'); raise KeyError('lost')"
KILLED = "says(status='running', attempt=1); os.kill(os.getpid(), 9)"
SAVES = """
import signal
def leave(*_):
    says(status='interrupted', attempt=1); sys.exit(75)
signal.signal(signal.SIGTERM, leave)
says(status='running', attempt=1)
open('ready', 'w').close()
time.sleep(60)
"""
HEAD = """
import json, os, sys, time
def says(**fields):
    with open('run.json', 'w') as file: json.dump(fields, file)
"""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`sweep(scripts, ...)`: a job for each script, run to its end; returns (whether it was stopped, the jobs)."""
    started: list[str] = []
    spawned = scheduler.spawn_job

    def spawn(words: list[str], slot: Slot, out: int) -> subprocess.Popen:
        started.append(words[1])
        script = f"import os; os.chdir({str(tmp_path / 'sweep' / words[1])!r})\n{HEAD}\n{words[0]}"
        monkeypatch.setattr(scheduler.subprocess, "Popen", lambda command, **how: Popen([sys.executable, "-c", script], **how))
        return spawned([], slot, out)

    Popen = subprocess.Popen
    monkeypatch.setattr(scheduler, "spawn_job", spawn)

    def run(scripts: list[str], workers: int = 1, fail_fast: bool = False, retries: int = 0) -> tuple[bool, list[SweepJob]]:
        with SweepState.create(tmp_path / "sweep", overrides=[], swept={"seed": [str(n) for n in range(len(scripts))]}) as state:
            for number in range(len(scripts)):
                state.add({"seed": str(number)})
            group = LocalScheduler(state, lambda job: [scripts[int(job["overrides"]["seed"])], job["name"]], lambda: None)
            return group.run(list(state.jobs), make_slots(workers, None), fail_fast, retries), state.jobs

    run.started = started  # type: ignore[attr-defined]  # a function that carries what tests look at
    run.folder = tmp_path / "sweep"  # type: ignore[attr-defined]  # the same
    return run


def test_a_job_that_dies_in_any_way_is_recorded_and_the_sweep_goes_on(sweep: Any, capfd: pytest.CaptureFixture) -> None:
    stopped, jobs = sweep([DIVERGED, REFUSED, BUG, KILLED, GOOD])
    assert not stopped and [job["status"] for job in jobs] == ["failed"] * 4 + ["completed"]
    assert [job["error"] for job in jobs[:4]] == [
        "3 steps in a row were not finite",
        "a row is wrong (rows.jsonl:3)",
        "KeyError: 'lost'",
        "killed by SIGKILL (out of memory, or kill -9)",
    ]
    assert [job["loss"] for job in jobs] == ["inf", None, None, None, 1.5]
    assert "hello" in jobs[2]["last_lines"] and "last_lines" not in jobs[4]
    said = capfd.readouterr()
    assert "[2/5] seed=1 failed: a row is wrong" in said.err and "hello" in said.out
    assert json.loads((sweep.folder / "sweep.json").read_text())["jobs"] == jobs


def test_only_what_trying_again_could_help_is_tried_again(sweep: Any) -> None:
    flaky = f"before = os.path.exists('tried')\nopen('tried', 'w').close()\nif before: {GOOD}\nelse: {KILLED}"
    _, jobs = sweep([DIVERGED, REFUSED, KILLED, flaky], retries=2)
    assert [job["attempt"] for job in jobs] == [1, 1, 3, 2]
    assert [job["status"] for job in jobs] == ["failed", "failed", "failed", "completed"]


def test_fail_fast_stops_at_the_first_failure_and_the_others_save(sweep: Any) -> None:
    wait = "while not os.path.exists('../seed=0/ready'): time.sleep(0.01)\n"
    stopped, jobs = sweep([SAVES, wait + KILLED, GOOD], workers=2, fail_fast=True)
    assert not stopped and [job["status"] for job in jobs] == ["interrupted", "failed", "new"]


def test_with_fail_fast_a_job_has_its_retries_first(sweep: Any) -> None:
    flaky = f"before = os.path.exists('tried')\nopen('tried', 'w').close()\nif before: {GOOD}\nelse: {KILLED}"
    _, jobs = sweep([flaky, KILLED, GOOD], fail_fast=True, retries=1)
    assert [(job["status"], job["attempt"]) for job in jobs] == [("completed", 2), ("failed", 2), ("new", 0)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_no_further_job_starts(sweep: Any, number: int) -> None:
    def send() -> None:
        while not all((sweep.folder / f"seed={n}" / "ready").exists() for n in (0, 1)):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    stopped, jobs = sweep([SAVES, SAVES, GOOD], workers=2)
    assert stopped and [job["status"] for job in jobs] == ["interrupted", "interrupted", "new"]
    assert sweep.started == ["seed=0", "seed=1"]


def test_a_job_that_an_earlier_driver_left_behind_is_waited_for(sweep: Any) -> None:
    folder = sweep.folder / "seed=0"
    folder.mkdir(parents=True)
    hold = "import fcntl, os, time; fd = os.open('.lock', os.O_RDWR | os.O_CREAT); fcntl.lockf(fd, fcntl.LOCK_EX); print(flush=True); time.sleep(1)"
    holder = subprocess.Popen([sys.executable, "-c", hold], cwd=folder, stdout=subprocess.PIPE)
    assert holder.stdout
    holder.stdout.readline()
    _, jobs = sweep([f"{GOOD}", GOOD])
    holder.communicate()
    assert sweep.started == ["seed=1", "seed=0"] and [job["status"] for job in jobs] == ["completed"] * 2


def test_the_machine_is_divided_among_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert make_slots(None, None) == [Slot(None, None)]
    assert make_slots(3, None) == [Slot(2, None)] * 3
    assert make_slots(16, None)[0].threads == 1
    assert make_slots(None, ["0", "1"]) == [Slot(4, ["0"]), Slot(4, ["1"])]
    assert [slot.devices for slot in make_slots(2, ["0", "1", "2", "3"])] == [["0", "1"], ["2", "3"]]
    assert [slot.devices for slot in make_slots(4, ["0", "1"])] == [["0"], ["1"], ["0"], ["1"]]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert make_slots(2, None)[0].threads is None


def test_no_gpu_stays_idle_without_a_word() -> None:
    assert [slot.devices for slot in make_slots(3, ["0", "1"])] == [["0"], ["1"], ["0"]]
    with pytest.raises(ValueError, match="3 devices cannot be dealt out evenly among 2 workers") as refused:
        local.check_launcher_overrides(["hydra.launcher.devices=[0,1,2]", "hydra.launcher.workers=2"])
    assert refused.value.args[1:] == ("hydra.launcher.devices=[0,1,2] hydra.launcher.workers=2", "hydra.launcher.workers=3, or give 2 devices")
    with pytest.raises(ValueError, match="dealt out evenly"):
        local.check_launcher_options({"workers": 2, "devices": [0, 1, 2], "fail_fast": False, "retries": 0})


def test_a_slot_reaches_its_job_and_our_own_wish_for_tracebacks_does_not(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HYDRA_FULL_ERROR")

    def seen() -> dict:
        return json.loads((sweep.folder / "seen.json").read_text())

    with SweepState.create(sweep.folder, overrides=[], swept={"seed": ["0"]}) as state:
        job = state.add({"seed": "0"})
        script = f"{GOOD}; json.dump({{name: os.environ.get(name) for name in {names}}}, open('../seen.json', 'w'))"
        LocalScheduler(state, lambda job: [script, job["name"]], lambda: None).run([job], [Slot(3, ["2", "5"])], False, 0)
    assert seen() == {"CUDA_VISIBLE_DEVICES": "2,5", "OMP_NUM_THREADS": "3", "HYDRA_FULL_ERROR": None}


def test_a_job_asks_to_save_when_its_driver_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from runner.launch import children
children.subprocess.Popen, Popen = (lambda command, **how: Popen([sys.executable, "-c", {HEAD + SAVES!r}], cwd={str(tmp_path)!r}, **how)), children.subprocess.Popen
print(children.spawn([], children.Slot(None, None), os.open({str(tmp_path / "log")!r}, os.O_WRONLY | os.O_CREAT)).pid, flush=True)
time.sleep(60)
"""
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    assert driver.stdout
    child = int(driver.stdout.readline())
    until(lambda: (tmp_path / "ready").exists())
    driver.kill()
    driver.wait()
    until(lambda: not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text())
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "interrupted"


def test_a_sweep_whose_reader_goes_away_at_ctrl_c_saves_and_says_so_by_its_code(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    job = HEAD + SAVES.replace("def leave(*_):", "def leave(*_):\n    print('saving', flush=True); time.sleep(0.3)")
    code = f"""
import runpy, subprocess, sys
from runner.launch import children
Popen, spawn = subprocess.Popen, children.spawn
def fake(words, slot, out):
    subprocess.Popen = lambda command, **how: Popen([sys.executable, "-c", {job!r}], cwd={str(folder / "seed=1")!r}, **how)
    return spawn(words, slot, out)
children.spawn = fake
sys.argv[1:] = ["-m", "seed=1,2", "train.max_steps=2", {f"hydra.sweep.dir={folder}"!r}]
runpy.run_path('runner/train.py', run_name='__main__')
"""
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until((folder / "seed=1" / "ready").exists)
    assert driver.stdout
    driver.stdout.close()
    driver.send_signal(signal.SIGINT)
    assert driver.wait(20) == 75
    assert [json.loads((folder / name).read_text())["status"] for name in ("seed=1/run.json", "sweep.json")] == ["interrupted"] * 2


def test_the_line_to_continue_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "it's a sweep"
    with SweepState.create(folder, overrides=[], swept={"seed": ["0"]}) as state, pytest.raises(SystemExit):
        state.add({"seed": "0"})
        _finish(SweepSession(state), stopped=True)
    with pytest.raises(SystemExit):
        entrypoint.exit_with_code_of(Interrupted(3, folder))
    lines = [line.partition("continue with: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [shlex.split(line)[-1] for line in lines] == [f"resume={folder}"] * 2


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
