"""Settings of the config dataclasses: checks of their values, and what a changed value means for a run that is resumed
from a checkpoint.

ignored           no number of the training depends on it
changes_training  allowed and recorded; the training differs from here on, and is exactly reproducible
changes_rounding  allowed and recorded as exact: false; the same mathematics, summed in another order
incompatible      refused: it would be another run
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

from common.errors import UserError, did_you_mean

OnResume = Literal["ignored", "changes_training", "changes_rounding", "incompatible"]

# Rule of one field: `log_every: int = field(metadata=IGNORED)`. Other fields have the attribute ON_RESUME of their
# class, or incompatible.
IGNORED: Mapping[str, OnResume] = MappingProxyType({"on_resume": "ignored"})
CHANGES_TRAINING: Mapping[str, OnResume] = MappingProxyType({"on_resume": "changes_training"})
CHANGES_ROUNDING: Mapping[str, OnResume] = MappingProxyType({"on_resume": "changes_rounding"})
INCOMPATIBLE: Mapping[str, OnResume] = MappingProxyType({"on_resume": "incompatible"})


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


def setting_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of every setting of a config dataclass and the sections below it."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_section = dataclasses.is_dataclass(value)
        values |= setting_values(value, f"{prefix}{field.name}.") if is_section else {prefix + field.name: value}
    return values


def resume_rules(config: Any, prefix: str = "") -> dict[str, str]:
    """Return dotted key -> rule of every setting, and of every section: the rule of settings which only another class
    of it has.
    """
    default: str = getattr(config, "ON_RESUME", "incompatible")
    rules = {prefix.removesuffix("."): default}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_section = dataclasses.is_dataclass(value)
        own = {prefix + field.name: field.metadata.get("on_resume", default)}
        rules |= resume_rules(value, f"{prefix}{field.name}.") if is_section else own
    return rules


def field_comments(config_class: type) -> dict[str, str]:
    """Return the comment behind or above each field, which describes the setting, with the fields of base classes."""
    comments: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        above: list[str] = []
        for line in inspect.getsource(cls).splitlines() if "__dataclass_fields__" in vars(cls) else ():
            if field := re.match(r"    (\w+): [^#]*(?:# (.*))?$", line):
                comments[field[1]] = field[2] or " ".join(above)
            above = [*above, line.removeprefix("    # ")] if line.startswith("    # ") else []
    return comments


def check_settings(
    section: str, config: object, keys: Iterable[str], check: Callable[..., None], *limits: object
) -> None:
    """Call `check` for several settings of a section with the same limits."""
    for key in keys:
        check(f"{section}.{key}", getattr(config, key), *limits)


def check_choices(section: str, config: object, choices: Mapping[str, Collection[str]]) -> None:
    """Refuse a value of a section that is not among the `choices` of its setting."""
    for key, allowed in choices.items():
        check_choice(f"{section}.{key}", getattr(config, key), allowed)


def check_choice(setting: str, value: object, allowed: Collection[str]) -> None:
    if value not in allowed:
        fix = did_you_mean(str(value), allowed, f"e.g. {setting}={next(iter(allowed))}")
        raise UserError(f"{setting} must be one of {', '.join(allowed)}, got {value}", f"{setting}={value}", fix)


def check_at_least(setting: str, value: float, minimum: float, example: object) -> None:
    """`example`: an allowed value, for the fix."""
    if not value >= minimum:  # also refuses NaN
        raise UserError(
            f"{setting} must be at least {minimum}, got {value}", f"{setting}={value}", f"e.g. {setting}={example}"
        )


def check_installed(package: str, setting: str, fix: str = "") -> None:
    """Raise UserError if the package that `setting` needs is missing. `fix`: "" for that of the extra of its name."""
    if find_spec(package) is None:
        fix = fix or f"pip install 'lm-runner[{package}]'"
        raise UserError(f"{setting} needs the package {package}, which is not installed", setting, fix)


def check_fraction(setting: str, value: float, example: float) -> None:
    """Refuse a value outside [0, 1]. `example`: an allowed value, for the fix."""
    if not 0 <= value <= 1:
        raise UserError(f"{setting} must be in [0, 1], got {value}", f"{setting}={value}", f"e.g. {setting}={example}")
