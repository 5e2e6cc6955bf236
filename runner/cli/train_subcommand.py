"""Commands beside train.py: they take its words and a few of their own, from conf/<command>.yaml, and make no run folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from common import paths
from common.errors import UserError
from runner.cli import help, subcommand
from runner.config import flags as flags_module
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.engine.device.cpu import set_passive_omp_wait

T = TypeVar("T")
TRAIN_CONFIG_HINT = "Every word of train.py may be given too: python runner/train.py --help"


def run_with_train_config(name: str, about: str, schema: type[T], act: Callable[[T, Config], None]) -> None:
    """`act` on what this command line says of the command itself and of a run. A refusal is three lines and exit 2."""
    set_passive_omp_wait()
    if {"--help", "-h"} & set(sys.argv[1:]):
        return print(help.subcommand_help(name, about, TRAIN_CONFIG_HINT))
    with subcommand.reporting_user_errors():
        own, others = _split_overrides(sys.argv[1:], schema)
        tree = OmegaConf.merge(OmegaConf.load(paths.CONF_DIR / f"{name}.yaml"), OmegaConf.from_dotlist(own))
        assert isinstance(tree, DictConfig)
        act(subcommand.to_schema(tree, schema), compose_config(others))


def _split_overrides(argv: list[str], schema: type) -> tuple[list[str], list[str]]:
    """(words of the command, words of train.py); --plain is short for plain=true."""
    typed, flags = flags_module.split_argv(argv)
    kinds = subcommand.value_kinds(schema)
    given = {flag: f"{flag.removeprefix('--')}=true" for flag in flags if kinds.get(flag.removeprefix("--")) == "bool"}
    flags_module.check_no_dashed_settings([flag for flag in flags if flag not in given])
    for flag in flags:
        if (name := flag.lstrip("-").partition("=")[0]) in kinds and flag not in given:
            raise UserError("words have no dashes", flag, f"write {name}=<value>")
        if flag not in given:
            raise UserError("no such flag", flag, "--help shows the words")
    for word in typed:
        if word.startswith("resume=") and word != "resume=null":
            raise UserError("this command continues no run", word, "give the words the run was started with; they stand in its .hydra/overrides.yaml")
    own = [word for word in typed if word.partition("=")[0] in kinds]
    return own + list(given.values()), [word for word in typed if word not in own]
