"""`resume=SWEEP train.max_steps=...`: which jobs that have begun take a new override, and which overrides are refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import GOOD, FakeJobs, read_run, read_sweep

from common.errors import UserError
from runner.checkpoint.atomic_dir import write_atomic_dir
from runner.checkpoint.format import CHECKPOINT_FORMAT
from runner.launch import resume as resume_module
from runner.reporting.read_sweep import read_sweep_results

NAMES = ("train.accumulation_steps=1", "train.accumulation_steps=4")


def applied(sweep: Path) -> list[list[str]]:
    return [job["applied_overrides"] for job in read_sweep(sweep)["jobs"]]


def resume_alone(run_dir: Path, overrides: list[str], **fields: Any) -> None:
    """Resume a job by itself, outside of its sweep."""
    with resume_module.persisting_overrides(resume_module.plan_resume(run_dir, overrides)):
        (run_dir / "run.json").write_text(json.dumps({**read_run(run_dir), **fields}))


@pytest.mark.slow
def test_extend_gives_each_job_its_share_until_the_job_has_trained(
    finished: Path, resume: Any, fake_jobs: FakeJobs
) -> None:
    fake_jobs.set(default="sys.exit(1)")
    assert resume("train.max_steps=80") == 1
    assert [job["pending_overrides"] for job in read_sweep(finished)["jobs"]] == [
        ["train.max_steps=80"],
        ["train.max_steps=20"],
    ]
    fake_jobs.set(default=GOOD)
    assert resume("train.log_every=5") == 0
    assert [read_run(finished / name)["overrides"] for name in NAMES] == [
        ["train.max_steps=80", "train.log_every=5"],
        ["train.max_steps=20", "train.log_every=1"],
    ]
    assert [(job["attempt"], job["pending_overrides"]) for job in read_sweep(finished)["jobs"]] == [(3, []), (3, [])]
    assert "train.max_steps=80" in read_sweep(finished)["overrides"]


REFUSED = {
    "train.max_steps=80 model.hidden_size=64": "model.hidden_size",
    "train.max_steps=60 optimizer.weight_decay=0.2": "weight_decay",  # names a length, but trains no further
    "train.max_steps=40": "has already taken 60 steps",
    "train.patience=3": "train.patience",  # jobs with and without it were ranked as one point
}


@pytest.mark.slow
def test_extend_refuses_what_a_job_that_has_begun_cannot_take(finished: Path, resume: Any) -> None:
    before = (finished / "sweep.json").read_bytes()
    for typed, message in REFUSED.items():
        with pytest.raises(UserError) as error:
            resume(*typed.split())
        assert message in f"{error.value.message} {error.value.setting}"
        assert (finished / "sweep.json").read_bytes() == before


@pytest.mark.slow
def test_extend_leaves_completed_jobs_as_they_are_with_a_later_end(finished: Path, resume: Any) -> None:
    """Before: train.patience=0 was refused where one of the jobs had trained to its last step."""
    for name in NAMES:
        resume_alone(finished / name, [*read_run(finished / name)["overrides"], "train.patience=2"])
    for typed in ("train.patience=0", "train.patience=3"):
        assert resume(typed) == 0
        assert applied(finished) == [[], []]


@pytest.mark.slow
def test_extend_leaves_a_job_that_patience_has_stopped(
    finished: Path, resume: Any, capsys: pytest.CaptureFixture
) -> None:
    resume_alone(finished / NAMES[0], ["train.patience=2"])
    state = {"format": CHECKPOINT_FORMAT, "progress": {"step": 60, "evals_since_best": 2}}
    write_atomic_dir(
        finished / NAMES[0] / "checkpoints", "step-00000060", {"state.json": [json.dumps(state).encode()]}, {}
    )
    assert resume("train.max_steps=80") == 0
    assert applied(finished) == [[], ["train.max_steps=20"]]
    assert "was stopped by train.patience at step 60" in capsys.readouterr().err


@pytest.mark.slow
def test_extend_leaves_a_longer_job_that_was_resumed_by_itself(
    finished: Path, resume: Any, fake_jobs: FakeJobs, capsys: pytest.CaptureFixture
) -> None:
    resume_alone(finished / NAMES[0], ["train.max_steps=90"], step=90)
    assert resume("train.max_steps=80") == 0
    assert applied(finished) == [[], ["train.max_steps=20"]]
    assert "was resumed by itself up to step 90" in capsys.readouterr().err
    resume_alone(finished / NAMES[1], read_run(finished / NAMES[1])["overrides"])
    manual = {job.name: job.manual_overrides for job in read_sweep_results(finished).jobs}
    assert manual == {NAMES[0]: ["train.max_steps=90"], NAMES[1]: []}


@pytest.mark.slow
def test_extend_says_that_completed_jobs_keep_their_labels(
    finished: Path, resume: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume("run.note='later today'") == 0
    printed = capsys.readouterr().err
    assert "2 completed jobs keep their labels" in printed
    assert "run.note='later today'" in shlex.split(printed.partition("labels; ")[2])
