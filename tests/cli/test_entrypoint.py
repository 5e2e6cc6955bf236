"""train.py as the user meets it: from any folder, quick to answer, three lines for a wrong setting, an exit code for
every end.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_fixtures import TINY_RUN, Call, Program, is_user_error

from common import errors
from common.paths import CONF_DIR, REPO_ROOT
from runner.run_dir.contents import find_runs


def imported(done: subprocess.CompletedProcess) -> set[str]:
    """The modules that a process started with -X importtime has imported."""
    return {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time")}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


LIGHT = [
    ["--cfg", "job"],
    ["--help"],
    ["--shell-completion", "query=bash"],
    ["-m", "train.epochs=1,x"],
    ["schedule.min_lr_ratio=4"],
    ["resume=nowhere"],
]


@pytest.mark.slow
def test_printing_and_user_errors_import_no_torch(checkout: Path) -> None:
    script = f"""
import sys
from runner.cli.entrypoint import train_command
for argv in {LIGHT}:
    try:
        train_command(argv)
    except SystemExit:
        pass
    for name in ("torch", "transformers", "swanlab", "tokenizers", "hydra"):
        if name in sys.modules:
            print("imported", name)
"""
    environment = {**os.environ, "COMP_LINE": "python runner/train.py stage="}
    done = subprocess.run([sys.executable, "-c", script], cwd=checkout, env=environment, capture_output=True, text=True)
    assert {line for line in done.stdout.splitlines() if line.startswith("imported ")} == {"imported hydra"}, (
        done.stderr
    )


# Installed libraries that a run does not need, and torch's compiler, which torch's own optimizers and custom_op would
# import.
UNUSED = "accelerate datasets matplotlib pandas peft plotly pyarrow rich scipy sklearn swanlab sympy torch._dynamo torch._inductor transformers trl".split()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["pretrain", pytest.param("lora", marks=pytest.mark.slow)])
def test_training_imports_only_what_it_uses(program: Program, tmp_path: Path, stage: str) -> None:
    argv = [
        f"stage={stage}",
        "init_from=scratch",
        *TINY_RUN,
        f"hydra.run.dir={tmp_path / 'run'}",
        "tracker.console=plain",
    ]
    done = program(*argv, flags=("-X", "importtime"))
    assert done.returncode == 0 and "completed" in done.stdout, done.stderr
    modules = imported(done)
    assert "torch" in modules
    assert [name for name in modules if any(name == unused or name.startswith(f"{unused}.") for unused in UNUSED)] == []


def test_user_error_shows_a_traceback_with_hydra_full_error(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "SHOW_TRACEBACKS", True)
    result = call("optimizer.lrr=1")
    assert result.returncode == 1 and "Traceback" in result.stderr and "UserError" in result.stderr


def test_cfg_prints_the_composed_config_and_starts_nothing(call: Call, workspace: Path) -> None:
    result = call("stage=sft", "--cfg", "job")
    assert result.returncode == 0 and yaml.safe_load(result.stdout)["stage"]["name"] == "sft"
    assert list(workspace.iterdir()) == []


def test_overrides_and_flags_may_be_mixed(call: Call) -> None:
    result = call("seed=3", "--cfg", "job", "stage=sft", "--package", "stage")
    assert result.returncode == 0 and yaml.safe_load(result.stdout)["name"] == "sft"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["--info"], "Config search path", marks=pytest.mark.slow),
        (["--info", "plugins"], "GridSweeper"),
        pytest.param(["--hydra-help"], "hydra", marks=pytest.mark.slow),
    ],
)
def test_hydra_flags_print_what_hydra_knows(call: Call, argv: list[str], expected: str) -> None:
    result = call(*argv)
    assert result.returncode == 0 and expected in result.stdout + result.stderr


def test_typed_paths_become_absolute(call: Call, workspace: Path) -> None:
    (workspace / "optimizer.lr=0.1,seed=1").mkdir()
    (workspace / "rows.jsonl").touch()
    result = call("init_from=optimizer.lr=0.1,seed=1", "data.path=rows.jsonl", "--cfg", "job")
    printed = yaml.safe_load(result.stdout)
    assert (printed["init_from"], printed["data"]["path"]) == (
        str(workspace / "optimizer.lr=0.1,seed=1"),
        str(workspace / "rows.jsonl"),
    )


def test_help_names_every_group_option_and_command(call: Call) -> None:
    result = call("--help")
    page = result.stdout
    assert result.returncode == 0, result.stderr
    options = [
        file.stem
        for group in CONF_DIR.iterdir()
        if group.is_dir() and group.name != "hydra"
        for file in group.glob("*.yaml")
    ]
    commands = [file.name for file in (REPO_ROOT / "runner").glob("*.py") if file.stem != "__init__"]
    assert [name for name in [*options, *commands] if name not in page] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [("stage=", "stage=sft"), ("optimizer.l", "optimizer.lr="), ("resume=/a\\ b precision=b", "precision=bf16")],
)
def test_completion_offers_options_and_settings(
    call: Call, monkeypatch: pytest.MonkeyPatch, line: str, expected: str
) -> None:
    monkeypatch.setenv("COMP_LINE", f"python runner/train.py {line}")
    assert expected in call("--shell-completion", "query=bash").stdout.split()
    # Hydra's bash script completes programs whose file has this text
    assert "@hydra.main" in (REPO_ROOT / "runner" / "train.py").read_text()


@pytest.mark.slow
def test_train_runs_as_a_module(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runner.train", "--cfg", "job"], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0 and "stage:" in done.stdout


@pytest.mark.slow
def test_run_directory_is_named_by_date_and_time_and_holds_the_whole_run(
    call: Call, workspace: Path, rows: str
) -> None:
    result = call(*TINY_RUN, rows)
    assert result.returncode == 0, result.stderr
    (run,) = find_runs(workspace / "outputs")
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", run.relative_to(workspace).as_posix())
    fields = json.loads((run / "run.json").read_text())
    assert (fields["status"], fields["outcome"], fields["step"], fields["stage"], fields["init_from"]) == (
        "completed",
        "completed",
        2,
        "pretrain",
        "scratch",
    )
    assert (
        (run / ".hydra" / "config.yaml").is_file()
        and (run / ".hydra" / "conf" / "config.yaml").is_file()
        and (run / "model" / "config.json").is_file()
    )
    log = (run / "train.log").read_text().splitlines()
    assert log and not [line for line in log if line.startswith("[20")], "Hydra's logging must not write into train.log"


RECORDER = """
import os
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback

