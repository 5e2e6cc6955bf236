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

from runner.launch import help
from runner.launch.compose import register
from runner.launch.folders import finished_runs
from runner.launch.origin import share_the_machine
from runner.launch.refusal import is_refusal, nearest, report
from runner.launch.words import ROOT, quoted, split

T = TypeVar("T")


def start(main: Callable[[], Any], schema: type, free: tuple[str, ...]) -> None:
    """Check the words of this command line, then hand it to Hydra. The values of `free` are taken as they are typed."""
    share_the_machine()
    register()
    if {"--help", "-h"} & set(sys.argv[1:]):
        module = sys.modules[main.__module__]
        return print(help.command(Path(str(module.__file__)).stem, module.__doc__ or ""))
    sys.argv[1:] = literal(sys.argv[1:], free, tuple(word for word, kind in kinds(schema).items() if kind == "list"))
    with refusing():
        for word in split(sys.argv[1:])[0]:
            _check(word, schema)
        main()


class refusing:
    """A refusal ends the program in three lines and with its exit code, before Hydra makes a traceback of it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and is_refusal(error):
            sys.exit(report(error))


def typed(tree: DictConfig, schema: type[T]) -> T:
    """Hydra's tree as `schema`, whose own checks run here."""
    if missing := sorted(OmegaConf.missing_keys(tree)):
        raise ValueError("this word has no value yet", missing[0], f"add {missing[0]}=<value>")
    try:
        return typing.cast(T, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), tree)))
    except OmegaConfBaseException as error:
        word = (getattr(error, "full_key", None) or "?").partition("[")[0]
        raise ValueError(str(error).splitlines()[0], word, f"give it as {kinds(schema).get(word, 'conf/ does')}") from error


def find(run: str) -> Path:
    """The folder meant by `run=`; `last` is the run whose model was finished last."""
    if run != "last":
        return Path(run)
    finished = [folder / "model" for folder in finished_runs(ROOT / "outputs") if (folder / "model").is_dir()]
    if not finished:
        raise ValueError("no run has finished a model yet", "run=last", "train one: python runner/train.py")
    return max(finished, key=lambda model: model.stat().st_mtime).parent


def literal(arguments: list[str], words: tuple[str, ...], lists: tuple[str, ...] = ()) -> list[str]:
    """The same arguments with the values of `words` quoted: Hydra would stumble over the comma in "yes, but" and the quote in "what's".

    `word=null` stays null. A word of `lists` may be given one value for a list of one; a value in brackets is a list already.
    """
    return [_literal(argument, lists) if argument.partition("=")[0] in words else argument for argument in arguments]


def _literal(argument: str, lists: tuple[str, ...]) -> str:
    word, equals, value = argument.partition("=")
    if not equals or value == "null":
        return argument
    if word not in lists:
        return f"{word}={quoted(value)}"
    return argument if value.startswith("[") and value.endswith("]") else f"{word}=[{quoted(value)}]"


def _check(word: str, schema: type) -> None:
    name, equals, _ = word.partition("=")
    if name.startswith(("hydra.", "hydra/")):
        return
    if not equals:
        raise ValueError("a word needs a value", word, f"write {word}=<value>")
    if name not in kinds(schema):
        raise ValueError("no such word", name, nearest(name, kinds(schema), f"the words are {', '.join(kinds(schema))}"))
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ValueError("this value cannot be read", word, f"put quotes around it, around each part of a list: '{name}=[\"what's, new\"]'") from error
    if override.is_sweep_override():
        raise ValueError(
            "several values where one is meant", word, f"call the command once for each{', or write a list: [a,b]' if kinds(schema)[name] == 'list' else ''}"
        )


def kinds(schema: type) -> dict[str, str]:
    """Every dotted word that takes a value, and what kind of value."""
    return dict(_walk(schema, ""))


def _walk(section: type, prefix: str) -> Iterator[tuple[str, str]]:
    for name, kind in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            yield prefix + name, getattr(kind, "__name__", str(kind))
