"""Overrides of a run, and copies of the files that its config was composed from, in `.hydra/`.

`.hydra/conf/` has the YAML files, `.hydra/plugins/` the sources of plugins. A resume composes from the copied YAML
files, also when conf/ has changed. They are read as data: nothing is executed, resolved or followed, and Hydra gets a
folder written from their content, without anything that concerns Hydra itself or names code. The plugin sources are only
compared, never imported.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.filesystem import read_bounded, remove_tree, write_atomic_file, write_atomic_files
from common.paths import CONF_DIR
from common.registry import plugin_files
from runner.config.compose import source_files
from runner.config.overrides import check_stored, is_hydra_override, is_override_list
from runner.run_dir.lock import unusable_error
from runner.run_dir.saved_config import (
    CONFIG_FILE,
    MAX_YAML_BYTES,
    OVERRIDES_FILE,
    freeze_values,
    load_yaml,
    read_saved,
    reject_interpolations,
)

SNAPSHOT_DIR = Path(".hydra") / "conf"
PLUGINS_DIR = Path(".hydra") / "plugins"
MAIN_CONFIG = "config.yaml"
CONFIG_FILE_NAME = re.compile(r"(\w[\w.-]*/){0,3}\w[\w.-]*\.yaml")
MAX_FILES = 200  # a run is composed from about ten
PACKAGE = re.compile(r"\A(?:[ \t]*(?:#.*)?\n)*?[ \t]*#[ \t]*@package[ \t]+([\w.]+)")
HYDRA_KEY = re.compile(r"(?:\A|[ /@])hydra(?:[/.@]|\Z)")
OPTION_NAME = re.compile(r"\$\{(stage|optimizer)\}")  # conf/config.yaml: stage/lr/<stage>_<optimizer>.yaml
REFUSED_HINT = "do not resume this directory; nothing in it was run"


def load_overrides(folder: Path) -> list[str]:
    """Return the saved overrides of all launches, without those of Hydra's own settings."""
    return check_overrides_file(read_saved(folder / OVERRIDES_FILE, folder), folder / OVERRIDES_FILE)


def check_overrides_file(typed: list[str], path: Path) -> list[str]:
    """Return the overrides that `path` holds, without those of Hydra's own settings. Raises UserError."""
    if not is_override_list(typed):
        raise UserError(
            "the saved overrides are not a list of strings",
            path,
            "restore the file: one `- key=value` per line",
        )
    check_stored(typed, path)
    return [override for override in typed if not is_hydra_override(override)]


def complete_hydra_dir(folder: Path, tree: DictConfig, typed: list[str]) -> None:
    """Complete `.hydra/` of a new run: values in place of interpolations, which may differ tomorrow, and copies of the
    YAML files and plugins.
    """
    written = OmegaConf.to_container(tree)
    config = freeze_values(OmegaConf.to_container(tree, resolve=True), written)
    try:
        if config != written:
            write_yaml(folder / CONFIG_FILE, config)
        save_snapshot(folder, typed)
    except OSError as error:
        raise unusable_error(folder, error) from error


def write_yaml(path: Path, content: Any) -> None:
    write_atomic_file(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())


def save_snapshot(folder: Path, typed: list[str], conf: Path = CONF_DIR) -> None:
    """Copy the YAML files that a new run is composed from, and its plugins, in place of the copies of a launch that was
    refused.
    """
    for copies in (folder / SNAPSHOT_DIR, folder / PLUGINS_DIR):
        if copies.exists():
            remove_tree(copies)
    extend_snapshot(folder, typed, conf)


def extend_snapshot(folder: Path, typed: list[str], conf: Path) -> list[Path]:
    """Copy the files of `typed` that the run has no copy of yet; return the new copies."""
    sources = {folder / SNAPSHOT_DIR / name: file for name, file in source_files(typed, conf).items()}
    sources |= {folder / PLUGINS_DIR / name: file for name, file in plugin_files().items()}
    new = [copy for copy in sources if not copy.exists()]
    write_atomic_files((copy, sources[copy].read_bytes()) for copy in new)
    return new


def changed_files(folder: Path, dirs: Iterable[Path] = (CONF_DIR,)) -> list[str]:
    """Return a message for each YAML file in `dirs`, and each plugin source, that differs from the run's copy."""
    notes = [
        f"conf/{name} {change}: the run keeps its own copy"
        for name, (_, own) in _read_snapshot(folder).items()
        if (change := _describe_change(name, own, dirs))
    ]
    for name, file in plugin_files().items():
        try:
            is_equal = read_bounded(folder / PLUGINS_DIR / name, MAX_YAML_BYTES) == file.read_bytes()
        except OSError:
            is_equal = False
        if not is_equal:
            notes.append(f"plugin {name} differs from the copy in {PLUGINS_DIR}: the file {file} is used")
    return notes


