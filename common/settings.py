"""Metadata of a setting, beside its declaration: what a changed value means for a run that is resumed from a checkpoint.

ignored           no number of the training depends on it
changes_training  allowed and recorded; the training differs from here on, and is exactly reproducible
changes_rounding  allowed and recorded as exact: false; the same mathematics, summed in another order
incompatible      refused: it would be another run
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

OnResume = Literal["ignored", "changes_training", "changes_rounding", "incompatible"]

# Rule of one field: `log_every: int = field(metadata=IGNORED)`. Other fields have the attribute ON_RESUME of their class, or incompatible.
IGNORED: Mapping[str, OnResume] = MappingProxyType({"on_resume": "ignored"})
CHANGES_TRAINING: Mapping[str, OnResume] = MappingProxyType({"on_resume": "changes_training"})
CHANGES_ROUNDING: Mapping[str, OnResume] = MappingProxyType({"on_resume": "changes_rounding"})
INCOMPATIBLE: Mapping[str, OnResume] = MappingProxyType({"on_resume": "incompatible"})


def iter_settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every setting of a config dataclass and the sections below it."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from iter_settings(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def resume_rules(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, rule) of every setting, and of every section: its rule is that of settings which only another class of it has."""
    default: str = getattr(config, "ON_RESUME", "incompatible")
    yield prefix.removesuffix("."), default
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from resume_rules(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.metadata.get("on_resume", default)


def field_comments(config_class: type) -> dict[str, str]:
    """Return the trailing comment of each field's line, which describes the setting, with the fields of base classes."""
    comments: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        if "__dataclass_fields__" in vars(cls):
            comments |= dict(re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(cls), re.MULTILINE))
    return comments
