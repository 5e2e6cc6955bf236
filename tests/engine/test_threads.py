"""Threads of a CPU training: how many, and whether they spin.

The commands get their choice from the machine, from other trainings and from the checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from common import limits
from runner.engine.build import configure_cpu
from runner.engine.device import cpu, spinning
from runner.engine.device.cpu import RunningTrainings
from runner.engine.device.spinning import (
    ForeignLoad,
    SleepingThreads,
    SpinControl,
    find_libgomp,
    read_busy_seconds,
    set_wait_policy,
)

STAT = """cpu  600 0 60 9000 0 0 0 0 0 0
cpu0 100 1 20 4000 50 3 4 9 0 0
cpu1 200 2 30 4000 50 5 6 9 0 0
cpu12 300 0 10 1000 50 0 0 0 0 0
intr 1 2 3
"""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of threads that torch is set to, on 8 cores without limits, other trainings or variables."""
    numbers = list[int]()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu, "default_threads", lambda: 8)
    monkeypatch.setattr(cpu, "cpu_limit", lambda: None)
    monkeypatch.setattr(cpu, "_chosen", None)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(RunningTrainings, "threads_of_others", lambda self: [])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)
    return numbers


def test_threads_are_those_of_torch_alone_and_shared_with_other_trainings(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu.choose_threads() is None and chosen == [8] and cpu.current_threads() == 8
    monkeypatch.setattr(RunningTrainings, "threads_of_others", lambda self: [0])  # has not chosen yet: both take half
    assert cpu.choose_threads() == "1 other training on 8 cores" and chosen[-1] == 4
    monkeypatch.setattr(RunningTrainings, "threads_of_others", lambda self: [1, 1])
    assert cpu.choose_threads() == "2 other trainings on 8 cores" and chosen[-1] == 6
    monkeypatch.setattr(RunningTrainings, "threads_of_others", lambda self: [8] * 20)
    assert cpu.choose_threads() and chosen[-1] == 1


def test_threads_follow_the_limit_of_a_container(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_limit", lambda: 2.5)
    assert cpu.choose_threads() == "this container may use 2.5 cores" and chosen == [2]
    monkeypatch.setattr(cpu, "cpu_limit", lambda: 0.5)
    assert cpu.choose_threads() and chosen[-1] == 1


def test_resumed_run_takes_the_threads_of_its_checkpoint(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningTrainings, "threads_of_others", lambda self: [8])
    assert configure_cpu({"environment.threads": 3}) == "as its checkpoint" and chosen == [3]
    assert configure_cpu({"environment.threads": 8}) is None and chosen[-1] == 8
    for damaged in (99, 0, -1, "2", None):
        configure_cpu({"environment.threads": damaged})
        assert chosen[-1] == 4  # a new choice, beside the other training


@pytest.mark.parametrize("name", cpu.THREAD_VARIABLES)
def test_threads_of_the_user_win(name: str, chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "8")
    monkeypatch.setattr(RunningTrainings, "threads_of_others", lambda self: [8])
    assert cpu.choose_threads(saved=3) is None and chosen == [8]


def test_cpu_limit_is_the_smallest_of_the_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, group, name = tmp_path / "cgroup", tmp_path / "cgroup/outer/inner", tmp_path / "name"
    group.mkdir(parents=True)
    monkeypatch.setattr(limits, "CGROUP_ROOT", root)
    monkeypatch.setattr(limits, "CGROUPS_OF_PROCESS", name)
    assert cpu.cpu_limit() is None
    name.write_text("1:cpu:/old\n0::/outer/inner\n")
    assert cpu.cpu_limit() is None
    (group / "cpu.max").write_text("400000 100000\n")
    assert cpu.cpu_limit() == 4
    (root / "outer/cpu.max").write_text("150000 100000\n")
    assert cpu.cpu_limit() == 1.5
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cpu.available_cores() == 1
    (root / "outer/cpu.max").write_text("max 100000\n")
    (group / "cpu.max").write_text("damaged\n")
    assert cpu.cpu_limit() is None and cpu.available_cores() == 8
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/cpu.max").write_text("100000 100000\n")
    name.write_text("0::/../etc\ndamaged\n")
    assert cpu.cpu_limit() is None


def test_running_trainings_are_counted_until_their_process_ends(tmp_path: Path) -> None:
    """Killed processes leave their file; its lock ends with them."""
    folder, ready = tmp_path / "trainings", tmp_path / "ready"
    assert RunningTrainings(folder).threads_of_others() == []
    if not (child := os.fork()):
        with RunningTrainings(folder).registered():
            RunningTrainings(folder).set_threads(3)
            ready.touch()
            signal.pause()
    while not ready.exists():
        time.sleep(0.01)
    with RunningTrainings(folder).registered():
        assert RunningTrainings(folder).threads_of_others() == [3]
        assert len(list(folder.iterdir())) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert RunningTrainings(folder).threads_of_others() == [] and list(folder.iterdir()) == []


def test_running_trainings_of_a_folder_that_others_may_write_are_not_read(tmp_path: Path) -> None:
    folder, target = tmp_path / "trainings", tmp_path / "target"
    folder.mkdir(mode=0o777), folder.chmod(0o777)
    with RunningTrainings(folder).registered():
        assert list(folder.iterdir()) == []
    folder.chmod(0o700), target.write_text("keep")
    (folder / str(os.getpid())).symlink_to(target), (folder / "1").symlink_to(target), (folder / "name").touch()
    with RunningTrainings(folder).registered():
        RunningTrainings(folder).set_threads(5)
        assert RunningTrainings(folder).threads_of_others() == []
    assert target.read_text() == "keep"


def test_running_trainings_need_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    with RunningTrainings().registered():
        assert RunningTrainings().threads_of_others() == []


def test_busy_seconds_are_those_of_the_cores_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(spinning, "PROC_STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 12})
    assert read_busy_seconds() is None
    stat.write_text(STAT)
    assert read_busy_seconds() == (128 + 310) / os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu0 damaged\n")
    assert read_busy_seconds() is None


def test_threads_sleep_only_where_the_machine_cannot_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*spinning.WAIT_VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    set_wait_policy()
    assert not any(name in os.environ for name in spinning.WAIT_VARIABLES)
    monkeypatch.setattr(spinning, "PROC_STAT", tmp_path / "none")
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    set_wait_policy()
    assert "OMP_WAIT_POLICY" not in os.environ  # the user has decided
    monkeypatch.delenv("GOMP_SPINCOUNT")
    set_wait_policy()
    assert os.environ.pop("OMP_WAIT_POLICY") == "passive"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # one thread waits for no other
    set_wait_policy()
    assert "OMP_WAIT_POLICY" not in os.environ


@pytest.mark.parametrize(("threads", "is_watched"), [("1", False), ("2", True)])
def test_load_is_watched_where_there_are_several_threads(
    threads: str, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in spinning.WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(spinning, "read_busy_seconds", lambda: 0.0)
    with spinning.adapt_spinning():
        assert any(thread.name == "spin-control" for thread in threading.enumerate()) == is_watched


def test_foreign_load_is_what_other_processes_use() -> None:
    busy, own, clock = iter([10.0, 14.0, 15.0, 15.0]), iter([1.0, 3.0, 5.0, 5.0]), iter([100.0, 102.0, 104.0, 104.0])
    load = ForeignLoad(lambda: next(busy), lambda: next(own), lambda: next(clock))
    # (4 - 2) / 2 cores; less than this process: the kernel counts in ticks; no time has passed
    assert [load.read() for _ in range(3)] == [1.0, 0.0, 0.0]


def test_spinning_ends_at_once_and_begins_after_a_quiet_second_or_longer() -> None:
    class Recorded:
        is_started = False

        def start(self) -> None:
            self.is_started = True

        def stop(self) -> None:
            self.is_started = False

    def states(free_cores: int, loads: list[float]) -> list[bool]:
        recorded = Recorded()
        control = SpinControl(recorded, lambda: free_cores)  # type: ignore[arg-type]  # has the two methods that are used
        return [(control.update(load), recorded.is_started)[1] for load in loads]

    second = [0.0] * 4
    assert states(0, [*[0.1] * 200, 1.0, *second, 0.3]) == [False] * 200 + [True] * 4 + [False, True]
    assert states(0, [*second, 1.0, *second, *second, 1.0, *second * 4]) == [False] * 4 + [True] * 8 + [False] + [
        True
    ] * 16 + [False]
    assert states(0, [*[0.0] * 200, 1.0, 0.0, 0.0, 0.0, 1.0, *second]) == [False] * 200 + [True] * 8 + [False]
    assert states(4, [4.1, 4.3]) == [False, True]  # of 8 cores with 4 threads


SPIN = """
import os, sys, time, torch
sys.path.insert(0, sys.argv[1])
from runner.engine.device.spinning import SleepingThreads, find_libgomp

def seconds_of_waiting():
    x, used = torch.ones(1 << 17), 0.0
    for _ in range(20):
        x.add_(1)
        started = time.process_time()
        time.sleep(0.01)  # the other thread waits for the next product
        used += time.process_time() - started
    return used

torch.set_num_threads(2)
sleeping = SleepingThreads(find_libgomp())
before = seconds_of_waiting()
sleeping.start()
time.sleep(0.2)
while_sleeping = seconds_of_waiting()
sleeping.stop()
print(before, while_sleeping, seconds_of_waiting())
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core, libgomp never spins")
def test_sleeping_threads_end_the_spinning_of_libgomp_and_let_it_begin_again() -> None:
    """By processor time, which other load on the machine does not change."""
    if not find_libgomp():
        pytest.skip("torch has not GCC's OpenMP library here")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SPIN, str(Path(__file__).parents[2])],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    before, while_sleeping, after = map(float, done.stdout.split())
    assert before > 4 * while_sleeping and after > 4 * while_sleeping, done.stdout


def test_sleeping_threads_end_with_their_team() -> None:
    libraries = find_libgomp()
    if not libraries:
        pytest.skip("torch has not GCC's OpenMP library here")
    sleeping, tasks = SleepingThreads(libraries), Path("/proc/self/task")
    torch.ones(1 << 17).add_(1)
    before = len(list(tasks.iterdir()))
    for _ in range(2):
        sleeping.start(), sleeping.start()
        while len(list(tasks.iterdir())) < before + 1 + sum(library.omp_get_num_procs() for library in libraries):
            time.sleep(0.001)
        sleeping.stop(), sleeping.stop()
        while len(list(tasks.iterdir())) > before:
            time.sleep(0.001)