def _describe_change(name: str, own: dict[str, Any], dirs: Iterable[Path]) -> str:
    file = next((folder / name for folder in dirs if (folder / name).exists()), None)
    if file is None:
        return "is not in conf/ or a --config-dir"
    try:
        current = _without_hydra(load_yaml(file) or {})
    except (OSError, ValueError, AttributeError):
        return "cannot be read"
    changed = [key for key in own.keys() | current.keys() if own.get(key) != current.get(key)]
    return f"has changed ({', '.join(sorted(map(str, changed)))})" if changed else ""


@contextmanager
def as_config_dir(folder: Path) -> Iterator[Path]:
    """Yield a temporary config folder: conf/ of today, where the run's copies replace the files of the same name."""
    with tempfile.TemporaryDirectory(prefix="conf-") as temp:
        conf = Path(temp).resolve()
        shutil.copytree(CONF_DIR, conf, dirs_exist_ok=True)
        for name, (header, tree) in _read_snapshot(folder).items():
            if name == MAIN_CONFIG:
                tree = _completed(tree)
            (conf / name).parent.mkdir(parents=True, exist_ok=True)
            (conf / name).write_text(
                header + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8"
            )
        yield conf


def _read_snapshot(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return {name: (its @package line, its content without what concerns Hydra)}; {} for a run without copies. Raises
    UserError.
    """
    root = folder / SNAPSHOT_DIR
    if not root.is_dir() or root.is_symlink():
        return {}
    names = sorted(name for path in root.rglob("*.yaml") if not is_hidden(name := str(path.relative_to(root))))
    if invalid := next(
        (name for name in names if not CONFIG_FILE_NAME.fullmatch(name)),
        None if len(names) <= MAX_FILES else f"{len(names)} files",
    ):
        raise UserError("the run's copy of conf/ was not written by this program", f"{root}: {invalid}", REFUSED_HINT)
    return {name: _read_file(root / name) for name in names}


def is_hidden(name: str) -> bool:
    """Return whether a file is one of the file system's or desktop's own, e.g. `._linear.yaml` or `.nfs0001.yaml`:
    Hydra reads none of that name.
    """
    return any(part.startswith(".") for part in Path(name).parts)


def _read_file(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        tree = load_yaml(path) or {}
        package = PACKAGE.match(read_bounded(path, MAX_YAML_BYTES).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the run's copy of conf/ cannot be read: {error}",
            path,
            "delete the file: the file of this name in conf/ is used instead",
        ) from error
    if (
        not isinstance(tree, dict)
        or _has_outside_defaults(tree.get("defaults"))
        or (package and HYDRA_KEY.search(package[1]))
    ):
        raise UserError("the run's copy of conf/ was not written by this program", path, REFUSED_HINT)
    tree = _without_hydra(tree)  # a user's callbacks have _target_ keys; nothing of the section is used
    reject_interpolations(tree, "", path, is_resolved=False)  # resume.py checks those that it resolves
    return (f"# @package {package[1]}\n" if package else ""), tree


def _has_outside_defaults(defaults: Any) -> bool:
    """Return whether a defaults list names files outside its folder, or by an interpolation other than the names of
    chosen options.
    """
    entries = OPTION_NAME.sub("", str(defaults))
    return defaults is not None and ("${" in entries or ".." in entries or not isinstance(defaults, list))


def _without_hydra(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the content without settings of Hydra: where runs are placed and who starts them is decided by this
    program's conf/.
    """
    tree = {key: value for key, value in tree.items() if not HYDRA_KEY.search(str(key))}
    if isinstance(tree.get("defaults"), list):
        tree["defaults"] = [entry for entry in tree["defaults"] if not _names_hydra(entry)]
    return tree


def _names_hydra(entry: Any) -> bool:
    return any(HYDRA_KEY.search(str(name)) for name in (entry if isinstance(entry, dict) else [entry]))


def _completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the main config with today's settings of Hydra, and with the settings that are newer than the copy."""
    try:
        current = load_yaml(CONF_DIR / MAIN_CONFIG)
        hydra_defaults = [entry for entry in current["defaults"] if _names_hydra(entry)]
        return {**_filled(tree, current), "defaults": [*tree["defaults"], *hydra_defaults]}
    except (OSError, ValueError, KeyError, TypeError):  # conf/config.yaml is gone or changed: resume without it
        return tree


def _filled(tree: Any, current: Any) -> Any:
    """Return `tree` with what `current` has and it lacks."""
    if not (isinstance(tree, dict) and isinstance(current, dict)):
        return tree
    return tree | {key: _filled(tree[key], value) if key in tree else value for key, value in current.items()}
