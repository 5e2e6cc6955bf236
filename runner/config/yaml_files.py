"""The YAML files that overrides are composed from, and the line that sets a setting: for errors, and for the copies in
a run directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import hydra
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from common.errors import UserError
from common.paths import CONF_DIR, REPO_ROOT
from runner.config import overrides

SETTING = re.compile(r"[a-z]\w*(\.\w+)*")
# 1.3 warns without it, 1.4 with it
HYDRA_VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


@contextmanager
def composing_from(conf: Path) -> Iterator[None]:
    """Initialise Hydra with the config folder `conf`, also inside a run or sweep where it is initialised already."""
    current = GlobalHydra.instance()
    before, current.hydra = current.hydra, None
    try:
        with initialize_config_dir(str(conf), **HYDRA_VERSION_BASE):
            yield
    finally:
        current.hydra = before


def composed_files(typed: Sequence[str], conf: Path = CONF_DIR) -> list[tuple[Path, str, list[str]]]:
    """Return (file, its name in a config folder, its package) for each YAML file that the overrides are composed from,
    in this order.

    Files of Hydra's own config are left out. The options without a file must be registered (`register_configs`).
    """
    with composing_from(conf):
        defaults = (
            GlobalHydra.instance().config_loader().compute_defaults_list("config", list(typed), RunMode.RUN).defaults
        )
    dirs, files = overrides.config_dirs(list(typed), conf), []
    for default in defaults:
        name = f"{default.config_path}.yaml"
        path = next((folder / name for folder in dirs if (folder / name).is_file()), None)
        if path is not None and not name.startswith("hydra/"):
            files.append((path, name, [part for part in (default.package or "").split(".") if part]))
    return files


def with_position(error: UserError, typed: Sequence[str]) -> UserError:
    """Return `error` with the file and line that sets its setting, if none of the `typed` overrides is about it and a
    YAML file does.
    """
    key, _, value = error.setting.partition(" ")[0].partition("=")
    named = {overrides.key_of(part) for part in error.setting.split(" ")}  # a setting may consist of several overrides
    if named & {overrides.key_of(override) for override in typed} or not SETTING.fullmatch(key):
        return error
    position = setting_position(key, value, typed)
    return type(error)(error.message, f"{position}: {error.setting}", error.fix) if position else error


def setting_position(key: str, value: str, typed: Sequence[str]) -> str | None:
    """Return file:line of the last file that sets `key`, to something else than ???.

    For a key that no file sets and that has no `value`, return the file of the user that should: the last one of its
    section.
    """
    section_file = None
    try:
        files = composed_files(typed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):  # the defaults lists are wrong
        return None
    for path, _, package in reversed(files):
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        parts = key.split(".")
        if parts[: len(package)] != package:
            continue
        if (found := _find(node, parts[len(package) :])) is not None:
            key_node, value_node = found
            return None if value_node.value == "???" else _position(path, key_node.start_mark.line + 1)
        if section_file is None and package and CONF_DIR not in path.parents:
            section_file = path
    return str(path_in_checkout(section_file)) if section_file and not value else None


def default_position(option: str, dirs: Sequence[Path], first: Sequence[str] = ()) -> str | None:
    """Return file:line of the entry of a defaults list that names the config `option`, e.g. model/tinyy or tinyy; the
    files `first` are read first.
    """
    group, _, name = option.rpartition("/")
    for folder in reversed(dirs):
        for path in sorted(
            folder.rglob("*.yaml"), key=lambda path: str(path.relative_to(folder))[: -len(".yaml")] not in first
        ):
            with suppress(yaml.YAMLError, OSError, UnicodeDecodeError):
                if line := next(
                    (line for key, value, line in _defaults_entries(path) if _is_entry(key, value, group, name)), None
                ):
                    return _position(path, line)
    return None


def ineffective_override(group: str, chosen: str, typed: Sequence[str]) -> tuple[str, str] | None:
    """Return (option, file:line) of a file of the user that overrides `group` with another option than `chosen`:
    conf/config.yaml has precedence.
    """
    for path, _, _ in composed_files(typed):
        for key, value, line in _defaults_entries(path) if CONF_DIR not in path.parents else ():
            if key.removeprefix("override ").strip("/ ") == group and value != chosen:
                return value, _position(path, line)
    return None


def _defaults_entries(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (group, option, line) of the entries of a defaults list; an entry without a group has an empty one."""
    found = _find(yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), ["defaults"])
    for entry in found[1].value if found and isinstance(found[1], yaml.SequenceNode) else ():
        pairs = (
            [(key.value, value) for key, value in entry.value] if isinstance(entry, yaml.MappingNode) else [("", entry)]
        )
        yield from ((key, str(value.value), value.start_mark.line + 1) for key, value in pairs)


def _is_entry(key: str, value: str, group: str, name: str) -> bool:
    if not key:  # `- tinyy` in a file of the group model, or `- /model/tinyy`
        return value.partition("@")[0].rpartition("/")[2] == name
    entry_group = key.removeprefix("override ").removeprefix("optional ").partition("@")[0].strip("/")
    return (
        value == name
        and (entry_group == group or not group)
        or (not value and entry_group == name)
        or entry_group == f"{group}/{name}".strip("/")
    )


def _find(node: yaml.Node | None, parts: Sequence[str]) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the nodes of the key and the value at the path `parts` of a mapping; also where a key is written with
    dots.
    """
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if key.value == ".".join(parts):
            return key, value
        if key.value == parts[0] and (found := _find(value, parts[1:])):
            return found
    return None


def _position(path: Path, line: int) -> str:
    return f"{path_in_checkout(path)}:{line}"


def path_in_checkout(path: Path) -> Path:
    return path.relative_to(REPO_ROOT) if CONF_DIR in path.parents else path
