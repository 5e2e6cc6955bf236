"""Ranks and their parent killed at random moments with SIGKILL and SIGTERM: no torn file, no orphan, and a bitwise
equal result.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_counts import faults
from trainee import (
    last_logged_step,
    launch,
    make_config,
    memory_dir,
    read_output,
    read_run_json,
    saved_steps,
    temp_files,
    train,
    wait_for_exit,
)

from runner.engine.device.distributed import RENDEZVOUS_DONE
from runner.engine.verify_resume import diff_run_dirs
from runner.launch import local_ranks, subprocesses, worker
from runner.run_dir.lock import is_locked
from runner.run_dir.metadata import RunMetadata

EXIT_CODES = {  # (victim, signal) -> code of the parent
    ("parent", signal.SIGKILL): -9, ("rank", signal.SIGKILL): 1, ("parent", signal.SIGTERM): 75, ("rank", signal.SIGTERM): 75,
}  # fmt: skip
TIMEOUT = 500  # seconds


def join_threads() -> None:
    """Wait for the checkpoint writer and flush the output, as at the end of any program."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()


class ForkedRank:
    """A rank that is forked instead of started as a new program; has the methods of Popen that the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(status[1])
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_ranks() -> None:
    """In the parent of the ranks: fork them, so that torch is imported already and they start in milliseconds."""

    def spawn(program: list[str], environment: dict[str, str], out: int | None) -> ForkedRank:
        parent = os.getpid()
        if child := os.fork():
            return ForkedRank(child)
        code = 1
        try:
            os.setpgid(0, 0)
            subprocesses.die_with_parent(parent)()
            RENDEZVOUS_DONE.clear()  # a program that is started has it so; here a test of this process may have set it
            os.environ.update(environment)
            if out is not None:
                os.dup2(out, 1), os.dup2(out, 2)
            code = worker.main(Path(program[1]), int(program[2]))
            join_threads()
        finally:
            os._exit(code)

    subprocesses.spawn = spawn
    local_ranks.FAILURE_GRACE = 5.0  # seconds that a rank waits for one that was stopped before they met


def rank_pids(run_dir: Path) -> list[int]:
    try:
        return [rank["pid"] for rank in json.loads((run_dir / ".owner.json").read_text()).get("ranks", [])]
    except (OSError, ValueError):
        return []


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def kill_somewhere(config, run_dir: Path, rng: random.Random, startup: float, counts: Counter) -> bool:
    """Launch, and signal the parent or a rank some steps later, or every fourth time at startup; return False if the
    run was completed before.
    """
    kind, number = list(EXIT_CODES)[counts["kills"] % 4]
    target, early = last_logged_step(run_dir) + rng.randint(1, 6), counts["kills"] // 4 % 4 == 3
    child = launch(config, run_dir, fork_ranks)
    if early:
        time.sleep(rng.uniform(0, startup))
    else:
        while last_logged_step(run_dir) < target and child.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
    ranks = rank_pids(run_dir)
    kind, victim = ("rank", rng.choice(ranks)) if ranks and kind == "rank" else ("parent", child.pid)
    completed = child.poll() is not None or not is_running(victim)
    if not completed:
        os.kill(victim, number)
    code = wait_for_exit(child)
    assert code in {0} | (set() if completed else {EXIT_CODES[kind, number]} | ({-15} if early else set())), (
        kind,
        number,
        code,
        read_output(run_dir),
    )
    wait_until(
        lambda: not is_locked(run_dir) and not any(map(is_running, ranks)),
        f"still running after the end of their launcher: ranks {ranks}",
    )
    if not completed:
        counts["kills"] += 1
        counts[f"{kind} {number.name}"] += 1
        counts["at startup"] += early
    return not completed


def die_before_the_second_rank() -> None:
    """In the parent of the ranks: fork rank 0, and be killed when it waits for rank 1."""
    fork_ranks()
    spawn = subprocesses.spawn

    def spawn_or_die(program: list[str], environment: dict[str, str], out: int | None) -> ForkedRank:
        if environment["RANK"] == "1":
            wait_until(
                lambda: list(Path(program[1]).parent.glob(".tmp-*rendezvous*")), "rank 0 is not waiting for the other"
            )
            os.kill(os.getpid(), signal.SIGKILL)
        return spawn(program, environment, out)

    subprocesses.spawn = spawn_or_die


def wait_until(condition: Callable[[], object], message: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.01)


@pytest.mark.slow
def test_rank_exits_if_its_launcher_dies_before_it_has_started_the_other(tmp_path: Path) -> None:
    config, run_dir = make_config(tmp_path, "distributed=ddp", "distributed.nproc=2"), tmp_path / "run"
    assert train(config, run_dir, die_before_the_second_rank) == -signal.SIGKILL
    wait_until(lambda: not is_locked(run_dir), "rank 0 still waits for rank 1")
    assert train(config, run_dir, fork_ranks) == 0, read_output(run_dir)


@pytest.mark.slow(long=True)
def test_random_kills_of_ranks_and_parent_change_no_bit(tmp_path: Path) -> None:
    kills = faults(6, full=50)
    rng, counts, runs = random.Random(50), Counter(), 0
    with memory_dir(tmp_path) as folder:
        config = make_config(folder, "distributed=ddp", "distributed.nproc=2", "train.epochs=4")
        uninterrupted = folder / "uninterrupted"
        started = time.monotonic()
        assert train(config, uninterrupted, fork_ranks) == 0, read_output(uninterrupted)
        startup, total = 0.5 * (time.monotonic() - started), max(saved_steps(uninterrupted))
        while counts["kills"] < kills:
            runs += 1
            run_dir, newest = folder / f"run{runs}", 0
            while (
                kill_somewhere(config, run_dir, rng, startup, counts) or read_run_json(run_dir)["status"] != "completed"
            ):
                saved = max(saved_steps(run_dir), default=0)
                counts["without progress"] += saved == newest
                assert saved >= newest, "a saved step is missing"
                newest = saved
            RunMetadata.open(run_dir, resume=True).close()  # removes the temporary files of a killed parent
            assert diff_run_dirs(uninterrupted, run_dir) == []
            assert (saved_steps(run_dir)[-1], last_logged_step(run_dir), temp_files(run_dir)) == (total, total, [])
    print(f"{runs} runs, {dict(counts)}, {total} steps")
    assert {f"{kind} {number.name}" for kind, number in EXIT_CODES} <= counts.keys()
    assert counts["without progress"] < counts["kills"], "no launch made progress between two kills"
