"""Settings of the config dataclasses: limits of their values, and which of them may change on resume.

Each field says what a changed value means for a run that is resumed from a checkpoint:

    @settings_class
    class TrainConfig(CheckedSettings):
        SECTION = "train"

        epochs: int = at_least(1, resume=CHANGES_TRAINING)  # passes over the data

ignored           no number of the training depends on it
changes_training  allowed and recorded; the training differs from here on, and is exactly reproducible
changes_rounding  allowed and recorded as exact: false; the same mathematics, summed in another order
incompatible      refused: it would be another run
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, dataclass_transform

from common.errors import UserError, did_you_mean

OnResume = Literal["ignored", "changes_training", "changes_rounding", "incompatible"]

# A field without a rule of its own has the attribute ON_RESUME of its class, or incompatible.
IGNORED: Mapping[str, OnResume] = MappingProxyType({"on_resume": "ignored"})
CHANGES_TRAINING: Mapping[str, OnResume] = MappingProxyType({"on_resume": "changes_training"})
CHANGES_ROUNDING: Mapping[str, OnResume] = MappingProxyType({"on_resume": "changes_rounding"})
INCOMPATIBLE: Mapping[str, OnResume] = MappingProxyType({"on_resume": "incompatible"})


class Limit(NamedTuple):
    """Values that a setting may have."""

    text: str  # what follows "must be"
    allows: Callable[[Any], bool]
    example: object
    choices: Collection[str] = ()

    def check(self, setting: str, value: object) -> None:
        if not self.allows(value):
            fix = did_you_mean(str(value), self.choices, f"e.g. {setting}={self.example}")
            raise UserError(f"{setting} must be {self.text}, got {value}", f"{setting}={value}", fix)


class CheckedSettings:
    """Base class of config dataclasses, which checks the limits of the fields. A nullable setting may be null."""

    SECTION = ""  # dotted key; "" for the top level and the settings of a command

    def __post_init__(self) -> None:
        for name, setting in _limited_fields(type(self)).items():  # type: ignore[arg-type]  # classes are hashable
            value = getattr(self, name)
            if value is not None or not re.search("Optional|None", str(setting.type)):
                setting.metadata["limit"].check(f"{self.SECTION}.{name}".strip("."), value)


@cache
def _limited_fields(config_class: type) -> dict[str, Any]:
    """Return the fields with a limit. A class that declares one again, with a default, has the limit of its base."""
    classes = reversed(config_class.__mro__)
    declared = [item for cls in classes for item in vars(cls).get("__dataclass_fields__", {}).items()]
    return {name: setting for name, setting in declared if "limit" in setting.metadata}


def limited(limit: Limit, resume: Mapping[str, OnResume] = MappingProxyType({}), **options: Any) -> Any:
    """Return a field with a limit. `resume`: its rule, e.g. IGNORED; `options`: of dataclasses.field."""
    return field(metadata={"limit": limit, **resume}, **options)


def at_least(minimum: float, example: object = None, **options: Any) -> Any:
    example = minimum if example is None else example
    return within(f"[{minimum}, inf]", example, f"at least {minimum}", **options)


def within(interval: str, example: object, text: str = "", **options: Any) -> Any:
    """`interval`: "[0, 1)" is 0 <= value < 1."""
    low, high = map(float, interval[1:-1].split(","))
    excluded = [low] * ("(" in interval) + [high] * (")" in interval)
    limit = Limit(text or f"in {interval}", lambda value: low <= value <= high and value not in excluded, example)
    return limited(limit, **options)


def one_of(*allowed: str, **options: Any) -> Any:
    return limited(Limit(f"one of {', '.join(allowed)}", allowed.__contains__, allowed[0], allowed), **options)


if TYPE_CHECKING:  # `at_least`, `within` and `one_of` are no defaults, as `field` is none

    @dataclass_transform(field_specifiers=(field, limited, at_least, within, one_of))
    def settings_class(cls: Any) -> Any: ...

else:
    settings_class = dataclass


def flat_settings(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each setting of a mapping; an empty section is a value."""
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from flat_settings(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def as_typed(value: Any) -> str:
    """Return a value as it is typed in an override: null, true, 0.001."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def setting_values(config: Any) -> dict[str, Any]:
    """Return dotted key -> value of every setting of a config dataclass and the sections below it."""
    return {key: value for key, value, _ in _iter_settings(config, "") if not dataclasses.is_dataclass(value)}


def resume_rules(config: Any) -> dict[str, str]:
    """Return dotted key -> rule of every setting, and of every section: the rule of settings which only another class
    of it has.
    """
    return {key: rule for key, _, rule in _iter_settings(config, "")}


def _iter_settings(section: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, value, rule) of a section, and of the settings and sections in it."""
    default: str = getattr(section, "ON_RESUME", "incompatible")
    yield prefix.removesuffix("."), section, default
    for setting in dataclasses.fields(section):
        key, value = prefix + setting.name, getattr(section, setting.name)
        if dataclasses.is_dataclass(value):
            yield from _iter_settings(value, f"{key}.")
        else:
            yield key, value, setting.metadata.get("on_resume", default)


def field_comments(config_class: type) -> dict[str, str]:
    """Return the comment behind or above each field, which describes the setting, and its limit, with the fields of base
    classes.
    """
    comments: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        above: list[str] = []
        for line in inspect.getsource(cls).splitlines() if "__dataclass_fields__" in vars(cls) else ():
            if field := re.match(r"    (\w+): [^#]*(?:# (.*))?$", line):
                comments[field[1]] = field[2] or " ".join(above)
            above = [*above, line.removeprefix("    # ")] if line.startswith("    # ") else []
    for name, setting in _limited_fields(config_class).items():
        limit = setting.metadata["limit"]
        # the comment says what each choice means; a number of things is never negative
        if not limit.choices and limit.text != "at least 0":
            comments[name] += f"; {limit.text}"
    return comments


def check_choice(setting: str, value: object, allowed: Collection[str]) -> None:
    one_of(*allowed).metadata["limit"].check(setting, value)


def check_at_least(setting: str, value: float, minimum: float, example: object) -> None:
    """`example`: an allowed value, for the fix."""
    at_least(minimum, example).metadata["limit"].check(setting, value)


def check_installed(package: str, setting: str, fix: str = "") -> None:
    """Raise UserError if the package that `setting` needs is missing. `fix`: "" for that of the extra of its name."""
    if find_spec(package) is None:
        fix = fix or f"pip install 'lm-runner[{package}]'"
        raise UserError(f"{setting} needs the package {package}, which is not installed", setting, fix)
