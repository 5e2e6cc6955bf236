"""The wheel: it holds conf/ and the samples, runs from any directory, and puts no `data`, `models` or `runner` into
site-packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["model.hidden_size=32", "model.num_hidden_layers=1", "model.head_dim=8", "model.intermediate_size=64", "train.max_steps=2", "train.eval_every=0",
         "train.sample_every=0", "train.batch_size=2", "device=cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built, as in the Dockerfile, from what .dockerignore leaves of the checkout."""
    target, context = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("context") / "src"
    ignored = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()]
    shutil.copytree(ROOT, context, ignore=shutil.ignore_patterns(*ignored))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(target),
        str(context),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=550)
    return next(target.glob("*.whl"))


@pytest.mark.slow
def test_wheel_has_one_top_level_package_with_conf_and_samples(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"lm_runner"}
    for name in (
        "conf/config.yaml",
        "conf/stage/sft.yaml",
        "data/samples/sft.jsonl",
        "data/samples/tokenizer/tokenizer.json",
        "runner/reporting/page.css",
    ):
        assert f"lm_runner/_app/{name}" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.slow(long=True)
def test_wheel_commands_run_beside_a_users_own_data_and_models(wheel: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(site)
    for name in ("data", "models", "runner"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("raise AssertionError('the user module was imported')\n")
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "lm_runner", *arguments]
        return subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=550)

    trained = run("train", *SMALL)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    folder = next((work / "outputs").glob("*/*/run.json")).parent
    assert (folder / "model" / "model.safetensors").is_file() and not (site / "lm_runner" / "_app" / "outputs").exists()
    resumed = run("train", f"resume={folder}", "train.max_steps=3")
    assert resumed.returncode == 0, resumed.stderr
    (work / "mine.py").write_text("")
    swept = run("train", "--multirun", *SMALL, "plugins=[mine]", "optimizer.lr=1e-3,2e-3")
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert len(list((work / "outputs" / "multirun").glob("*/*/*/run.json"))) == 2
    assert run("chat", "run=last", "prompt=Ludo", "max_new_tokens=2").returncode == 0
    refused = run("train", "optimizer.lrr=1")
    assert refused.returncode == 2 and "optimizer.lr" in refused.stderr


@pytest.mark.slow
def test_wheel_does_not_build_without_conf(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "lm_runner").mkdir()
    (tmp_path / "lm_runner" / "__init__.py").write_text("")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path / "dist"),
        str(tmp_path),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert built.returncode != 0 and "Forced include not found" in built.stdout + built.stderr


def test_installed_commands_are_the_files_of_runner() -> None:
    import lm_runner

    assert set(lm_runner.COMMANDS) == {path.stem for path in (ROOT / "runner").glob("*.py")} - {"__init__"}
    assert all(callable(getattr(lm_runner, command)) for command in lm_runner.COMMANDS)
