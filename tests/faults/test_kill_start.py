"""A kill at any change of the file system during the start of a run, a resume or a sweep: `resume=` continues it, or
the same command starts it.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from command_fixtures import TINY_RUN
from killed_calls import KILLED, KilledCalls
from warm_programs import WarmPrograms

from runner.engine.verify_resume import diff_run_dirs

EVERY = int(os.environ.get("KILL_EVERY", "60"))  # KILL_EVERY=1: at every change; each takes about a second


@pytest.fixture
def calls(warm: WarmPrograms, tmp_path: Path) -> KilledCalls:
    return KilledCalls(warm, tmp_path)


@pytest.fixture
def typed(tmp_path: Path) -> list[str]:
    """Overrides of a run of two steps, each saved."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"text": "{number} goats sing in the rain"}}\n' for number in range(40))
    )
    return [
        *TINY_RUN,
        f"data.path={tmp_path / 'rows.jsonl'}",
        "train.log_every=1",
        "train.save_every=1",
        "init_from=scratch",
    ]


def points(count: int) -> list[tuple[int, bool]]:
    """Return (number of the change, whether a new file exists) of the kills: every EVERY-th, alternating."""
    return [
        (index, created) for index in range(count) for created in (False, True) if (2 * index + created) % EVERY == 0
    ]


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_kill_at_any_change_of_a_start_needs_no_hand(calls: KilledCalls, typed: list[str], tmp_path: Path) -> None:
    run, reference = tmp_path / "runs" / "run", tmp_path / "reference"
    train = partial(calls.run, "train", tmp_path, root=run.parent)
    start, resume = [*typed, f"hydra.run.dir={run}"], [f"resume={run}"]
    code, changes, output = train(start)
    assert code == 0 and changes > 50, output
    run.rename(reference)
    resumed = repeated = 0
    for index, created in points(changes):
        shutil.rmtree(run.parent, ignore_errors=True)
        code, _, _ = train(start, kill_at=index, after_creation=created)
        if code != KILLED:
            continue
        code, _, output = train(resume)
        resumed += code == 0
        if code != 0:
            where = f"killed at change {index}, created {created}: {output}"
            assert (
                code == 2 and "Traceback" not in output and ("no run.json" in output or "does not exist" in output)
            ), where
            assert not (run / "run.json").exists(), where
            code, _, output = train(start)
            assert code == 0, where + output
            repeated += 1
        assert diff_run_dirs(reference, run) == [] and steps_of(run) == [1, 2], (index, created)
    assert resumed and repeated


@pytest.mark.slow
def test_kill_at_any_change_of_a_resume_needs_no_hand(calls: KilledCalls, typed: list[str], tmp_path: Path) -> None:
    trained, run, reference = tmp_path / "trained", tmp_path / "runs" / "run", tmp_path / "reference"
    train = partial(calls.run, "train", tmp_path, root=run)
    code, _, output = train([*typed, "schedule=constant", f"hydra.run.dir={trained}"])
    assert code == 0, output
    again = [f"resume={run}", "train.max_steps=3", "optimizer.lr=0.002"]
    shutil.copytree(trained, run)
    code, changes, output = train(again)
    assert code == 0 and changes > 30, output
    run.rename(reference)
    for index, created in points(changes):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained, run)
        code, _, _ = train(again, kill_at=index, after_creation=created)
        if code != KILLED:
            continue
        code, _, output = train(again)
        assert code == 0, f"killed at change {index}, created {created}: {output}"
        assert diff_run_dirs(reference, run) == [] and steps_of(run) == [1, 2, 3], (index, created)
        assert "optimizer.lr=0.002" in (run / ".hydra" / "overrides.yaml").read_text()


@pytest.mark.slow
def test_kill_at_any_change_of_a_repair_needs_no_hand(calls: KilledCalls, typed: list[str], tmp_path: Path) -> None:
    trained, run = tmp_path / "trained", tmp_path / "runs" / "run"
    code, _, output = calls.run("train", tmp_path, [*typed, f"hydra.run.dir={trained}"], root=run)
    assert code == 0, output
    state = json.loads((trained / "checkpoints" / "step-00000002" / "state.json").read_text())
    originals = {
        name: (trained / name).read_bytes()
        for name in ("run.json", ".hydra/config.yaml", "tokenizer/tokenizer.json", "metrics.jsonl")
    }
    for name, content in originals.items():
        (trained / name).write_bytes(content[: len(content) // 2])

    repair = partial(calls.run, "repair", run, state, root=run)
    shutil.copytree(trained, run)
    code, changes, output = repair()
    assert code == 0 and changes > 10, output
    for index in range(0, changes, max(1, EVERY // 6)):
        shutil.rmtree(run)
        shutil.copytree(trained, run)
        assert repair(kill_at=index, after_creation=(created := bool(index % 2)))[0] == KILLED
        assert repair()[0] == 0
        for name in (".hydra/config.yaml", "tokenizer/tokenizer.json"):
            assert (run / name).read_bytes() == originals[name], (name, index, created)
        for name in originals:
            assert (run / "damaged" / name).read_bytes() == (trained / name).read_bytes(), (name, index, created)
