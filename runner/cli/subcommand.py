"""The small commands: one flat conf/<command>.yaml, no run folder, words checked and typed like those of a run."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import UserError, did_you_mean, is_user_error, report_user_error
from common.paths import outputs_dir
from runner.cli import help
from runner.config.compose import register_configs
from runner.config.flags import split_argv
from runner.config.overrides import hydra_quote
from runner.engine.device.cpu import set_passive_omp_wait
from runner.run_dir.naming import find_runs

T = TypeVar("T")


def run_subcommand(main: Callable[[], Any], schema: type, free: tuple[str, ...]) -> None:
    """Check the words of this command line, then hand it to Hydra. The values of `free` are taken as they are typed."""
    set_passive_omp_wait()
    register_configs()
    if {"--help", "-h"} & set(sys.argv[1:]):
        module = sys.modules[main.__module__]
        return print(help.subcommand_help(Path(str(module.__file__)).stem, module.__doc__ or ""))
    sys.argv[1:] = quote_free_text(sys.argv[1:], free, tuple(word for word, kind in value_kinds(schema).items() if kind == "list"))
    with reporting_user_errors():
        for word in split_argv(sys.argv[1:])[0]:
            _check_override(word, schema)
        main()


class reporting_user_errors:
    """A refusal ends the program in three lines and with its exit code, before Hydra makes a traceback of it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and is_user_error(error):
            sys.exit(report_user_error(error))


def to_schema(tree: DictConfig, schema: type[T]) -> T:
    """Hydra's tree as `schema`, whose own checks run here."""
    if missing := sorted(OmegaConf.missing_keys(tree)):
        raise UserError("this word has no value yet", missing[0], f"add {missing[0]}=<value>")
    try:
        return typing.cast(T, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), tree)))
    except OmegaConfBaseException as error:
        word = (getattr(error, "full_key", None) or "?").partition("[")[0]
        raise UserError(str(error).splitlines()[0], word, f"give it as {value_kinds(schema).get(word, 'conf/ does')}") from error


def resolve_model_run(run: str) -> Path:
    """The folder meant by `run=`; `last` is the run whose model was finished last."""
    if run != "last":
        return Path(run)
    finished = [folder / "model" for folder in find_runs(outputs_dir()) if (folder / "model").is_dir()]
    if not finished:
        raise UserError("no run has finished a model yet", "run=last", "train one: python runner/train.py")
    return max(finished, key=lambda model: model.stat().st_mtime).parent


def quote_free_text(arguments: list[str], words: tuple[str, ...], lists: tuple[str, ...] = ()) -> list[str]:
    """The same arguments with the values of `words` quoted: Hydra would stumble over the comma in "yes, but" and the quote in "what's".

    `word=null` stays null. A word of `lists` may be given one value for a list of one; a value in brackets is a list already.
    """
    return [_quote_free_text(argument, lists) if argument.partition("=")[0] in words else argument for argument in arguments]


def _quote_free_text(argument: str, lists: tuple[str, ...]) -> str:
    word, equals, value = argument.partition("=")
    if not equals or value == "null":
        return argument
    if word not in lists:
        return f"{word}={hydra_quote(value)}"
    return argument if value.startswith("[") and value.endswith("]") else f"{word}=[{hydra_quote(value)}]"


def _check_override(word: str, schema: type) -> None:
    name, equals, _ = word.partition("=")
    if name.startswith(("hydra.", "hydra/")):
        return
    if not equals:
        raise UserError("a word needs a value", word, f"write {word}=<value>")
    if name not in value_kinds(schema):
        raise UserError("no such word", name, did_you_mean(name, value_kinds(schema), f"the words are {', '.join(value_kinds(schema))}"))
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise UserError("this value cannot be read", word, f"put quotes around it, around each part of a list: '{name}=[\"what's, new\"]'") from error
    if override.is_sweep_override():
        raise UserError(
            "several values where one is meant",
            word,
            f"call the command once for each{', or write a list: [a,b]' if value_kinds(schema)[name] == 'list' else ''}",
        )


def value_kinds(schema: type) -> dict[str, str]:
    """Every dotted word that takes a value, and what kind of value."""
    return dict(_iter_kinds(schema, ""))


def _iter_kinds(section: type, prefix: str) -> Iterator[tuple[str, str]]:
    for name, kind in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(kind):
            yield from _iter_kinds(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            yield prefix + name, getattr(kind, "__name__", str(kind))
