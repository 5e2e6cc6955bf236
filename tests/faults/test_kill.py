"""kill -9 at random moments until the run is completed: no torn file, at most one save lost, and a bitwise equal
result.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from fault_counts import faults
from trainee import (
    STEPS,
    SlowDisk,
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

from common import filesystem
from runner.checkpoint.atomic_dir import verify_dir
from runner.engine.verify_resume import diff_run_dirs


def use_slow_disk() -> None:
    filesystem.fs = SlowDisk()


def kill_within(seconds: float, config, run_dir: Path, during_save: bool) -> bool:
    """Launch, and kill after `seconds`, or in the first save after that; return False if the run was completed before."""
    child = launch(config, run_dir, use_slow_disk)
    deadline = time.monotonic() + seconds
    while child.poll() is None:
        if time.monotonic() >= deadline and (is_saving(run_dir) or not during_save):
            break
        time.sleep(0.0005)
    child.send(signal.SIGKILL)
    code = wait_for_exit(child)
    assert code in (0, -signal.SIGKILL), read_output(run_dir)
    return code != 0


def is_saving(run_dir: Path) -> bool:
    return any(".tmp-step-" in path.name or ".del-step-" in path.name for path in (run_dir / "checkpoints").glob(".*"))


def check_after_kill(run_dir: Path, save_every: int, counts: Counter, before: int) -> int:
    """Check what a kill has left; return the newest saved step."""
    saved = saved_steps(run_dir)
    newest, trained = max(saved, default=0), last_logged_step(run_dir)
    counts["in a save"] += is_saving(run_dir)
    counts["without progress"] += newest == before
    counts["most steps lost"] = max(counts["most steps lost"], trained - newest)
    assert newest >= before, "a saved step is missing"
    # A save is on disk before the next one starts: a kill loses at most the save in flight and the steps since.
    assert trained - newest <= 2 * save_every, f"{trained} steps were trained, {newest} are saved"
    assert len(saved) >= min(2, newest // save_every), "fewer than two valid checkpoints"
    check_best(run_dir)
    log = (run_dir / "train.log").read_text().splitlines() if (run_dir / "train.log").exists() else []
    reported = [line for line in log if line.startswith("saved step-")]
    assert not reported or int(reported[-1].split()[1][5:]) <= newest, (
        f"{reported[-1]!r} was reported, {newest} is the newest"
    )
    return newest


def check_best(run_dir: Path) -> None:
    """The best weights are whole, and their step was evaluated: with the lowest loss up to then.

    They are written before the record of the evaluation, so a kill between the two leaves weights of the newest step,
    which a resume evaluates again.
    """
    pointer, metrics = run_dir / "checkpoints" / "best", run_dir / "metrics.jsonl"
    if pointer.exists():
        name = pointer.read_text().strip()
        assert verify_dir(pointer.with_name(name)) is None
        evaluations = {
            record["step"]: record["loss"]
            for record in map(json.loads, metrics.read_text().splitlines())
            if record["kind"] == "eval"
        }
        step = int(name.rpartition("-")[2])
        if step not in evaluations:
            assert step == last_logged_step(run_dir)
            return
        assert evaluations[step] == min(loss for other, loss in evaluations.items() if other <= step)


@pytest.mark.slow(long=True)
def test_random_kills_lose_at_most_one_save_and_change_no_bit(tmp_path: Path) -> None:
    kills = faults(24, full=200)
    rng, counts, runs = random.Random(kills), Counter(), 0
    with memory_dir(tmp_path) as folder:
        for save_every in (1, 2):
            config = make_config(folder, f"train.save_every={save_every}")
            uninterrupted = folder / f"uninterrupted{save_every}"
            started = time.monotonic()
            assert train(config, uninterrupted, use_slow_disk) == 0
            # relative to the speed of this machine, which may change: about three launches per run
            longest = 0.7 * (time.monotonic() - started)
            limit = kills * save_every // 2
            while counts["kills"] < limit:
                runs += 1
                run_dir, newest = folder / f"run{runs}", 0
                # At random times alone, a slow machine would hardly ever be saving: every second kill waits for a save.
                while counts["kills"] < limit and (
                    killed := kill_within(
                        rng.uniform(0, longest), config, run_dir, during_save=counts["kills"] % 2 == 1
                    )
                ):
                    counts["kills"] += 1
                    before, newest = newest, check_after_kill(run_dir, save_every, counts, newest)
                    longest *= 1.05 if newest == before else 1.0
                longest *= 1.0 if killed else 0.8  # the run was completed before its kill
                if killed:
                    assert train(config, run_dir, use_slow_disk) == 0
                assert diff_run_dirs(uninterrupted, run_dir) == []
                result = (
                    read_run_json(run_dir)["status"],
                    saved_steps(run_dir)[-1],
                    last_logged_step(run_dir),
                    temp_files(run_dir),
                )
                assert result == ("completed", STEPS, STEPS, [])
    print(f"{runs} runs, {dict(counts)}")
    assert counts["in a save"] >= 0.05 * counts["kills"], "too few kills during a save"
    assert counts["without progress"] < counts["kills"], "no launch made progress between two kills"
