"""A kill at any change of the file system during the start of a sweep: `resume=` continues it, or the same command
starts it; no job is lost.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from fake_jobs import FakeJobs, read_sweep
from killed_calls import KILLED, KilledCalls
from warm_programs import WarmPrograms

from runner.launch.resume import plan_resume

EVERY = int(os.environ.get("KILL_EVERY", "60"))  # KILL_EVERY=1: at every change


@pytest.mark.slow
def test_job_directory_without_run_json_that_has_checkpoints_is_resumed(
    resume: Callable[..., int], finished: Path
) -> None:
    job = finished / "train.accumulation_steps=1"
    (job / "run.json").unlink()
    (job / "checkpoints" / "step-00000060").mkdir(parents=True)
    before = (job / ".hydra" / "config.yaml").read_bytes()
    assert resume() == 0
    assert (job / ".hydra" / "config.yaml").read_bytes() == before and read_sweep(finished)["status"] == "completed"


@pytest.mark.slow
def test_foreign_files_in_a_sweep_change_nothing(resume: Callable[..., int], finished: Path) -> None:
    for name in (".DS_Store", ".nfs0001", "Thumbs.db", "sweep.json~", "._sweep.json"):
        (finished / name).write_bytes(b"\0")
    (finished / "@eaDir").mkdir()
    assert resume() == 0 and len(read_sweep(finished)["jobs"]) == 2


@pytest.mark.slow
def test_kill_at_any_change_of_a_sweep_needs_no_hand(fake_jobs: FakeJobs, warm: WarmPrograms, tmp_path: Path) -> None:
    sweep, calls = tmp_path / "sweeps" / "sweep", KilledCalls(warm, tmp_path)
    start, resume = (
        partial(calls.run, action, fake_jobs.script, sweep, root=sweep.parent)
        for action in ("start_sweep", "resume_sweep")
    )
    code, changes, output = start()
    assert code == 0 and changes > 60, output
    for index in range(0, changes, EVERY):
        shutil.rmtree(sweep.parent)
        if start(kill_at=index, after_creation=index % 2 == 1)[0] == KILLED:
            code, _, output = (resume if (sweep / "sweep.json").exists() else start)()
            assert code == 0, f"killed at change {index}: {output}"
            check_complete(sweep)


def check_complete(sweep: Path) -> None:
    state = read_sweep(sweep)
    assert state["status"] == "completed" and [job["status"] for job in state["jobs"]] == ["completed"] * 2
    for job in state["jobs"]:
        assert plan_resume(sweep / job["name"], []).config.seed == int(job["overrides"]["seed"])
        assert yaml.safe_load((sweep / job["name"] / ".hydra" / "overrides.yaml").read_text())
