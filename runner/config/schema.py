"""Names and types of all settings, from the dataclasses, and the options of the config groups, from the YAML files."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean
from common.paths import CONF_DIR
from common.registry import cached_with_plugins
from runner.engine.config import REGISTERED_SECTIONS, Config

OWN_PACKAGES = ("runner", "models")  # of the classes that have YAML files in conf/


@cached_with_plugins
def config_schema() -> dict[str, Any]:
    """Return the type of every setting by its dotted key; a section is there too, with its dataclass.

    Of a section with a registry (e.g. `optimizer`) it has the settings of all registered classes.
    """
    registered = [
        (section, cls) for section, (_, registry) in REGISTERED_SECTIONS.items() for cls in registry.entries().values()
    ]
    return dict(iter_fields(Config, "")) | {
        key: kind for section, cls in registered for key, kind in iter_fields(cls, f"{section}.")
    }


def iter_fields(section: type, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        inner = strip_optional(hints[field.name])
        yield prefix + field.name, inner
        if dataclasses.is_dataclass(inner):
            yield from iter_fields(typing.cast(type, inner), f"{prefix}{field.name}.")


def unread_setting(key: str, chosen: str) -> UserError:
    """Return the error for a setting of a section with a registry that the class registered as `chosen` does not have."""
    section, _, name = key.partition(".")
    if name.partition(".")[0] in config_schema():
        fix = "begin the file with the line `# @package _global_`: its keys are settings of the whole config then"
        return UserError(
            f"{key} is not a setting: a file of the group {section} puts its keys into the section {section}", key, fix
        )
    registry = REGISTERED_SECTIONS[section][1]
    readers = [other for other, cls in registry.entries().items() if name.partition(".")[0] in _names(cls)]
    option = section if {*readers} <= {*config_groups()[section]} else registry.setting
    fix = (
        f"{option}={' or '.join(readers)} reads it"
        if readers
        else did_you_mean(name, _names(registry.get(chosen)), "remove it")
    )
    return UserError(f"{key} is not read by {registry.setting}={chosen}", key, fix)


@cached_with_plugins
def registered_options() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the values of each registered class with a default for each of its settings, as a YAML file of its group
    would have them: {"optimizer": {"muon": {"name": "muon", "lr": 0.02, ...}}}.
    """
    return {
        section: {
            name: {"name": name, key: name, **values}
            for name, cls in registry.entries().items()
            if dataclasses.MISSING not in (values := _field_defaults(cls, key)).values()
        }
        for section, (key, registry) in REGISTERED_SECTIONS.items()
    }


def unknown_option(group: str, name: str, position: str, options: list[str]) -> UserError:
    """Return the error for a name that is no option of the group: unknown, or a class of a plugin with settings that
    have no value.
    """
    if group in REGISTERED_SECTIONS and name in REGISTERED_SECTIONS[group][1].names():
        cls = REGISTERED_SECTIONS[group][1].get(name)
        defaults = _field_defaults(cls, REGISTERED_SECTIONS[group][0])
        missing = [key for key, value in defaults.items() if value is dataclasses.MISSING]
        if missing and cls.__module__.partition(".")[0] not in OWN_PACKAGES:
            message = f"the class {cls.__name__} of {group}={name} has no default for {', '.join(missing)}"
            fix = f"give each a default in the class, or write DIR/{group}/{name}.yaml with their values and add --config-dir DIR"
            return UserError(message, position, fix)
    message = f"{group} has no option {name}" if name else f"{group} needs the name of an option"
    return UserError(
        message, position, f"{did_you_mean(name, options, '')} the options are {', '.join(options)}".strip()
    )


def _field_defaults(cls: type, key: str) -> dict[str, Any]:
    """Return the default of each setting of a registered class but its name `key`, MISSING where there is none."""
    fields = [field for field in dataclasses.fields(cls) if field.name not in ("name", key)]
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in fields
    }


def _names(section: type) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def strip_optional(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


@cached_with_plugins
def config_groups(*dirs: Path) -> dict[str, list[str]]:
    """Return the options of each config group, {"precision": ["bf16", "fp16"], ...}: the YAML files in the subfolders
    of `dirs` (default: conf/), and the registered classes with a default for each of their settings.
    """
    groups: dict[str, set[str]] = {}
    for folder in sorted(
        folder
        for conf in dirs or (CONF_DIR,)
        for folder in conf.iterdir()
        if folder.is_dir() and folder.name != "hydra"
    ):
        groups.setdefault(folder.name, set()).update(file.stem for file in folder.glob("*.yaml"))
    for section, registered in registered_options().items():
        groups.setdefault(section, set()).update(registered)
    return {group: sorted(options) for group, options in sorted(groups.items()) if options}
