"""The default learning rate belongs to a stage and its optimizer (conf/stage/lr/): no optimizer inherits the value of
another.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_fixtures import Call, is_user_error

from common.paths import CONF_DIR
from runner.config.compose import compose_config
from runner.config.schema import config_groups

OF_MUON, OF_ADAMW = {"pretrain": 5e-3, "sft": 5e-3}, {"pretrain": 3e-3, "sft": 2e-3, "lora": 4e-3}


@pytest.mark.parametrize(
    ("typed", "lr"),
    [
        ([], OF_MUON["pretrain"]),
        (["optimizer=adamw"], OF_ADAMW["pretrain"]),
        (["stage=sft"], OF_MUON["sft"]),
        (["optimizer=adamw", "stage=sft"], OF_ADAMW["sft"]),
        (["stage=lora"], OF_ADAMW["lora"]),
        (["stage=sft", "optimizer=adamw", "optimizer.lr=0.7"], 0.7),
        (["experiment=gpu_8gb"], 5e-4),
    ],
    ids=str,
)
def test_lr_is_that_of_the_stage_with_the_optimizer(typed: list[str], lr: float) -> None:
    assert compose_config(typed).optimizer.lr == lr


def test_every_stage_has_an_lr_for_every_optimizer() -> None:
    options = config_groups()
    wanted = {f"{stage}_{optimizer}.yaml" for stage in options["stage"] for optimizer in options["optimizer"]}
    assert {file.name for file in (CONF_DIR / "stage" / "lr").iterdir()} == wanted


@pytest.fixture
def config_dir(workspace: Path) -> Path:
    for name, content in {
        "optimizer/slow": "defaults: [adamw, _self_]\nlr: 1e-5\n",
        "optimizer/mine": "defaults: [adamw, _self_]\neps: 1e-6\n",
    }.items():
        (workspace / "my" / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / "my" / f"{name}.yaml").write_text(content)
    return workspace / "my"


def test_lr_of_an_optimizer_file_of_the_user_is_not_replaced_by_a_stage(config_dir: Path) -> None:
    for stage in ("pretrain", "lora"):
        assert (
            compose_config(
                [f"hydra.searchpath=['file://{config_dir}']", f"stage={stage}", "optimizer=slow"]
            ).optimizer.lr
            == 1e-5
        )


@pytest.mark.slow
def test_optimizer_file_of_the_user_without_lr_asks_for_it(call: Call, config_dir: Path) -> None:
    result = call("--config-dir", str(config_dir), "optimizer=mine", "stage=sft")
    assert (
        is_user_error(result)
        and "optimizer.lr has no value" in result.stderr
        and "optimizer.lr=<value>" in result.stderr
    )
    (config_dir / "stage" / "lr").mkdir(parents=True)
    (config_dir / "stage" / "lr" / "sft_mine.yaml").write_text("lr: 1e-4\n")
    assert "lr: 0.0001" in call("--config-dir", str(config_dir), "optimizer=mine", "stage=sft", "--cfg", "job").stdout
