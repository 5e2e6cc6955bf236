"""The command line as overrides and flags."""

from __future__ import annotations

import pytest

from common.errors import UserError
from runner.config.overrides import Flags, parse_argv, spell_flags

SPLIT = [
    (["a=1", "--cfg", "job", "b=2"], ["a=1", "b=2"], {"--cfg": "job"}),
    (["-cjob", "a=-1"], ["a=-1"], {"--cfg": "job"}),
    (["--multi", "~x", "+y=2"], ["~x", "+y=2"], {"--multirun": True}),
    (["--info"], [], {"--info": "all"}),
    (["a=1", "--info", "b=2"], ["a=1", "b=2"], {"--info": "all"}),
    (["-i", "defaults-tree", "a=1"], ["a=1"], {"--info": "defaults-tree"}),
    (["-cd", "my dir", "--config-name=x"], [], {"--config-name": "x", "--config-dir": "my dir"}),
    (["-sc", "query=bash"], ["query=bash"], {"--shell-completion": True}),
    (["--cfg", "job", "--resolve", "-p", "train"], [], {"--cfg": "job", "--resolve": True, "--package": "train"}),
]


@pytest.mark.parametrize(("argv", "overrides", "flags"), SPLIT, ids=[" ".join(argv) for argv, _, _ in SPLIT])
def test_argv_is_split_as_hydra_does_with_flags_spelled_out(
    argv: list[str], overrides: list[str], flags: Flags
) -> None:
    assert parse_argv(argv) == (overrides, flags)


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["--epochs", "3"], "train.epochs=3"),
        (["--batch-size=8"], "train.batch_size=8"),
        (["--optimizer.lr=1"], "optimizer.lr=1"),
        (["--stage=sft"], "stage=sft"),
        (["--learning_rate", "1e-4"], "optimizer.lr=1e-4"),
        (["--epochs"], "train.epochs=<value>"),
        (["--epochs", "--cfg", "job"], "train.epochs=<value>"),
    ],
)
def test_setting_given_as_a_flag_is_refused_with_the_override(argv: list[str], fix: str) -> None:
    with pytest.raises(UserError) as error:
        parse_argv(argv)
    assert error.value.fix == fix


@pytest.mark.parametrize(
    "argv", [["--cfg", "no"], ["--cfg"], ["--co"], ["-x"], ["--info", "job"], ["--nothing=3"]], ids=" ".join
)
def test_invalid_flag_is_refused_without_a_usage_text(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="flag"):
        parse_argv(argv)
    assert capsys.readouterr() == ("", "")


def test_flags_are_spelled_as_arguments() -> None:
    assert spell_flags({"--cfg": "job", "--multirun": True}) == ["--cfg=job", "--multirun"]
