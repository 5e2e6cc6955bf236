"""kill -9 at random moments, again and again, until the run is through: nothing torn, one save lost at most, and no bit differs."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from trainee import STEPS, SlowDisk, code_of, config, launch, litter, record_of, room, steps_of, train, trained

from common import filesystem
from runner.engine.verify_resume import diff_run_dirs


def slowly() -> None:
    filesystem.fs = SlowDisk()


def kill_within(seconds: float, cfg, folder: Path, in_a_save: bool) -> bool:
    """Launch, and kill after that time, or in the first save that is being written after it; False if the run was through by then."""
    child = launch(cfg, folder, slowly)
    time.sleep(seconds)
    while in_a_save and not saving(folder) and os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    ended = code_of(child)
    assert ended in (0, -signal.SIGKILL), (folder.parent / "said").read_text()[-2000:]
    return ended != 0


def saving(folder: Path) -> bool:
    return any(".tmp-step-" in path.name or ".del-step-" in path.name for path in (folder / "checkpoints").glob(".*"))


def look_at(folder: Path, every: int, seen: Counter, before: int) -> int:
    """What a kill left behind; returns the newest saved step."""
    saved = steps_of(folder)
    newest, done = max(saved, default=0), trained(folder)
    seen["in a save"] += saving(folder)
    seen["without progress"] += newest == before
    seen["most steps lost"] = max(seen["most steps lost"], done - newest)
    assert newest >= before, "a step that was on the disk is gone"
    # The save before is on the disk when the next one begins: what a kill costs is that one, if it is being written, and the steps since.
    assert done - newest <= 2 * every, f"{done} steps were done, {newest} are left"
    assert len(saved) >= min(2, newest // every), "two good ones were to stay"
    said = [line for line in (folder / "train.log").read_text().splitlines() if line.startswith("saved step-")] if (folder / "train.log").exists() else []
    assert not said or int(said[-1].split()[1][5:]) <= newest, f"{said[-1]!r} was said, {newest} is left"
    return newest


@pytest.mark.parametrize("kills", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_random_kills_cost_one_save_at_most_and_no_bit(kills, tmp_path):
    chance, seen, runs = random.Random(kills), Counter(), 0
    with room(tmp_path) as place:
        for every in (1, 2):
            cfg = config(place, f"train.save_every={every}")
            whole = place / f"whole{every}"
            began = time.monotonic()
            assert train(cfg, whole, slowly) == 0
            window = 0.7 * (time.monotonic() - began)  # tied to this machine in this hour: about three launches a run
            while seen["kills"] < kills * every // 2:
                runs += 1
                folder, newest = place / f"run{runs}", 0
                # Left to chance alone, a slow machine hardly ever met a save: every second kill waits for one.
                while kill_within(chance.uniform(0, window), cfg, folder, in_a_save=seen["kills"] % 2 == 1):
                    seen["kills"] += 1
                    newest = look_at(folder, every, seen, newest)
                assert diff_run_dirs(whole, folder) == []
                assert (record_of(folder)["status"], steps_of(folder)[-1], trained(folder), litter(folder)) == ("completed", STEPS, STEPS, [])
    print(f"{runs} runs, {dict(seen)}")
    assert seen["in a save"] >= 0.05 * seen["kills"], "the kills missed the saves: they prove less than they say"
    assert seen["without progress"] < seen["kills"], "no launch got anywhere between two kills"
