"""Runs of this checkout: the command in a process of its own, or a `TrainState` in this one."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib import ROOT

SAMPLES = ROOT / "data" / "samples"
# train and save at the end, nothing else
NO_EXTRAS = ["train.eval_every=0", "train.save_every=0", "train.sample_every=0", "tracker.console=quiet"]


def train_command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "runner" / "train.py"), *overrides]


def run_train(*overrides: str, threads: int | None = None) -> None:
    """Run train.py to its end. Raises RuntimeError with its stderr if it fails."""
    env = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    done = subprocess.run(train_command(*overrides), capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr)


def run_self(script: str, *arguments: str) -> str:
    """Run a benchmark script again in a process of its own with one thread; return its output."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, script, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=env
    ).stdout


def compose_run(overrides: list[str]) -> Any:
    """Return the Config of a run, with the model of the weights that init_from names."""
    from runner.config.compose import compose_tree, to_config, without_hydra

    try:
        from runner.launch.initial_weights import adopt_model
    except ModuleNotFoundError:  # a commit before it was moved
        from runner.run_dir.initial_weights import adopt_model

    tree = without_hydra(compose_tree(overrides))
    adopt_model(tree, overrides)
    return to_config(tree)


def build_state(overrides: list[str], run_dir: Path | None = None) -> Any:
    """Return the TrainState of a run before its first step."""
    from runner.engine.build import build_run

    cfg, folder = compose_run(overrides), run_dir or Path(tempfile.mkdtemp())
    if "metadata" in inspect.signature(build_run).parameters:
        from runner.run_dir.metadata import RunMetadata

        return build_run(cfg, RunMetadata.detached(folder, 1))
    return build_run(cfg, folder, attempt=1, update_metadata=lambda **fields: None)  # a commit before it took metadata


def resident_mib() -> float:
    """Return the memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
