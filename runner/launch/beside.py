"""Commands beside train.py: they take its words and a few of their own, from conf/<command>.yaml, and make no run folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from runner.engine.config import Config
from runner.launch import help, small, words
from runner.launch.compose import compose
from runner.launch.origin import share_the_machine

T = TypeVar("T")
FLAGS = "Every word of train.py may be given too: python runner/train.py --help"


def start(name: str, about: str, schema: type[T], act: Callable[[T, Config], None]) -> None:
    """`act` on what this command line says of the command itself and of a run. A refusal is three lines and exit 2."""
    share_the_machine()
    if {"--help", "-h"} & set(sys.argv[1:]):
        return print(help.command(name, about, FLAGS))
    with small.refusing():
        own, others = _sorted(sys.argv[1:], schema)
        tree = OmegaConf.merge(OmegaConf.load(words.CONF / f"{name}.yaml"), OmegaConf.from_dotlist(own))
        assert isinstance(tree, DictConfig)
        act(small.typed(tree, schema), compose(others))


def _sorted(argv: list[str], schema: type) -> tuple[list[str], list[str]]:
    """(words of the command, words of train.py); --plain is short for plain=true."""
    typed, flags = words.split(argv)
    kinds = small.kinds(schema)
    given = {flag: f"{flag.removeprefix('--')}=true" for flag in flags if kinds.get(flag.removeprefix("--")) == "bool"}
    words.check_flags([flag for flag in flags if flag not in given])
    for flag in flags:
        if (name := flag.lstrip("-").partition("=")[0]) in kinds and flag not in given:
            raise ValueError("words have no dashes", flag, f"write {name}=<value>")
        if flag not in given:
            raise ValueError("no such flag", flag, "--help shows the words")
    for word in typed:
        if word.startswith("resume=") and word != "resume=null":
            raise ValueError("this command continues no run", word, "give the words the run was started with; they stand in its .hydra/overrides.yaml")
    own = [word for word in typed if word.partition("=")[0] in kinds]
    return own + list(given.values()), [word for word in typed if word not in own]