class Recorder(Callback):
    def record(self, name, config, *details):
        number = config.hydra.job.num if config.hydra.mode.name == "MULTIRUN" else ""
        print("recorded", name, f"{config.hydra.job.name}{number}", *details)

    def on_run_start(self, config, **_):
        self.record("on_run_start", config)

    def on_job_start(self, config, **_):
        folder = HydraConfig.get().runtime.output_dir
        assert HydraConfig.get().job.name == config.hydra.job.name and os.path.isdir(folder) and os.getcwd() != folder
        compose("config")  # Hydra is initialized, as in a task of hydra.main
        self.record("on_job_start", config, os.environ["COLOR"], config.train.max_steps)

    def on_job_end(self, config, job_return, **_):
        self.record("on_job_end", config, job_return.status.name)

    def on_run_end(self, config, job_return, **_):
        self.record("on_run_end", config, job_return.status.name)
"""


def recorded(output: str) -> list[str]:
    return [line.partition("recorded ")[2] for line in output.splitlines() if "recorded " in line]


def write_recorder(workspace: Path) -> list[str]:
    """Write the plugin RECORDER; return the overrides that use it."""
    (workspace / "recorder.py").write_text(RECORDER)
    return [
        f"plugins=[{workspace / 'recorder.py'}]",
        "+hydra.callbacks.mine._target_=recorder.Recorder",
        "hydra.job.name=mine",
        "+hydra.job.env_set.COLOR=blue",
    ]


@pytest.mark.slow
def test_hydra_callbacks_and_job_settings_of_the_user_take_effect(call: Call, workspace: Path, rows: str) -> None:
    typed = write_recorder(workspace)
    result = call(*TINY_RUN, rows, *typed, "hydra.run.dir=run")
    assert result.returncode == 0, result.stderr
    assert recorded(result.stdout) == [
        "on_run_start mine",
        "on_job_start mine blue 2",
        "on_job_end mine COMPLETED",
        "on_run_end mine COMPLETED",
    ]
    result = call("resume=run", "train.max_steps=3", *typed)
    assert result.returncode == 0, result.stderr
    assert recorded(result.stdout) == [
        "on_run_start mine",
        "on_job_start mine blue 3",
        "on_job_end mine COMPLETED",
        "on_run_end mine COMPLETED",
    ]
    result = call(*TINY_RUN, rows, *typed, "device=cuda:99")
    assert result.returncode == 2 and recorded(result.stdout)[-2:] == [
        "on_job_end mine FAILED",
        "on_run_end mine FAILED",
    ]


@pytest.mark.slow
def test_hydra_callbacks_and_job_settings_reach_the_jobs_of_a_sweep(
    warm_program: Program, workspace: Path, rows: str
) -> None:
    typed = write_recorder(workspace)
    result = warm_program("--multirun", *TINY_RUN, rows, *typed, "seed=1,2", f"hydra.sweep.dir={workspace / 'sweep'}")
    assert result.returncode == 0, result.stderr
    logs = [recorded((workspace / "sweep" / f"seed={seed}" / "console.log").read_text()) for seed in (1, 2)]
    assert logs == [[f"on_job_start mine{number} blue 2", f"on_job_end mine{number} COMPLETED"] for number in (0, 1)]


@pytest.mark.slow
def test_run_in_the_directory_of_another_changes_nothing(call: Call, workspace: Path, rows: str) -> None:
    placed = f"hydra.run.dir={workspace / 'run'}"
    assert call(*TINY_RUN, rows, placed).returncode == 0
    before = contents(workspace)
    for argv in ([placed, "seed=3"], [f"hydra.run.dir={workspace / 'run' / 'checkpoints' / 'inside'}"]):
        result = call(*TINY_RUN, rows, *argv)
        assert is_user_error(result) and f"resume={workspace / 'run'}" in result.stderr
        assert contents(workspace) == before


def test_windows_is_refused_with_the_page_that_helps() -> None:
    program = "import sys; sys.platform = 'win32'; import runner"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "use WSL: docs/guide/windows.md" in done.stderr
    assert (REPO_ROOT / "docs" / "guide" / "windows.md").is_file()
