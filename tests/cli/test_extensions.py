"""Config groups and plugins of the user: --config-dir, hydra.searchpath and plugins=[...], and what a run and its
resume make of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command_fixtures import TINY_RUN, Call, Program, is_user_error

from common import registry as plugins
from runner.engine.optim.config import OPTIMIZERS

MODEL = """
defaults: [tiny, _self_]
name: mine
hidden_size: 32
num_hidden_layers: 1
num_attention_heads: 2
num_key_value_heads: 1
head_dim: 16
intermediate_size: 32
"""
PLUGIN = """
from dataclasses import dataclass
from runner.engine.optim.config import OptimizerConfig, register_optimizer

@register_optimizer("plainsgd")
@dataclass
class PlainSGDConfig(OptimizerConfig):
    lr: float = 0.1
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    layer_decay: float = 1.0

    def build(self, groups):
        import torch
        return [torch.optim.SGD(groups.decay + groups.no_decay, lr=self.lr)]
"""
OBJECTIVE = """
from dataclasses import dataclass
from runner.engine.objectives.config import NextTokenConfig, register_objective

@register_objective("smooth")
@dataclass
class SmoothConfig(NextTokenConfig):
    smoothing: float = 0.1
"""
SHORT_RUN = [override for override in TINY_RUN if not override.startswith("model.")]


@pytest.fixture
def config_dir(workspace: Path) -> Path:
    """A folder with a model of the user's own, and an optimizer file without a class of its own."""
    folder = workspace / "my conf"
    for name, content in {"model/mine": MODEL, "optimizer/slow_adamw": "defaults: [adamw, _self_]\nlr: 1e-5\n"}.items():
        file = folder / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(content)
    return folder


