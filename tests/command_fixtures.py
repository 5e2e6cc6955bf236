"""Fixtures that run the commands: `call` in this process, `program` in a process of its own from a copy of the
checkout.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common import paths
from common.registry import PLUGINS_ENV

ROOT = Path(__file__).parents[1]
TINY_MODEL = [
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=16",
    "model.intermediate_size=32",
]  # fmt: skip
TINY_RUN = [
    *TINY_MODEL, "train.max_steps=2", "train.batch_size=2", "train.eval_every=0", "train.save_every=0", "train.sample_every=0", "data.max_length=32",
    "data.val_path=null", "device=cpu",
]  # fmt: skip


@dataclass
class Result:
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Result]
Program = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory that also takes the place of the checkout for outputs/ and .cache/, with a small data
    file rows.jsonl.
    """
    for name in (
        "runner.train",
        "runner.cli.help",
        "runner.cli.hydra_app",
        "runner.launch.resume",
        "runner.launch.local_ranks",
        "runner.planning.planned_settings",
        "data.tokenize.renderer",
    ):
        importlib.import_module(name)  # their modules keep the true REPO_ROOT, whichever test comes first
    monkeypatch.setattr(paths, "REPO_ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    # set by a command, restored by monkeypatch
    for name in ("HYDRA_FULL_ERROR", "OMP_WAIT_POLICY", "COMP_LINE", PLUGINS_ENV):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def rows(workspace: Path) -> str:
    """Override for a small data file of texts."""
    (workspace / "rows.jsonl").write_text(
        "".join(f'{{"text": "{number} goats sing in the rain"}}\n' for number in range(40))
    )
    return f"data.path={workspace / 'rows.jsonl'}"


@pytest.fixture
def call(workspace: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """`call(*argv)` executes train.py in this process."""
    from runner.cli.entrypoint import train_command

    return lambda *argv: _run(lambda: train_command(list(argv)), capsys)


def _run(command: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> Result:
    capsys.readouterr()
    handlers, code = logging.root.handlers[:], 0
    try:
        command()
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 0
    finally:
        logging.root.handlers[:] = handlers  # Hydra's --info adds one that writes to the captured stdout
    return Result(code, *capsys.readouterr())


@pytest.fixture
def call_command(workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call_command("chat.py", *argv)` executes a file of runner/ in this process."""

    def call_command(command: str, *argv: str) -> Result:
        monkeypatch.setattr(sys, "argv", [command, *argv])
        monkeypatch.setattr(sys, "path", [str(ROOT / "runner"), *sys.path])  # as Python does for a script
        return _run(lambda: runpy.run_path(str(ROOT / "runner" / command), run_name="__main__"), capsys)

    return call_command


def is_user_error(ended: Result | subprocess.CompletedProcess) -> bool:
    """Whether a command ended with exit code 2 and nothing but the three lines of a UserError."""
    return (
        ended.returncode == 2
        and not ended.stdout
        and [line.split(":")[0].strip() for line in ended.stderr.splitlines()] == ["error", "where", "fix"]
    )


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program with smaller sample files and its own outputs/."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in ("conf", "runner", "models", "data", "common", "hydra_plugins"):
        # with bytecode: a command compiles for 0.3 s
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("*.pyc.*"))
    for file in (root / "data" / "samples").glob("*.jsonl"):
        with open(file, encoding="utf-8") as lines:
            first = list(itertools.islice(lines, 40))
        file.write_text("".join(first), encoding="utf-8")
    return root


@pytest.fixture
def program(checkout: Path, tmp_path: Path) -> Program:
    """`program(*argv)` executes a command by its path, from another folder than the checkout."""

    def program(
        *argv: str, command: str = "train.py", flags: tuple[str, ...] = (), cwd: Path = tmp_path, **env: str
    ) -> subprocess.CompletedProcess:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **env}
        arguments = [sys.executable, *flags, str(checkout / "runner" / command), *argv]
        return subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)

    return program


@pytest.fixture
def outputs(checkout: Path) -> Iterator[Path]:
    """outputs/ of the checkout, empty before and after the test."""
    folder = checkout / "outputs"
    shutil.rmtree(folder, ignore_errors=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
