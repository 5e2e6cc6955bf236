"""Write docs/reference/settings.md from the config dataclasses and conf/: `python scripts/settings_reference.py
[--check]`.

The comment behind a field of a dataclass is the description of the setting; its default is the value of the default run
(`python runner/train.py`), or of the group option in which the setting occurs. `--check` exits with 1 where the file is
out of date.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from common.paths import CONF_DIR, REPO_ROOT
from common.settings import field_comments

TARGET = REPO_ROOT / "docs" / "reference" / "settings.md"
INTRODUCTION = """# Settings

Every setting of `train.py`. Type `key=value`, e.g. `python runner/train.py optimizer.lr=5e-4 train.batch_size=8`; a list is `key=[a,b]`, nothing is `key=null`.
`python runner/train.py stage=sft --cfg job` prints the composed values. *Default* is the value of the default run; options of a group set their own.

<!-- written by scripts/settings_reference.py from the dataclasses and conf/; do not edit -->
"""


def described_fields(cls: type) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, type, description) of the fields of `cls`, those of its base classes first."""
    comments, hints = field_comments(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield field.name, hints[field.name], comments.get(field.name, "").replace("; at least ", "; ≥")
        for kind in (hints[field.name], *typing.get_args(hints[field.name])):
            if dataclasses.is_dataclass(kind):  # a section within the section, such as stage.lora
                yield from (
                    (f"{field.name}.{name}", inner, text)
                    for name, inner, text in described_fields(typing.cast(type, kind))
                )


def type_name(kind: Any) -> str:
    """Return a type as a user would write it: `int`, `float or null`, `list of str`."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return f"list of {type_name(arguments[0])}"
    if dataclasses.is_dataclass(kind):
        return "section"
    if type(None) in arguments:
        return " or ".join([*(type_name(part) for part in arguments if part is not type(None)), "null"])
    return "any" if kind is Any else getattr(kind, "__name__", str(kind))


def default_values() -> dict[str, Any]:
    """Return the values of the default run by dotted key."""
    from runner.config.compose import compose_config

    values: dict[str, Any] = {}

    def collect(prefix: str, section: Any) -> None:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            values[prefix + field.name] = value
            if dataclasses.is_dataclass(value):
                collect(f"{prefix}{field.name}.", value)

    collect("", compose_config([]))
    return values


def option_values(group: str) -> dict[str, list[str]]:
    """Return the options in conf/<group>/ that set each key of the group: {"momentum": ["muon: 0.95"]}."""
    found: dict[str, list[str]] = {}
    for file in sorted((CONF_DIR / group).glob("*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        for key, value in content.items():
            found.setdefault(str(key), []).append(f"`{file.stem}`: {show(value)}")
    return found


def show(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text.replace(str(REPO_ROOT), '${repo:}')}`" if text else "`''`"


def section_classes() -> dict[str, dict[str, type]]:
    """Return {section: {option: config class}}; a section without a registry has one class, under the empty name."""
    from runner.engine.config import REGISTERED_SECTIONS, Config

    classes: dict[str, dict[str, type]] = {}
    for name, kind in typing.get_type_hints(Config).items():
        if name in REGISTERED_SECTIONS:
            classes[name] = dict(REGISTERED_SECTIONS[name][1].entries())
        elif dataclasses.is_dataclass(kind):
            classes[name] = {"": typing.cast(type, kind)}
    return classes


def plugin_sections() -> dict[str, dict[str, type]]:
    """Return the options of sweeps that Hydra's plugins read: {"hydra.launcher": {"local": class, ...},
    "hydra.sweeper": ...}.
    """
    from runner.sweep.backends import LAUNCHERS
    from runner.sweep.optuna_search import SWEEPERS

    return {"hydra.launcher": dict(LAUNCHERS), "hydra.sweeper": dict(SWEEPERS)}


def section_table(
    section: str, classes: dict[str, type], defaults: dict[str, Any], options: dict[str, list[str]]
) -> str:
    """Return one row per setting; one that some of the classes lack, or describe in another way, names those that read it."""
    rows: dict[str, tuple[str, Any, str, str]] = {}
    texts: dict[str, dict[str, str]] = {}  # by the option that reads the setting
    for option, cls in classes.items():
        own = {field.name: field for field in dataclasses.fields(cls)}
        for name, kind, text in described_fields(cls):
            if name.startswith("_"):
                continue
            texts.setdefault(name, {})[option] = text
            field = own.get(name)
            if f"{section}.{name}" in defaults and not dataclasses.is_dataclass(kind):
                default = show(defaults[f"{section}.{name}"])
            elif field is not None and field.default is not dataclasses.MISSING and name not in options:
                default = show(field.default)
            elif field is not None and field.default_factory is not dataclasses.MISSING and name not in options:
                default = show(field.default_factory())
            else:
                default = "; ".join(options.get(name, []))
            rows.setdefault(name, (f"{section}.{name}", kind, text, default))
    for name, by_option in texts.items():
        key, kind, text, default = rows[name]
        if len(set(filter(None, by_option.values()))) > 1:
            text = "; ".join(f"{option}: {text}" for option, text in by_option.items() if text)
        elif len(by_option) < len(classes):
            text = f"{text} ({', '.join(by_option)} only)"
        rows[name] = (key, kind, text, default)
    return table(rows.values())


def reference() -> str:
    """Return the text of settings.md."""
    from runner.engine.config import Config

    defaults, sections = default_values(), section_classes()
    top_level = table(
        (name, kind, text, show(defaults[name]))
        for name, kind, text in described_fields(Config)
        if name.partition(".")[0] not in sections
    )
    parts = [INTRODUCTION, "## Top level\n", top_level]
    for section, classes in sections.items():
        folder = CONF_DIR / section
        choices = sorted(file.stem for file in folder.glob("*.yaml"))
        heading = f"## {section}\n" + (
            f"\nOptions: {', '.join(f'`{section}={choice}`' for choice in choices)}\n" if choices else ""
        )
        parts += [heading, section_table(section, classes, defaults, option_values(section))]
    for section, classes in plugin_sections().items():
        group = section.replace(".", "/")
        parts += [
            f"## {section}\n\nRead by `--multirun` only. Options: {', '.join(f'`{group}={name}`' for name in classes)}\n"
        ]
        parts += [section_table(section, classes, {}, {})]
    return "\n".join(parts)


def table(rows: Any) -> str:
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, text, default in rows:
        lines.append(f"| `{name}` | {type_name(kind)} | {default} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    text = reference()
    if "--check" in sys.argv[1:]:
        return int(not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
