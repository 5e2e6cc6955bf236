"""A kill at any change of the file system during the start of a run, a resume or a sweep: `resume=` continues it, or the same command starts it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_fixtures import TINY_RUN
from killed_calls import KILLED, run_in_fork

from runner.engine.verify_resume import diff_run_dirs

EVERY = int(os.environ.get("KILL_EVERY", "24"))  # KILL_EVERY=1: at every change; each takes about a second


@pytest.fixture
def command(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], None]]:
    """`command(*argv)`: a function that executes train.py."""
    import torch

    from runner.checkpoint.environment import code_fingerprint
    from runner.cli.entrypoint import train_command
    from runner.train import train_task

    torch.set_num_threads(1)  # a forked process has no other threads
    code_fingerprint()  # cached: this checkout may change meanwhile
    monkeypatch.setattr("runner.run_dir.provenance.git_state", lambda: {"commit": None, "dirty": None})
    return lambda *argv: lambda: train_command(train_task, list(argv))


def points(count: int) -> list[tuple[int, bool]]:
    """Return (number of the change, whether a new file exists) of the kills: every EVERY-th, alternating."""
    return [(index, created) for index in range(count) for created in (False, True) if (2 * index + created) % EVERY == 0]


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_kill_at_any_change_of_a_start_needs_no_hand(command: Callable[..., Callable[[], None]], rows: str, tmp_path: Path) -> None:
    run, reference = tmp_path / "runs" / "run", tmp_path / "reference"
    typed = [*TINY_RUN, rows, "train.log_every=1", "train.save_every=1", "init_from=scratch", f"hydra.run.dir={run}"]
    code, changes, output = run_in_fork(command(*typed), run.parent)
    assert code == 0 and changes > 50, output
    run.rename(reference)
    resumed = repeated = 0
    for index, created in points(changes):
        shutil.rmtree(run.parent, ignore_errors=True)
        code, _, _ = run_in_fork(command(*typed), run.parent, index, created)
        if code != KILLED:
            continue
        code, _, output = run_in_fork(command(f"resume={run}"), run.parent)
        resumed += code == 0
        if code != 0:
            where = f"killed at change {index}, created {created}: {output}"
            assert code == 2 and "Traceback" not in output and ("no run.json" in output or "does not exist" in output), where
            assert not (run / "run.json").exists(), where
            code, _, output = run_in_fork(command(*typed), run.parent)
            assert code == 0, where + output
            repeated += 1
        assert diff_run_dirs(reference, run) == [] and steps_of(run) == [1, 2], (index, created)
    assert resumed and repeated


@pytest.mark.slow
def test_kill_at_any_change_of_a_resume_needs_no_hand(command: Callable[..., Callable[[], None]], rows: str, tmp_path: Path) -> None:
    trained, run, reference = tmp_path / "trained", tmp_path / "runs" / "run", tmp_path / "reference"
    typed = [*TINY_RUN, rows, "train.log_every=1", "train.save_every=1", "init_from=scratch", "schedule=constant", f"hydra.run.dir={trained}"]
    code, _, output = run_in_fork(command(*typed), tmp_path)
    assert code == 0, output
    again = command(f"resume={run}", "train.max_steps=3", "optimizer.lr=0.002")
    shutil.copytree(trained, run)
    code, changes, output = run_in_fork(again, run)
    assert code == 0 and changes > 30, output
    run.rename(reference)
    for index, created in points(changes):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained, run)
        code, _, _ = run_in_fork(again, run, index, created)
        if code != KILLED:
            continue
        code, _, output = run_in_fork(again, run)
        assert code == 0, f"killed at change {index}, created {created}: {output}"
        assert diff_run_dirs(reference, run) == [] and steps_of(run) == [1, 2, 3], (index, created)
        assert "optimizer.lr=0.002" in (run / ".hydra" / "overrides.yaml").read_text()


@pytest.mark.slow
def test_kill_at_any_change_of_a_repair_needs_no_hand(command: Callable[..., Callable[[], None]], rows: str, tmp_path: Path) -> None:
    from runner.recovery.recover import recover_run
    from runner.tracking.jsonl import JsonlLog
    from runner.tracking.log_recovery import LogProof

    trained, run = tmp_path / "trained", tmp_path / "runs" / "run"
    typed = [*TINY_RUN, rows, "train.log_every=1", "train.save_every=1", "init_from=scratch", f"hydra.run.dir={trained}"]
    code, _, output = run_in_fork(command(*typed), tmp_path)
    assert code == 0, output
    state = json.loads((trained / "checkpoints" / "step-00000002" / "state.json").read_text())
    originals = {name: (trained / name).read_bytes() for name in ("run.json", ".hydra/config.yaml", "tokenizer/tokenizer.json", "metrics.jsonl")}
    for name, content in originals.items():
        (trained / name).write_bytes(content[: len(content) // 2])

    def repair() -> None:
        recover_run(run)
        JsonlLog(run / "metrics.jsonl", state["log"]["metrics"], 2, LogProof.of_state(state)).close()

    shutil.copytree(trained, run)
    code, changes, output = run_in_fork(repair, run)
    assert code == 0 and changes > 10, output
    for index in range(0, changes, max(1, EVERY // 6)):
        shutil.rmtree(run)
        shutil.copytree(trained, run)
        assert run_in_fork(repair, run, index, created := bool(index % 2))[0] == KILLED
        repair()
        for name in (".hydra/config.yaml", "tokenizer/tokenizer.json"):
            assert (run / name).read_bytes() == originals[name], (name, index, created)
        for name in originals:
            assert (run / "damaged" / name).read_bytes() == (trained / name).read_bytes(), (name, index, created)