@pytest.fixture
def plugin(workspace: Path) -> Iterator[Path]:
    """A plugin with the optimizer `plainsgd`, which no process knows before or after the test."""
    file = workspace / "my_optimizers.py"
    file.write_text(PLUGIN)
    plugins.IMPORTED_MODULES.clear()
    yield file
    sys.modules.pop(file.stem, None)
    OPTIMIZERS.remove("plainsgd")


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the plugins, as a new process would."""
    sys.modules.pop("my_optimizers", None)
    OPTIMIZERS.remove("plainsgd")
    plugins.IMPORTED_MODULES.clear()
    monkeypatch.delenv(plugins.PLUGINS_ENV, raising=False)


@pytest.mark.parametrize(
    "given",
    [["--config-dir", "my conf"], ["hydra.searchpath=['file://my conf']"], ["hydra.searchpath=[my conf]"]],
    ids=lambda argv: argv[0],
)
def test_config_dir_options_compose_like_those_of_conf(call: Call, config_dir: Path, given: list[str]) -> None:
    result = call(*given, "model=mine", "optimizer=slow_adamw", "--cfg", "job")
    config = yaml.safe_load(result.stdout)
    assert (config["model"]["hidden_size"], config["model"]["vocab_size"], config["optimizer"]["betas"]) == (
        32,
        6400,
        [0.9, 0.95],
    ), result.stderr


def test_config_dir_options_are_suggested_and_listed_in_help(call: Call, config_dir: Path) -> None:
    result = call("--config-dir", str(config_dir), "model=mien")
    assert is_user_error(result) and "did you mean mine?" in result.stderr
    assert "slow_adamw" in call("--config-dir", str(config_dir), "--help").stdout
    assert is_user_error(call("model=mine")), "without --config-dir it is unknown"


def test_config_dir_setting_that_no_class_has_is_refused(call: Call, config_dir: Path) -> None:
    (config_dir / "model" / "mine.yaml").write_text(MODEL + "hiden_size: 3\n")
    result = call("--config-dir", str(config_dir), "model=mine")
    assert is_user_error(result) and "model.hiden_size" in result.stderr


@pytest.mark.slow
def test_config_dir_files_are_copied_and_resume_reports_changes(
    call: Call, config_dir: Path, workspace: Path, rows: str
) -> None:
    run = workspace / "run"
    result = call(*SHORT_RUN, rows, "--config-dir", str(config_dir), "model=mine", f"hydra.run.dir={run}")
    assert result.returncode == 0, result.stderr
    assert (run / ".hydra" / "conf" / "model" / "mine.yaml").read_text() == MODEL
    assert (run / ".hydra" / "conf" / "model" / "tiny.yaml").is_file()
    (config_dir / "model" / "mine.yaml").write_text(MODEL.replace("hidden_size: 32", "hidden_size: 48"))
    result = call(f"resume={run}", "schedule=linear", "--config-dir", str(config_dir), "--cfg", "job")
    assert yaml.safe_load(result.stdout)["model"]["hidden_size"] == 32
    assert "conf/model/mine.yaml has changed (hidden_size)" in result.stderr
    result = call(f"resume={run}", "schedule=linear", "train.max_steps=3")
    assert (
        result.returncode == 0
        and "conf/model/mine.yaml is not in conf/ or a --config-dir: the run keeps its own copy" in result.stderr
    )


def test_config_dir_inside_a_run_is_refused(call: Call, workspace: Path) -> None:
    (workspace / "run" / ".hydra" / "conf").mkdir(parents=True)
    (workspace / "run" / "run.json").write_text("{}")
    for argv in (["--config-dir", "run/.hydra/conf"], ["hydra.searchpath=[run/.hydra/conf]"]):
        result = call(*argv)
        assert is_user_error(result) and f"resume={workspace / 'run'}" in result.stderr


@pytest.mark.slow
def test_plugin_optimizer_trains_and_its_source_is_copied(
    call: Call, plugin: Path, workspace: Path, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workspace / "run"
    result = call(*TINY_RUN, rows, "plugins=[my_optimizers]", "optimizer=plainsgd", f"hydra.run.dir={run}")
    assert result.returncode == 0, result.stderr
    assert (run / ".hydra" / "plugins" / "my_optimizers.py").read_text() == PLUGIN
    assert yaml.safe_load((run / ".hydra" / "config.yaml").read_text())["plugins"] == [str(plugin)]
    new_process(monkeypatch)
    plugin.write_text(PLUGIN + "# changed\n")
    result = call(f"resume={run}", "train.max_steps=3", f"plugins=[{plugin}]")
    assert result.returncode == 0 and "plugin my_optimizers.py differs from the copy" in result.stderr


def test_plugin_setting_needs_no_yaml_file_to_be_overridden(call: Call, workspace: Path, plugin: Path) -> None:
    plugin.write_text(OBJECTIVE)
    result = call("plugins=[my_optimizers]", "stage.objective=smooth", "stage.smoothing=0.2", "--cfg=job")
    assert result.returncode == 0 and "smoothing: 0.2" in result.stdout, result


@pytest.mark.slow
def test_resume_never_imports_a_plugin_that_is_not_typed(
    call: Call, plugin: Path, workspace: Path, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workspace / "run"
    assert (
        call(*TINY_RUN, rows, "plugins=[my_optimizers.py]", "optimizer=plainsgd", f"hydra.run.dir={run}").returncode
        == 0
    )
    new_process(monkeypatch)
    plugin.write_text(f"open({str(workspace / 'imported')!r}, 'w')")
    for argv in ([f"resume={run}"], [f"resume={run}", "--cfg", "job"], [f"resume={run}", "train.max_steps=3"]):
        result = call(*argv)
        assert is_user_error(result) and f'plugins=["{plugin}"]' in result.stderr
    assert not (workspace / "imported").exists()


def test_plugins_in_a_yaml_file_are_not_imported(call: Call, plugin: Path, config_dir: Path) -> None:
    (config_dir / "experiment").mkdir()
    (config_dir / "experiment" / "mine.yaml").write_text(
        f"# @package _global_\nplugins: [{plugin}]\noptimizer:\n  name: plainsgd\n"
    )
    result = call("--config-dir", str(config_dir), "experiment=mine")
    assert is_user_error(result) and f'plugins=["{plugin}"]' in result.stderr and "my_optimizers" not in sys.modules


def test_plugin_that_cannot_be_imported_is_refused(call: Call, workspace: Path) -> None:
    (workspace / "broken_plugin.py").write_text("1 / 0")
    result = call("plugins=[broken_plugin]")
    assert is_user_error(result) and "ZeroDivisionError" in result.stderr and "broken_plugin" not in sys.modules
    assert is_user_error(call("plugins=broken_plugin"))


def test_plugin_that_ends_the_program_is_refused(call: Call, workspace: Path) -> None:
    (workspace / "script.py").write_text("raise SystemExit(0)")  # a program without `if __name__ == "__main__"`
    result = call("plugins=[script.py]")
    assert is_user_error(result) and "SystemExit: 0" in result.stderr


@pytest.mark.slow(long=True)
def test_jobs_of_a_sweep_and_their_ranks_import_the_typed_plugins(
    program: Program, config_dir: Path, workspace: Path, rows: str
) -> None:
    (workspace / "my_optimizers.py").write_text(PLUGIN)
    sweep = workspace / "sweep"
    done = program(
        "-m", "seed=1,2", *SHORT_RUN, rows, f"--config-dir={config_dir}", "model=mine", "plugins=[my_optimizers.py]", "optimizer=plainsgd",
        "distributed=ddp", "distributed.nproc=2", f"hydra.sweep.dir={sweep}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for job in ("seed=1", "seed=2"):
        assert (sweep / job / ".hydra" / "plugins" / "my_optimizers.py").read_text() == PLUGIN
        assert yaml.safe_load((sweep / job / ".hydra" / "conf" / "model" / "mine.yaml").read_text()) == yaml.safe_load(
            MODEL
        )
    done = program(f"resume={sweep}", "train.max_steps=3")
    assert is_user_error(done) and f'plugins=["{workspace / "my_optimizers.py"}"]' in done.stderr
