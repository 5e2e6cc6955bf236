"""sweep.transfer=mup: jobs train a narrow version of the model, and the winner names the command of the wide one."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from runner.config.compose import compose_config
from runner.reporting.sweep_results import JobResult, SweepResults
from runner.sweep import budget

WIDE = ["model.hidden_size=256", "model.num_attention_heads=8", "model.num_key_value_heads=2", "sweep.transfer=mup"]


def test_transfer_divides_heads_and_mlp_like_the_hidden_size() -> None:
    overrides = budget.transfer_overrides(compose_config([*WIDE, "model.intermediate_size=768"]), ["optimizer.lr"])
    assert overrides == {
        "model.hidden_size": "64",
        "model.num_attention_heads": "2",
        "model.num_key_value_heads": "1",
        "model.intermediate_size": "192",
        "optimizer.mup_base_width": "64",
    }
    narrow = compose_config([*WIDE, *(f"{key}={value}" for key, value in overrides.items())])
    assert narrow.model.head_dim == 32  # as in the wide model
    assert budget.transfer_overrides(compose_config(WIDE[:-1]), ["optimizer.lr"]) == {}
    chosen = budget.transfer_overrides(compose_config([*WIDE, "optimizer.mup_base_width=128"]), ["optimizer.lr"])
    assert chosen["model.hidden_size"] == chosen["optimizer.mup_base_width"] == "128"


@pytest.mark.parametrize(
    ("overrides", "swept", "message"),
    [
        (["optimizer.mup_base_width=48"], [], "whole number of heads of the same width, got 48"),
        (["init_from=runs/one"], [], "from random weights, the jobs start from init_from=runs/one"),
        (["stage=sft"], [], "from random weights, the jobs start from init_from=auto"),
        ([], ["model.hidden_size"], "sets model.hidden_size of every job"),
        (["stage=lora", "init_from=scratch"], [], "training without adapters"),
    ],
)
def test_transfer_is_refused_where_the_lr_would_not_be_that_of_the_model(
    overrides: list[str], swept: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        budget.transfer_overrides(compose_config([*WIDE, *overrides]), swept)


def test_transfer_command_trains_the_wide_model_with_the_winners_lr() -> None:
    narrow = [
        "optimizer.lr=0.002",
        "model.hidden_size=64",
        "model.num_attention_heads=2",
        "optimizer.mup_base_width=64",
    ]
    job = JobResult("one", {"optimizer.lr": "0.002"}, launches=[[*WIDE[2:], *narrow]])
    sweep = SweepResults(Path("sweep"), "completed", "", WIDE, ["optimizer.lr"], [job], "validation", [])
    command = sweep.transfer_command(job).split()
    assert {*WIDE[:3], "optimizer.lr=0.002", "optimizer.mup_base_width=64"} <= set(command)
    assert "model.hidden_size=64" not in command and "sweep.transfer=mup" not in command
