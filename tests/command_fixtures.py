"""`program(*words)`: runner/train.py of a checkout of its own, as a user starts it: by path, not installed, from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program alone, with an outputs/ of its own and less to read."""
    here = tmp_path_factory.mktemp("checkout")
    for room in ("conf", "runner", "models", "data", "common"):
        shutil.copytree(ROOT / room, here / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (here / "data" / "samples").glob("*.jsonl"):
        with open(file, encoding="utf-8") as all_rows:
            few = [line for _, line in zip(range(40), all_rows, strict=False)]
        file.write_text("".join(few), encoding="utf-8")
    return here


@pytest.fixture
def program(checkout: Path, tmp_path: Path):
    def program(*words: str, command: str = "train.py", flags: tuple[str, ...] = (), cwd: Path = tmp_path, **env: str) -> subprocess.CompletedProcess:
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **env}
        return subprocess.run(
            [sys.executable, *flags, str(checkout / "runner" / command), *words], cwd=cwd, env=surroundings, capture_output=True, text=True, timeout=120
        )

    return program


@pytest.fixture
def outputs(checkout: Path):
    """outputs/ of the checkout, empty before and after."""
    folder = checkout / "outputs"
    shutil.rmtree(folder, ignore_errors=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
