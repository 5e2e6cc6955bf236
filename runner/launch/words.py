"""The words of a command line, checked against the schema before anything is composed."""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from runner.engine.config import Config
from runner.launch.refusal import nearest

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PATHS = ("data.path", "data.val_path", "data.tokenizer", "init_from")  # relative to where they are typed, wherever the run is resumed
WHOLE = re.compile(r"\d+(\.\d+)?e\+?\d+")  # 1e3
ABOUT = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
INFO = ("--info", "-i")
LONG = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--shell-completion",
    "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
)  # fmt: skip
VALUE_FLAGS = {"-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir", "-p", "--package", "-c", "--cfg", "--experimental-rerun"}


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """(words, flags): `key=value` and `group=option` on one side, Hydra's own flags with their values on the other."""
    words: list[str] = []
    flags: list[str] = []
    argv = [_in_full(arg) for arg in argv]
    for before, arg, after in zip(["", *argv], argv, [*argv[1:], ""], strict=False):
        if arg in INFO and after not in ABOUT:
            arg = "--info=all"  # Hydra would take the next word for what is asked about
        is_value = before in VALUE_FLAGS or (before in INFO and arg in ABOUT)
        (flags if arg.startswith("-") or is_value else words).append(arg)
    return words, flags


def _in_full(arg: str) -> str:
    """A flag as it is called: Hydra takes --multi and -cjob too, and we would not see what is asked for."""
    name, equals, value = arg.partition("=")
    if short := re.fullmatch(r"-(?:c(job|hydra|all)|i(all|config|defaults|defaults-tree|plugins|searchpath))", arg):
        return f"--cfg={short[1]}" if short[1] else f"--info={short[2]}"
    meant = [flag for flag in LONG if flag.startswith(name)] if len(name) > 2 else []
    return f"{meant[0]}{equals}{value}" if len(meant) == 1 else arg


def value_of(flags: list[str], *names: str) -> str | None:
    """What a flag was given: `--cfg job`, `--cfg=job` or `-cjob`."""
    for flag, after in zip(flags, [*flags[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        if name in names:
            return value if equals else after
    return None


def check_flags(flags: list[str]) -> None:
    """Refuse `--epochs 3`, as other programs write it; flags that are no words of ours are Hydra's to judge."""
    for flag in flags:
        name, equals, value = flag.lstrip("-").partition("=")
        for word in [*schema(), *groups()] if flag.startswith("--") else []:
            if name.replace("-", "_") in (word, word.rsplit(".", 1)[-1]):
                raise ValueError("words have no dashes", flag, f"write {word}={value or '<value>'}")


def whole(word: str) -> str:
    """`train.max_steps=1e3` as `train.max_steps=1000`: Hydra reads 1e3 as a float and refuses it where a whole number is meant."""
    name, equals, value = word.partition("=")
    if schema().get(name) is not int:
        return word
    return name + equals + ",".join(str(int(float(part))) if WHOLE.fullmatch(part) and float(part).is_integer() else part for part in value.split(","))


@cache
def schema() -> dict[str, Any]:
    """Every dotted word and its type; a section stands there too, with its dataclass."""
    return dict(_walk(Config, ""))


def _walk(section: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, kind in typing.get_type_hints(section).items():
        inner = _without_none(kind)
        yield prefix + name, inner
        if dataclasses.is_dataclass(inner):
            yield from _walk(typing.cast(type, inner), f"{prefix}{name}.")


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def meant(word: str, value: str) -> object:
    """What is the same for two ways of writing one value: 0 and 0.0 where a number is meant, 1 and 01."""
    kind = schema().get(word)
    try:
        return kind(value) if kind in (int, float) else value
    except ValueError:  # refused where it is composed
        return value


@cache
def groups(conf: Path = CONF) -> dict[str, list[str]]:
    """{"precision": ["bf16", "fp16", "fp32"], ...}: the folders of conf/ and their files."""
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in sorted(conf.iterdir()) if folder.is_dir() and folder.name != "hydra"}


def check(words: list[str], conf: Path = CONF) -> None:
    """Refuse a word that nothing would read. Hydra lets `+train.typo=1` pass in silence."""
    for word in words:
        if "=" not in word:
            if not word.startswith("~"):
                raise ValueError("a word needs a value", word, f"write {word}=<value>; python runner/train.py --help lists the words")
            raise ValueError("a setting cannot be taken away", word, "give it a value instead, e.g. null")
        key, value = word.split("=", 1)
        name = key.lstrip("+")
        if name.startswith(("hydra.", "hydra/")):
            continue
        if name in groups(conf):
            _check_options(name, value, groups(conf)[name])
        elif name not in schema():
            raise ValueError("no such word", name, nearest_word(name))
        elif key.startswith("+"):
            raise ValueError("the word is there already, it needs no +", word, f"write {word.lstrip('+')}")


def _check_options(group: str, value: str, options: list[str]) -> None:
    for option in value.split(","):
        if option.strip() not in options and not (group == "experiment" and option == "null") and "(" not in value:
            hint = nearest(option, options, "")
            raise ValueError(f"no such {group}", f"{group}={option}", f"{hint} the options are {', '.join(options)}".strip())


def nearest_word(name: str) -> str:
    """The nearest whole word; failing that, a known word that ends alike: lr -> optimizer.lr."""
    last = name.rsplit(".", 1)[-1]
    same = [word for word in schema() if word.rsplit(".", 1)[-1] == last]
    if same:
        return f"did you mean {same[0]}?"
    return nearest(name, [*schema(), *groups()], "python runner/train.py --help lists the words")


def absolute(words: list[str]) -> list[str]:
    """Paths as seen from here, so that they mean the same wherever the run is continued from."""
    return [_absolute(word) for word in words]


def _absolute(word: str) -> str:
    key, _, value = word.partition("=")
    if key not in PATHS:
        return word
    if value.startswith("[") or ("," in value and not os.path.exists(value)) or value.startswith("choice("):
        return f"{key}={_placed_parts(_parsed(word))}"
    placed = _placed(value)
    return word if placed == value and not os.path.exists(value) else f"{key}={_plain(placed)}"


def _placed_parts(value: Any) -> str:
    """A list, a sweep, or one path of them."""
    if isinstance(value, list):
        return f"[{','.join(map(_placed_parts, value))}]"
    if hasattr(value, "list"):
        return ",".join(map(_placed_parts, value.list))
    if isinstance(value, str) and value.startswith("${"):
        return value
    return "null" if value is None else _plain(_placed(str(getattr(value, "text", value))))


def _plain(path: str) -> str:
    """As a word's value: in quotes where Hydra would read more than a path."""
    return path if re.fullmatch(r"[\w./:@+-]+", path) else quoted(path)


def _placed(path: str) -> str:
    """A path, or a pattern of paths, as seen from the root; anything else as it is."""
    if path.startswith(("/", "$", "~", "'", '"')):
        return path
    is_pattern = any(sign in path for sign in "*?") and os.path.isdir(os.path.dirname(path) or ".")
    return os.path.abspath(path) if is_pattern or os.path.exists(path) else path


def _parsed(word: str) -> Any:
    """A list or a sweep, as Hydra reads it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word).value()
    except HydraException as error:
        raise ValueError("this list cannot be read", word, "put quotes around what holds commas, spaces or brackets") from error


def quoted(value: str) -> str:
    """A Hydra string whose value is `value`, to the character: backslashes are doubled only before something special, as both grammars ask."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not an interpolation
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", value) + "'"
