"""A run whose directory is moved, deleted, or taken by a second launch while it trains: it stops, and no file is
written twice.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainee import (
    STEPS,
    launch,
    make_config,
    memory_dir,
    read_output,
    read_run_json,
    saved_steps,
    train,
    wait_for_exit,
)

from runner.engine import loop
from runner.engine.verify_resume import diff_run_dirs

SETTINGS = ("train.save_every=5", "train.eval_every=0", "train.sample_every=0")
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with memory_dir(tmp_path) as folder:
        yield folder


def after_step(step: int, action: Callable[[], object]) -> None:
    """In the child: call `action` once this step is done."""
    step_with_retries = loop.step_with_retries

    def step_then_act(state, *args):
        output = step_with_retries(state, *args)
        if state.progress.step == step:
            action()
        return output

    loop.step_with_retries = step_then_act


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 300
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} does not appear"
        time.sleep(0.01)


def test_moved_run_saves_where_it_was_moved_to_and_continues_there(folder: Path) -> None:
    config, run_dir, moved = make_config(folder, *SETTINGS), folder / "run", folder / "moved"
    assert train(config, folder / "reference") == 0
    assert train(config, run_dir, lambda: after_step(8, lambda: run_dir.rename(moved))) == 1
    output, fields = read_output(run_dir), read_run_json(moved)
    assert (
        not run_dir.exists()
        and "Traceback" not in output
        and f"the run directory was moved to {moved}; resume={moved} continues" in output
    )
    # noticed at the next save, which is done there
    assert (fields["status"], fields["step"], saved_steps(moved)[-1]) == ("failed", 10, 10)
    assert train(config, moved) == 0 and diff_run_dirs(folder / "reference", moved) == []


def test_deleted_run_stops_and_is_not_created_again(folder: Path) -> None:
    config, run_dir = make_config(folder, *SETTINGS), folder / "run"
    assert train(config, run_dir, lambda: after_step(8, lambda: shutil.rmtree(run_dir))) == 1
    output = read_output(run_dir)
    assert not run_dir.exists() and "Traceback" not in output and "the run directory was deleted" in output


def test_second_launch_without_a_lock_file_writes_no_step_twice(folder: Path) -> None:
    """The first launch waits at step 8 until the second one, which has resumed from step 5, has trained a step."""
    config, run_dir = make_config(folder, *SETTINGS), folder / "run"
    assert train(config, folder / "reference") == 0

    def wait_for_second() -> None:
        (folder / "first waits").touch()
        wait_for(folder / "second trains")

    def wait_for_end_of_first() -> None:
        (folder / "second trains").touch()
        wait_for(folder / "first has ended")

    first = launch(config, run_dir, lambda: after_step(8, wait_for_second))
    wait_for(folder / "first waits")
    (run_dir / ".lock").unlink(), (run_dir / ".owner.json").unlink()
    second = launch(config, run_dir, lambda: after_step(6, wait_for_end_of_first))
    assert wait_for_exit(first) == 1
    (folder / "first has ended").touch()
    assert wait_for_exit(second) == 0
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, STEPS + 1)] and diff_run_dirs(folder / "reference", run_dir) == []
    assert "another launch holds it now" in read_output(run_dir) and "Traceback" not in read_output(run_dir)
