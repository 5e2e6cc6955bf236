"""The real command, killed with -9 and resumed until it is completed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_counts import faults
from warm_programs import ForkedProcess, WarmPrograms

from runner.checkpoint.atomic_dir import newest_valid
from runner.engine.verify_resume import diff_run_dirs

# of real commands, each with its imports; KILLS=25 gives the counts of docs/reliability.md
KILLS = int(os.environ.get("KILLS", "2"))
TIMEOUT = 300  # seconds
OVERRIDES = [
    "stage=pretrain", "init_from=scratch", "model.hidden_size=32", "model.num_hidden_layers=2", "model.head_dim=8", "model.intermediate_size=64", "model.max_position_embeddings=128",
    "model.dropout=0.1", "data.max_length=64", "data.num_workers=2", "data.val_path=null", "data.val_fraction=0.2", "train.batch_size=2", f"train.max_steps={faults(60, full=150)}", "train.log_every=1",
    "train.save_every=3", "train.eval_every=10", "train.sample_every=0", "device=cpu",
]  # fmt: skip
Launch = Callable[..., subprocess.Popen | ForkedProcess]


@pytest.fixture(autouse=True)
def rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"text": f"{i} " + "the lake of Oru lies north of the old mill " * (1 + i % 3)}) + "\n"
            for i in range(40)
        )
    )


@pytest.fixture
def launch(checkout: Path, tmp_path: Path) -> Launch:
    def launch(*overrides: str) -> subprocess.Popen:
        with open(tmp_path / "output.txt", "w") as output:
            return subprocess.Popen(
                [sys.executable, str(checkout / "runner" / "train.py"), *overrides],
                cwd=tmp_path,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    return launch


def start_overrides(run_dir: Path) -> list[str]:
    return [*OVERRIDES, f"data.path={run_dir.parent / 'rows.jsonl'}", f"hydra.run.dir={run_dir}"]


def next_overrides(run_dir: Path) -> list[str]:
    """Return `resume=`, or the overrides of the start if the run was killed before there was anything to resume."""
    return [f"resume={run_dir}"] if (run_dir / "run.json").exists() else start_overrides(run_dir)


def newest_step(run_dir: Path) -> int:
    newest, skipped = newest_valid(run_dir / "checkpoints")
    assert skipped == []
    return int(newest.name[5:]) if newest else 0


def measure_run(launch: Launch, run_dir: Path) -> tuple[float, float]:
    """Return the seconds to the first step and to the end of an uninterrupted run."""
    started = time.monotonic()
    child = launch(*start_overrides(run_dir))
    while not (run_dir / "metrics.jsonl").exists() and child.poll() is None:
        time.sleep(0.01)
    first = time.monotonic() - started
    assert child.wait(TIMEOUT) == 0, (run_dir.parent / "output.txt").read_text()
    return first, time.monotonic() - started


def logged_bytes(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def newest_name(run_dir: Path) -> str:
    """Return the name of the newest checkpoint: names grow with the step."""
    return max((path.name for path in (run_dir / "checkpoints").glob("step-*")), default="")


def kill_before_a_step(child: subprocess.Popen, run_dir: Path, seconds: float) -> int:
    """Kill after `seconds`, during imports, composition, creation of the run directory and the model, or at the first
    logged step; return the exit code.
    """
    logged = logged_bytes(run_dir)
    wait_for(child, lambda: logged_bytes(run_dir) > logged, seconds)
    child.kill()
    return child.wait()


def kill_after_a_save(child: subprocess.Popen, run_dir: Path, seconds: float) -> int:
    """Kill `seconds` after the first checkpoint of this launch; return the exit code."""
    saved = newest_name(run_dir)
    wait_for(child, lambda: newest_name(run_dir) > saved, TIMEOUT)
    wait_for(child, lambda: False, seconds)
    child.kill()
    return child.wait()


def wait_for(child: subprocess.Popen, condition: Callable[[], object], seconds: float) -> None:
    """Return when the condition holds, the child has ended, or the seconds are over."""
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline and not condition():
        time.sleep(0.005)


@pytest.mark.slow(long=True)
def test_kills_of_the_command_change_no_bit_of_the_result(launch: Launch, tmp_path: Path) -> None:
    uninterrupted, rng, counts = tmp_path / "uninterrupted", random.Random(25), Counter()
    first, end = measure_run(launch, uninterrupted)
    while counts["kills"] < KILLS:
        counts["runs"] += 1
        run_dir, before, code = tmp_path / f"run{counts['runs']}", 0, -9
        while code != 0:
            child = launch(*next_overrides(run_dir))
            counts["launches"] += 1
            if counts["kills"] == KILLS:
                code = child.wait(TIMEOUT)
            elif counts["kills"] % 2 == 0:
                code = kill_before_a_step(child, run_dir, rng.uniform(0.3 * first, first))
            else:
                code = kill_after_a_save(child, run_dir, rng.uniform(0, 0.3 * (end - first)))
            counts["kills"] += code != 0
            assert code in (0, -9), (tmp_path / "output.txt").read_text()
            newest = newest_step(run_dir)
            assert newest >= before
            counts["before the first checkpoint"] += code != 0 and newest == 0
            before = newest
        assert diff_run_dirs(uninterrupted, run_dir) == []
        assert json.loads((run_dir / "run.json").read_text())["status"] == "completed"
    print(dict(counts))
    assert counts["before the first checkpoint"] and counts["before the first checkpoint"] < counts["kills"]


@pytest.mark.slow
def test_kill_before_the_first_checkpoint_restarts_from_the_seed(
    checkout: Path, warm_checkout: WarmPrograms, tmp_path: Path
) -> None:
    train, output = checkout / "runner" / "train.py", tmp_path / "output.txt"

    def launch(*overrides: str) -> ForkedProcess:
        return warm_checkout.start(train, *overrides, cwd=tmp_path, out=output)

    uninterrupted, run_dir = tmp_path / "uninterrupted", tmp_path / "run"
    unsaved = ["train.save_every=0", "train.max_steps=30"]
    assert launch(*start_overrides(uninterrupted), *unsaved).wait(TIMEOUT) == 0
    child = launch(*start_overrides(run_dir), *unsaved)
    wait_for(child, lambda: logged_bytes(run_dir), TIMEOUT)
    child.kill()
    assert child.wait() == -9
    assert newest_step(run_dir) == 0
    assert launch(f"resume={run_dir}").wait(TIMEOUT) == 0, (tmp_path / "output.txt").read_text()
    assert diff_run_dirs(uninterrupted, run_dir) == []
