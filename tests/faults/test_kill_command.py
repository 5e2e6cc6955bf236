"""The real command, killed with -9 from outside and continued with resume=, until it is through."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from runner.checkpoint import atomic_dir
from runner.engine.verify_resume import diff_run_dirs

KILLS = 25
WORDS = [
    "stage=pretrain", "init_from=scratch", "model.hidden_size=32", "model.num_hidden_layers=2", "model.head_dim=8", "model.intermediate_size=64", "model.max_position_embeddings=128",
    "model.dropout=0.1", "data.max_length=64", "data.num_workers=2", "data.val_path=null", "data.val_fraction=0.2", "train.batch_size=2", "train.max_steps=150", "train.log_every=1",
    "train.save_every=3", "train.eval_every=10", "train.sample_every=0", "device=cpu",
]  # fmt: skip


@pytest.fixture
def launch(checkout, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "the lake of Oru lies north of the old mill " * (1 + i % 3)}) + "\n" for i in range(40)))

    def launch(*words: str) -> subprocess.Popen:
        with open(tmp_path / "said", "w") as said:
            return subprocess.Popen(
                [sys.executable, str(checkout / "runner" / "train.py"), *words],
                cwd=tmp_path,
                stdout=said,
                stderr=said,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    return launch


def first_words(folder: Path) -> list[str]:
    return [*WORDS, f"data.path={folder.parent / 'rows.jsonl'}", f"hydra.run.dir={folder}"]


def words_to_continue(folder: Path) -> list[str]:
    """Where the kill came before there was anything to continue, the same words again."""
    begun = (folder / "run.json").exists() and json.loads((folder / "run.json").read_text())["attempt"]
    return [f"resume={folder}"] if begun else first_words(folder)


def newest_step(folder: Path) -> int:
    found, passed_over = atomic_dir.newest_valid(folder / "checkpoints")
    assert passed_over == []
    return int(found.name[5:]) if found else 0


def times_of(launch, folder: Path) -> tuple[float, float]:
    """Seconds to the first step and to the end of a run that nobody disturbs."""
    began = time.monotonic()
    child = launch(*first_words(folder))
    while not (folder / "metrics.jsonl").exists() and child.poll() is None:
        time.sleep(0.01)
    first = time.monotonic() - began
    assert child.wait(120) == 0, (folder.parent / "said").read_text()
    return first, time.monotonic() - began


@pytest.mark.slow
def test_cold_kills_of_the_command_cost_no_bit(launch, tmp_path):
    whole, chance, seen = tmp_path / "whole", random.Random(25), Counter()
    first, end = times_of(launch, whole)
    while seen["kills"] < KILLS:
        seen["runs"] += 1
        folder, before = tmp_path / f"run{seen['runs']}", 0
        while True:
            child = launch(*words_to_continue(folder))
            seen["launches"] += 1
            try:
                # Half of the kills aim at what comes before the first step: imports, words, the folder, the model.
                code = child.wait(chance.uniform(0.3 * first, first) if seen["launches"] % 2 else chance.uniform(first, first + 0.7 * (end - first)))
            except subprocess.TimeoutExpired:
                child.kill()
                code = child.wait()
                seen["kills"] += 1
            assert code in (0, -9), (tmp_path / "said").read_text()
            newest = newest_step(folder)
            assert newest >= before
            seen["before the first checkpoint"] += code != 0 and newest == 0
            before = newest
            if code == 0:
                break
        assert diff_run_dirs(whole, folder) == []
        assert json.loads((folder / "run.json").read_text())["status"] == "completed"
    print(dict(seen))
    assert seen["before the first checkpoint"] and seen["before the first checkpoint"] < seen["kills"]


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_is_continued_from_its_seed(launch, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert launch(*first_words(whole), "train.save_every=0").wait(120) == 0
    child = launch(*first_words(folder), "train.save_every=0")
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert newest_step(folder) == 0
    assert launch(f"resume={folder}").wait(120) == 0, (tmp_path / "said").read_text()
    assert diff_run_dirs(whole, folder) == []
