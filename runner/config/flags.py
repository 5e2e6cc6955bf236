"""FIXME runner.config.flags."""

from __future__ import annotations

import re

from common.errors import UserError
from runner.config.schema import config_groups, config_schema

INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
INFO_FLAGS = ("--info", "-i")
LONG_FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--shell-completion",
    "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
)  # fmt: skip
VALUE_FLAGS = {"-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir", "-p", "--package", "-c", "--cfg", "--experimental-rerun"}


def split_argv(argv: list[str]) -> tuple[list[str], list[str]]:
    """(words, flags): `key=value` and `group=option` on one side, Hydra's own flags with their values on the other."""
    words: list[str] = []
    flags: list[str] = []
    argv = [_expand_flag(arg) for arg in argv]
    for before, arg, after in zip(["", *argv], argv, [*argv[1:], ""], strict=False):
        if arg in INFO_FLAGS and after not in INFO_TOPICS:
            arg = "--info=all"  # Hydra would take the next word for what is asked about
        is_value = before in VALUE_FLAGS or (before in INFO_FLAGS and arg in INFO_TOPICS)
        (flags if arg.startswith("-") or is_value else words).append(arg)
    return words, flags


def _expand_flag(arg: str) -> str:
    """A flag as it is called: Hydra takes --multi and -cjob too, and we would not see what is asked for."""
    name, equals, value = arg.partition("=")
    if short := re.fullmatch(r"-(?:c(job|hydra|all)|i(all|config|defaults|defaults-tree|plugins|searchpath))", arg):
        return f"--cfg={short[1]}" if short[1] else f"--info={short[2]}"
    meant = [flag for flag in LONG_FLAGS if flag.startswith(name)] if len(name) > 2 else []
    return f"{meant[0]}{equals}{value}" if len(meant) == 1 else arg


def flag_value(flags: list[str], *names: str) -> str | None:
    """What a flag was given: `--cfg job`, `--cfg=job` or `-cjob`."""
    for flag, after in zip(flags, [*flags[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        if name in names:
            return value if equals else after
    return None


def check_no_dashed_settings(flags: list[str]) -> None:
    """Refuse `--epochs 3`, as other programs write it; flags that are no words of ours are Hydra's to judge."""
    for flag in flags:
        name, equals, value = flag.lstrip("-").partition("=")
        for word in [*config_schema(), *config_groups()] if flag.startswith("--") else []:
            if name.replace("-", "_") in (word, word.rsplit(".", 1)[-1]):
                raise UserError("words have no dashes", flag, f"write {word}={value or '<value>'}")
