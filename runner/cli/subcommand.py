"""The commands beside train.py: settings of their own in conf/<name>.yaml, and no run directory.

A command is a file in runner/ whose docstring begins with what it does and a line that runs, a YAML file in conf/, and
a dataclass:

    run_subcommand("chat", ChatConfig, chat)
"""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import UserError, did_you_mean, exiting_with_code, ignore_broken_pipe
from runner.cli import help, hydra_app
from runner.config import overrides
from runner.config.compose import check_no_missing, compose_command
from runner.config.hydra_errors import value_error
from runner.config.literals import COLUMNS_KEY, hydra_quote, literal_path, quote_columns
from runner.config.overrides import Flags, parse_argv, spell_flags
from runner.config.resolve import resolve_model_overrides
from runner.config.schema import config_groups, config_schema, iter_fields
from runner.engine.device.signals import CtrlC
from runner.engine.device.spinning import adapt_spinning, set_wait_policy
from runner.launch.initial_weights import compose_with_model, resolve_start

T = TypeVar("T")


def run_subcommand(
    name: str,
    schema: type[T],
    action: Callable[..., Any],
    with_train_config: bool = False,
    passes_overrides: bool = False,
    start_of: Callable[[list[str], Flags], Any] | None = None,
) -> None:
    """Call `action` with the settings of the command line; `with_train_config`: and with the config of a run, whose
    settings may be given too. `unread` of the settings: those that they do not read -> what reads them.

    `passes_overrides`: with the checked overrides of train.py instead of their config. `start_of`: with what this
    function of (overrides, flags) returns instead; resume= and --multirun are then allowed. Exits with the code of
    common/errors.py unless the action returns.
    """
    set_wait_policy()
    ignore_broken_pipe()
    kinds = value_kinds(schema)
    with exiting_with_code(), CtrlC(), adapt_spinning():
        typed, flags = _parse(sys.argv[1:], kinds, with_train_config)
        if "--help" in flags:
            return print(help.subcommand_help(name, schema, with_train_config))
        own = quote_free_text([override for override in typed if overrides.key_of(override) in kinds], kinds)
        others = [override for override in typed if overrides.key_of(override) not in kinds]
        others = resolve_model_overrides(overrides.prepare_overrides(others, flags.get("--config-dir")))
        if not with_train_config and flags.keys() & hydra_app.PRINT_FLAGS:
            return hydra_app.run_hydra([*own, *others], flags, config_name=name)
        allowed = ("--config-dir",) if start_of is None else ("--config-dir", "--multirun")
        if unknown := spell_flags({flag: value for flag, value in flags.items() if flag not in allowed}):
            raise UserError(f"{name}.py has no flag {unknown[0]}", unknown[0], "--help lists the settings and flags")
        for override in own:
            _check_override(override, kinds)
        if not with_train_config:
            _check_all_known(name, typed, kinds)
        if start_of is None and (resumed := overrides.take_resume(others)[1]) is not None:
            raise UserError(
                f"{name}.py does not resume a run",
                f"resume={resumed}",
                "give the overrides of the run, which are in its .hydra/overrides.yaml",
            )
        settings = to_schema(compose_command(name, own), schema, own)
        for override in own:
            key = overrides.key_of(override)
            if reader := getattr(settings, "unread", {}).get(key):
                raise UserError(f"{key} is not read", override, f"{reader} reads it; or leave it out")
        if not with_train_config:
            action(settings)
        elif start_of is not None:
            action(settings, start_of(others, flags))
        else:
            start = compose_with_model(others)
            action(settings, others if passes_overrides else resolve_start(start))


def _parse(argv: list[str], kinds: dict[str, str], with_train_config: bool) -> tuple[list[str], Flags]:
    """Return (overrides, flags); `--key` is short for `key=true`."""
    switches = {f"--{key}": f"{key}=true" for key, kind in kinds.items() if kind == "bool"}
    settings = [*kinds, *([*config_schema(), *config_groups()] if with_train_config else [])]
    for index, arg in enumerate(argv):
        flag, _, value = arg.removeprefix("--").partition("=")
        key = flag.replace("-", "_")
        # also where Hydra has a flag of this name: --run
        if arg.startswith("--") and key in kinds and arg not in switches:
            value = value or next(
                (following for following in argv[index + 1 : index + 2] if not following.startswith("-")), "<value>"
            )
            raise UserError(f"{arg} is not a flag; settings are given without dashes", arg, f"{key}={value}")
    return parse_argv([switches.get(arg, arg) for arg in argv], settings)


def to_schema(tree: DictConfig, schema: type[T], typed: Sequence[str] = ()) -> T:
    """Return the settings in `tree` as the dataclass `schema`, whose own checks run here.

    Raises UserError, about one of the overrides `typed`.
    """
    check_no_missing(tree)
    try:
        return typing.cast(T, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), tree)))
    except OmegaConfBaseException as error:
        key = (error.full_key or "?").partition("[")[0]
        override = next((override for override in reversed(typed) if overrides.key_of(override) == key), key)
        message, kind = str(error).splitlines()[0], value_kinds(schema).get(key, "")
        raise value_error(key, kind, message, override) or UserError(message, override, f"{key}=<value>") from error


def quote_free_text(typed: list[str], kinds: dict[str, str]) -> list[str]:
    """Return the overrides with quoted values of text settings: Hydra's grammar refuses the comma in `yes, but` and the
    quote in `what's`.

    `key=null` stays null. A list setting may be given one value for a list of one; a value in brackets is a list
    already.
    """
    return [_quote(override, kinds.get(override.partition("=")[0], "")) for override in typed]


def _quote(override: str, kind: str) -> str:
    key, equals, value = override.partition("=")
    if key == COLUMNS_KEY and value != "null":
        return quote_columns(override)
    if not equals or value == "null" or kind not in ("str", "list"):
        return override
    if kind == "str":
        return f"{key}={hydra_quote(value)}"
    if value.startswith("[") and value.endswith("]") and not os.path.exists(value):
        return literal_path(override) if key == "path" else override
    return f"{key}=[{hydra_quote(value)}]"


def _check_override(override: str, kinds: dict[str, str]) -> None:
    key, equals, _ = override.partition("=")
    if not equals or override[0] in "+~":
        raise UserError("a setting is given as key=value", override, f"{overrides.key_of(override)}=<value>")
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise UserError(
            "this value cannot be parsed", override, f"quote it, in a list each item: '{key}=[\"what's, new\"]'"
        ) from error
    if parsed.is_sweep_override():
        fix = f"call the command once for each{', or write a list: [a,b]' if kinds[key] == 'list' else ''}"
        raise UserError(f"{key} takes one value", override, fix)


def _check_all_known(name: str, typed: list[str], kinds: dict[str, str]) -> None:
    for override in typed:
        key, value = overrides.key_of(override), override.partition("=")[2]
        if key not in (*kinds, overrides.PLUGINS_KEY, overrides.SEARCHPATH_KEY):
            overrides.check_not_renamed(key, value)
            raise UserError(
                f"{name}.py has no setting {key}", key, did_you_mean(key, kinds, f"the settings are {', '.join(kinds)}")
            )


def value_kinds(schema: type) -> dict[str, str]:
    """Return the type of every setting by its dotted key: str, int, float, bool or list."""
    return {
        key: getattr(typing.get_origin(kind) or kind, "__name__", str(kind))
        for key, kind in iter_fields(schema, "")
        if not dataclasses.is_dataclass(kind)
    }
