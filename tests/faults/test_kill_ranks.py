"""Ranks and their parent killed at random moments, -9 and -15, until the run is through: nothing torn, no orphan, and no bit differs."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from trainee import code_of, config, launch, litter, record_of, room, steps_of, train, trained, wind_up

from runner.engine.verify_resume import diff_run_dirs
from runner.launch import subprocesses, worker
from runner.run_dir.lock import is_locked
from runner.run_dir.metadata import RunMetadata

CODES = {("parent", 9): {-9}, ("parent", 15): {75}, ("rank", 9): {1}, ("rank", 15): {75}}


class Forked:
    """A rank that was forked, where the program starts one anew: what of Popen is asked of it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, flags))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def forking() -> None:
    """In the parent of the ranks: they find torch imported, and start in milliseconds."""

    def begin(program: list[str], environment: dict[str, str], out: int | None) -> Forked:
        parent = os.getpid()
        if child := os.fork():
            return Forked(child)
        code = 1
        try:
            os.setpgid(0, 0)
            subprocesses.die_with_parent(parent)()
            os.environ.update(environment)
            if out is not None:
                os.dup2(out, 1), os.dup2(out, 2)
            code = worker.main(Path(program[1]), int(program[2]))
            wind_up()
        finally:
            os._exit(code)

    subprocesses.spawn = begin


def ranks_of(folder: Path) -> list[int]:
    try:
        return [each["pid"] for each in json.loads((folder / ".owner.json").read_text()).get("ranks", [])]
    except (OSError, ValueError):
        return []


def has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def killed_somewhere(cfg, folder: Path, chance: random.Random, startup: float, seen: Counter) -> bool:
    """Launch, and signal the parent or a rank, while they start or some steps later; False if the run was through by then."""
    number, target = chance.choice([signal.SIGKILL, signal.SIGTERM]), trained(folder) + chance.randint(1, 6)
    early = chance.random() < 0.25
    child = launch(cfg, folder, forking)
    if early:
        time.sleep(chance.uniform(0, startup))
    else:
        while trained(folder) < target and not has_ended(child):
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.03))
    ranks = ranks_of(folder)
    who, victim = ("rank", chance.choice(ranks)) if ranks and chance.random() < 0.5 else ("parent", child)
    through = has_ended(child) or not lives(victim)
    if not through:
        os.kill(victim, number)
    code = code_of(child)
    said = (folder.parent / "said").read_text()[-3000:]
    assert code in {0} | (set() if through else CODES[who, number] | ({-15} if early else set())), (who, number, code, said)
    end = time.monotonic() + 60
    while is_locked(folder) or any(map(lives, ranks)):
        assert time.monotonic() < end, f"left over: {[pid for pid in ranks if lives(pid)]}"
        time.sleep(0.01)
    if not through:
        seen["kills"] += 1
        seen[f"{who} {number.name}"] += 1
        seen["at start-up"] += early
    return not through


@pytest.mark.parametrize("kills, epochs", [(3, 1), pytest.param(50, 4, marks=pytest.mark.slow)])
def test_random_kills_of_ranks_and_their_parent_cost_no_bit(kills, epochs, tmp_path):
    chance, seen, runs = random.Random(kills), Counter(), 0
    with room(tmp_path) as place:
        cfg = config(place, "distributed=ddp", "distributed.nproc=2", f"train.epochs={epochs}")
        whole = place / "whole"
        began = time.monotonic()
        assert train(cfg, whole, forking) == 0, (place / "said").read_text()[-3000:]
        startup, total = 0.5 * (time.monotonic() - began), max(steps_of(whole))
        while seen["kills"] < kills:
            runs += 1
            folder, newest = place / f"run{runs}", 0
            while killed_somewhere(cfg, folder, chance, startup, seen) or record_of(folder)["status"] != "completed":
                saved = max(steps_of(folder), default=0)
                seen["without progress"] += saved == newest
                assert saved >= newest, "a step that was on the disk is gone"
                newest = saved
            RunMetadata.open(folder, resume=True).close()  # what a parent that was killed has left is swept up by whoever comes next
            assert diff_run_dirs(whole, folder) == []
            assert (steps_of(folder)[-1], trained(folder), litter(folder)) == (total, total, [])
    print(f"{runs} runs, {dict(seen)}, {total} steps")
    assert seen["without progress"] < seen["kills"]
