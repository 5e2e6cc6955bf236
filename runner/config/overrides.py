"""The words of a command line, checked against the schema before anything is composed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean
from common.paths import CONF_DIR
from runner.config.schema import config_groups, config_schema

PATH_KEYS = ("data.path", "data.val_path", "data.tokenizer", "init_from")  # relative to where they are typed, wherever the run is resumed
INTEGER_IN_SCIENTIFIC_NOTATION = re.compile(r"\d+(\.\d+)?e\+?\d+")  # 1e3


def normalize_int(word: str) -> str:
    """`train.max_steps=1e3` as `train.max_steps=1000`: Hydra reads 1e3 as a float and refuses it where a whole number is meant."""
    name, equals, value = word.partition("=")
    if config_schema().get(name) is not int:
        return word
    return (
        name
        + equals
        + ",".join(str(int(float(part))) if INTEGER_IN_SCIENTIFIC_NOTATION.fullmatch(part) and float(part).is_integer() else part for part in value.split(","))
    )


def canonical_value(word: str, value: str) -> object:
    """What is the same for two ways of writing one value: 0 and 0.0 where a number is meant, 1 and 01."""
    kind = config_schema().get(word)
    try:
        return kind(value) if kind in (int, float) else value
    except ValueError:  # refused where it is composed
        return value


def check_overrides(words: list[str], conf: Path = CONF_DIR) -> None:
    """Refuse a word that nothing would read. Hydra lets `+train.typo=1` pass in silence."""
    for word in words:
        if "=" not in word:
            if not word.startswith("~"):
                raise UserError("a word needs a value", word, f"write {word}=<value>; python runner/train.py --help lists the words")
            raise UserError("a setting cannot be taken away", word, "give it a value instead, e.g. null")
        key, value = word.split("=", 1)
        name = key.lstrip("+")
        if name.startswith(("hydra.", "hydra/")):
            continue
        if name in config_groups(conf):
            _check_options(name, value, config_groups(conf)[name])
        elif name not in config_schema():
            raise UserError("no such word", name, nearest_key(name))
        elif key.startswith("+"):
            raise UserError("the word is there already, it needs no +", word, f"write {word.lstrip('+')}")


def _check_options(group: str, value: str, options: list[str]) -> None:
    for option in value.split(","):
        if option.strip() not in options and not (group == "experiment" and option == "null") and "(" not in value:
            hint = did_you_mean(option, options, "")
            raise UserError(f"no such {group}", f"{group}={option}", f"{hint} the options are {', '.join(options)}".strip())


def nearest_key(name: str) -> str:
    """The nearest whole word; failing that, a known word that ends alike: lr -> optimizer.lr."""
    last = name.rsplit(".", 1)[-1]
    same = [word for word in config_schema() if word.rsplit(".", 1)[-1] == last]
    if same:
        return f"did you mean {same[0]}?"
    return did_you_mean(name, [*config_schema(), *config_groups()], "python runner/train.py --help lists the words")


def absolutize_paths(words: list[str]) -> list[str]:
    """Paths as seen from here, so that they mean the same wherever the run is continued from."""
    return [_absolutize(word) for word in words]


def _absolutize(word: str) -> str:
    key, _, value = word.partition("=")
    if key not in PATH_KEYS:
        return word
    if value.startswith("[") or ("," in value and not os.path.exists(value)) or value.startswith("choice("):
        return f"{key}={_absolutize_items(_parse_value(word))}"
    placed = _absolutize_path(value)
    return word if placed == value and not os.path.exists(value) else f"{key}={_is_unquoted(placed)}"


def _absolutize_items(value: Any) -> str:
    """A list, a sweep, or one path of them."""
    if isinstance(value, list):
        return f"[{','.join(map(_absolutize_items, value))}]"
    if hasattr(value, "list"):
        return ",".join(map(_absolutize_items, value.list))
    if isinstance(value, str) and value.startswith("${"):
        return value
    return "null" if value is None else _is_unquoted(_absolutize_path(str(getattr(value, "text", value))))


def _is_unquoted(path: str) -> str:
    """As a word's value: in quotes where Hydra would read more than a path."""
    return path if re.fullmatch(r"[\w./:@+-]+", path) else hydra_quote(path)


def _absolutize_path(path: str) -> str:
    """A path, or a pattern of paths, as seen from the root; anything else as it is."""
    if path.startswith(("/", "$", "~", "'", '"')):
        return path
    is_pattern = any(sign in path for sign in "*?") and os.path.isdir(os.path.dirname(path) or ".")
    return os.path.abspath(path) if is_pattern or os.path.exists(path) else path


def _parse_value(word: str) -> Any:
    """A list or a sweep, as Hydra reads it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word).value()
    except HydraException as error:
        raise UserError("this list cannot be read", word, "put quotes around what holds commas, spaces or brackets") from error


def hydra_quote(value: str) -> str:
    """A Hydra string whose value is `value`, to the character: backslashes are doubled only before something special, as both grammars ask."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not an interpolation
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", value) + "'"
