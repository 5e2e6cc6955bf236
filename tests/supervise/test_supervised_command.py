"""`python runner/train.py train.supervise=true`, killed: it finishes alone, with the bits of a run that was never
killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_fixtures import Program
from warm_programs import ForkedProcess, WarmPrograms

from runner.checkpoint.format import read_state
from runner.checkpoint.manager import newest_checkpoint
from runner.engine.verify_resume import diff_run_dirs

SECONDS = 120.0
SUPERVISED = ("train.supervise=true", "supervise.delay=0.1")
OVERRIDES = [
    "stage=pretrain", "init_from=scratch", "model.hidden_size=32", "model.num_hidden_layers=2", "model.head_dim=8", "model.intermediate_size=64", "model.max_position_embeddings=128",
    "model.dropout=0.1", "data.max_length=64", "data.val_path=null", "data.val_fraction=0.2", "train.batch_size=2", "train.max_steps=24", "train.log_every=1", "train.save_every=3",
    "train.eval_every=10", "train.sample_every=0", "device=cpu",
]  # fmt: skip


def command(checkout: Path, folder: Path, *overrides: str, key: str = "hydra.run.dir") -> list[str]:
    """Return train.py and its arguments."""
    rows = folder.parent / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"text": f"{i} " + "the lake of Oru lies north of the old mill " * (1 + i % 3)}) + "\n"
            for i in range(40)
        )
    )
    train = str(checkout / "runner" / "train.py")
    return [train, *OVERRIDES, f"data.path={rows}", f"{key}={folder}", *overrides]


def child_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def newest_step(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*")), default=0)


def kill_trainer_after(
    supervisor: subprocess.Popen | ForkedProcess, folder: Path, step: int, generations: int = 1
) -> None:
    """Kill the training process once `step` is saved: the child of the supervisor; in a sweep, whose job is the
    supervisor, a grandchild.
    """
    end = time.monotonic() + SECONDS
    trainer: int | None = None
    while newest_step(folder) < step or trainer is None:
        assert time.monotonic() < end and supervisor.poll() is None
        time.sleep(0.005)
        trainer = supervisor.pid
        for _ in range(generations):
            trainer = child_of(trainer) if trainer else None
    os.kill(trainer, signal.SIGKILL)


@pytest.mark.slow
def test_supervised_command_killed_twice_finishes_with_the_same_bits(
    checkout: Path, warm_program: Program, tmp_path: Path
) -> None:
    uninterrupted, folder = tmp_path / "uninterrupted", tmp_path / "run"
    plain = warm_program(*command(checkout, uninterrupted)[1:])
    assert plain.returncode == 0, plain.stderr
    supervisor = subprocess.Popen(
        [sys.executable, *command(checkout, folder, *SUPERVISED)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    kill_trainer_after(supervisor, folder, 3)
    assert "libtorch" not in Path(f"/proc/{supervisor.pid}/maps").read_text()
    kill_trainer_after(supervisor, folder, newest_step(folder) + 3)
    output, _ = supervisor.communicate(timeout=SECONDS)
    assert supervisor.returncode == 0, output
    assert diff_run_dirs(uninterrupted, folder) == ["state.json: compatibility"]
    facts, others = (read_state(newest_checkpoint(run))["compatibility"].items() for run in (uninterrupted, folder))
    assert {fact for fact, value in others if (fact, value) not in facts} == {"train.supervise", "supervise.delay"}
    fields = json.loads((folder / "run.json").read_text())
    assert (fields["status"], fields["attempt"], fields["exact"], len(fields["attempts"])) == ("completed", 3, True, 3)
    incidents = [json.loads(line) for line in (folder / "incidents.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["attempt"]) for one in incidents] == [("killed", 1), ("killed", 2)]
    assert output.count("restart 1 of 3 from step") == 2


@pytest.mark.slow
def test_supervised_job_of_a_sweep_is_restarted_within_its_attempt(
    checkout: Path, warm_checkout: WarmPrograms, tmp_path: Path
) -> None:
    sweep, output = tmp_path / "sweep", tmp_path / "output.txt"
    train, *typed = command(checkout, sweep, *SUPERVISED, "seed=1", "--multirun", key="hydra.sweep.dir")
    process = warm_checkout.start(Path(train), *typed, cwd=tmp_path, out=output)
    while not (jobs := list(sweep.glob("*/run.json"))):
        assert process.poll() is None
        time.sleep(0.01)
    kill_trainer_after(process, jobs[0].parent, 3, generations=3)
    assert process.wait(SECONDS) == 0, output.read_text()
    (job,) = json.loads((sweep / "sweep.json").read_text())["jobs"]
    assert (job["status"], job["attempt"], json.loads(jobs[0].read_text())["attempt"]) == ("completed", 1, 2)
    assert [json.loads(line)["kind"] for line in (jobs[0].parent / "incidents.jsonl").read_text().splitlines()] == [
        "killed"
    ]
