"""Supervision without processes: what a failure is called, which one is worth a restart, when a rank counts as hanging."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import TrainingError
from runner.config.compose import compose_config
from runner.engine.device import heartbeat
from runner.engine.loop import train
from runner.launch import supervisor
from runner.launch import supervisor as supervisor_module
from runner.launch.failures import MAX_DELAY, Failure, FailureKind, RestartPolicy, classify_failure, count_oom_kills
from runner.launch.supervisor import Liveness, Supervisor


@pytest.mark.parametrize(
    ("code", "error", "outcome", "hangs", "oom_kills", "kind"),
    [
        (-9, "killed by SIGKILL", None, False, 0, "killed"),
        (-9, "killed by SIGKILL", None, False, 1, "out_of_memory"),
        (-11, "killed by SIGSEGV", None, False, 0, "crash"),
        (-7, "killed by SIGBUS", None, False, 1, "crash"),
        (-6, "killed by SIGABRT", None, True, 0, "hang"),
        (-9, "killed by SIGKILL", None, True, 1, "hang"),
        (-15, "killed by SIGTERM", None, False, 0, "stopped"),
        (143, "exit code 143", None, False, 0, "stopped"),
        (1, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "failed", False, 0, "out_of_memory"),
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory", "failed", False, 0, "out_of_memory"),
        (1, "RuntimeError: CUDA error: an illegal memory access was encountered", "failed", False, 0, "device"),
        (1, "data worker 1 was killed by SIGKILL", "failed", False, 0, "data_worker"),
        (1, "another rank does not answer (closed by peer)", "failed", False, 0, "peer"),
        (1, "KeyError: 'lost'", "failed", False, 0, "error"),
        (1, "3 steps in a row were not finite", "diverged", False, 0, "diverged"),
    ],
)
def test_failure_kind_of_every_end(
    code: int, error: str, outcome: str | None, hangs: bool, oom_kills: int, kind: str
) -> None:
    assert classify_failure(code, error, outcome, hangs, oom_kills) == kind


@pytest.mark.parametrize("kind", list(FailureKind))
def test_policy_restarts_every_kind_but_diverged_and_stopped(kind: FailureKind) -> None:
    assert RestartPolicy(1).decide(kind, 0).restarts is (kind not in (FailureKind.DIVERGED, FailureKind.STOPPED))


def test_policy_gives_up_at_one_step_and_starts_again_with_progress() -> None:
    policy = RestartPolicy(2, first_delay=5)
    decisions = [policy.decide(FailureKind.CRASH, step) for step in (0, 0, 10, 10, 10, 10)]
    assert [decision.restarts for decision in decisions] == [True, True, True, True, False, False]
    assert [decision.delay for decision in decisions[:4]] == [5, 10, 5, 10]
    assert decisions[3].action == "restart 2 of 2 from step 10 in 10 s"
    assert decisions[4].action == "no restart: 2 restarts without a newer checkpoint than step 10"


def test_policy_delay_is_bounded() -> None:
    policy = RestartPolicy(100, first_delay=5)
    assert [policy.decide(FailureKind.KILLED, 7).delay for _ in range(100)][-1] == MAX_DELAY


def test_policy_of_ranks_without_supervision_counts_all_restarts() -> None:
    policy = RestartPolicy(1, counts_all=True)
    assert [policy.decide(FailureKind.ERROR, step).restarts for step in (10, 20)] == [True, False]


def test_oom_kills_are_read_from_the_first_counter_there_is(tmp_path: Path) -> None:
    (events := tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    (broken := tmp_path / "vmstat").write_text("nr_free_pages many\n")
    assert count_oom_kills([tmp_path / "missing", broken, events]) == 2
    assert count_oom_kills([broken]) == 0


class FakeClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(supervisor.time, "monotonic", lambda: self.now)


def beat_in(watched: Liveness, rank: int) -> heartbeat.Heartbeat:
    return heartbeat_to(Path(watched.environment(rank)[heartbeat.HEARTBEAT_ENV]))


def heartbeat_to(file: Path) -> heartbeat.Heartbeat:
    counter = heartbeat.Heartbeat()
    counter.write_to(file)
    return counter


def test_rank_without_a_sign_of_life_is_hanging_the_slowest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    watched = Liveness(2, hang_seconds=60)
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        beats = [beat_in(watched, rank) for rank in range(2)]
        for _ in range(10):
            clock.now += 20
            beats[0].beat(), beats[1].beat()
            assert watched.hanging_rank(processes) is None
        beats[0].beat()
        found = []
        for _ in range(6):
            clock.now += 20
            found.append(watched.hanging_rank(processes))
        assert found == [None, None, None, 1, 1, 1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        watched.close()


@pytest.mark.parametrize(("step", "found"), [(0, [None] * 6 + [0]), (7, [None] * 4 + [0] * 3)])
def test_rank_that_computes_is_alive_until_its_first_step_is_done(
    monkeypatch: pytest.MonkeyPatch, step: int, found: list[int | None]
) -> None:
    """Tokenizing and compiling take long and give no sign; a device that hangs may be waited for with a busy core."""
    clock = FakeClock(monkeypatch)
    watched, used = Liveness(1, hang_seconds=60), iter([1.0, 10.0, 30.0, 30.1, 30.2, 30.3, 30.4])
    monkeypatch.setattr(supervisor, "_cpu_seconds", lambda group: next(used))
    process = subprocess.Popen(["sleep", "60"])
    try:
        signs = beat_in(watched, 0)
        signs.enter("in a training step", step)
        signs.beat()
        results = []
        for _ in range(7):
            clock.now += 20
            results.append(watched.hanging_rank([process]))
        assert results == found
    finally:
        process.kill()
        process.wait()
        watched.close()


def test_supervisor_that_was_stopped_blames_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """E.g. by Ctrl-Z, or by a cluster that suspends a job: the ranks were stopped with it."""
    clock = FakeClock(monkeypatch)
    watched = Liveness(1, hang_seconds=60)
    process = subprocess.Popen(["sleep", "60"])
    try:
        clock.now += 3600
        assert watched.hanging_rank([process]) is None
    finally:
        process.kill()
        process.wait()
        watched.close()


def test_hangs_are_not_looked_for_with_a_timeout_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    watched = Liveness(1, hang_seconds=0)
    clock.now += 1e9
    assert watched.hanging_rank([]) is None
    watched.close()


def test_stacks_of_a_crashed_process_are_read() -> None:
    watched = Liveness(1, hang_seconds=0)
    code = "import os; from runner.launch.supervisor import write_stacks_at_a_crash as w; w()\ndef lost(): os.abort()\nlost()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **watched.environment(0)},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    stacks = watched.stacks(0)
    assert (
        done.returncode == -6
        and any("in lost" in line for line in stacks)
        and stacks[0] == "Fatal Python error: Aborted"
    )
    folder = Path(watched.environment(0)[heartbeat.HEARTBEAT_ENV]).parent
    watched.close()
    assert not folder.exists() and watched.stacks(0) == []


def test_heartbeat_costs_no_system_call(tmp_path: Path) -> None:
    (tmp_path / "beat").write_bytes(bytes(heartbeat.RECORD.size))
    counter = heartbeat_to(tmp_path / "beat")
    for _ in range(1000):
        counter.beat()
    assert heartbeat.read_sign(tmp_path / "beat").beats == 1000 and heartbeat.read_sign(tmp_path / "none").beats == 0


@pytest.mark.slow
def test_training_counts_every_micro_batch_and_every_evaluation_batch(
    make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "beat").write_bytes(bytes(heartbeat.RECORD.size))
    monkeypatch.setenv(heartbeat.HEARTBEAT_ENV, str(file))
    heartbeat.start_heartbeat()
    evaluated = ["data.val_fraction=0.3", "train.eval_every=1"]  # 11 rows: 6 batches, 3 times
    train(make_run("pretrain", "train.max_steps=3", "train.accumulation_steps=2", "train.batch_size=2", *evaluated))
    assert heartbeat.read_sign(file).beats == 3 * 2 + 3 * 6


def test_heartbeat_is_started_by_its_variable_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "beat").write_bytes(bytes(heartbeat.RECORD.size))
    heartbeat.start_heartbeat()
    heartbeat.beat()
    monkeypatch.setenv(heartbeat.HEARTBEAT_ENV, str(file))
    heartbeat.start_heartbeat()
    heartbeat.beat()
    assert heartbeat.read_sign(file).beats == 1


@pytest.mark.slow
def test_supervision_imports_no_torch() -> None:
    code = "import sys, runner.launch.local_ranks, runner.launch.supervisor; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


def test_kill_is_a_lack_of_memory_if_the_kernel_has_killed_in_the_meantime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter((7, 7, 8))  # at the start, and at each failure
    monkeypatch.setattr(supervisor_module, "count_oom_kills", lambda: next(kills))
    metadata: Any = SimpleNamespace(fields={}, folder=tmp_path)
    supervisor = Supervisor(compose_config(["train.supervise=true"]), metadata)
    failure = Failure(-signal.SIGKILL, 0, TrainingError("killed"), is_hanging=False, stacks=[])
    kinds = [supervisor.kind_of(failure) for _ in range(2)]
    assert kinds == [FailureKind.KILLED, FailureKind.OUT_OF_MEMORY]
