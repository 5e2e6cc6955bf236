"""A run's own copy of the YAML files it was composed from, `.hydra/conf/`: whatever becomes of conf/, the run is composed as it was.

The copy is read as data. Hydra never sees it where it lies, but a folder made of it in which nothing speaks of Hydra or of code.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from common.filesystem import make_dirs, remove_tree, write_atomic_file
from common.paths import CONF_DIR
from runner.config.compose import source_files
from runner.run_dir import saved_config

SNAPSHOT_DIR = Path(".hydra") / "conf"
MAIN_CONFIG = "config.yaml"
CONFIG_FILE_NAME = re.compile(r"(\w[\w.-]*/){0,3}\w[\w.-]*\.yaml")
MAX_FILES = 200  # files; a run is composed from about ten
PACKAGE = re.compile(r"\A(?:[ \t]*(?:#.*)?\n)*?[ \t]*#[ \t]*@package[ \t]+([\w.]+)")
HYDRA_KEY = re.compile(r"(?:\A|[ /@])hydra(?:[/.@]|\Z)")


def save_snapshot(folder: Path, words: list[str], conf: Path = CONF_DIR) -> None:
    """Copy what a run that begins here is composed from. A copy that lies here already is that of a launch which came to nothing."""
    if (folder / SNAPSHOT_DIR).exists():
        remove_tree(folder / SNAPSHOT_DIR)
    extend_snapshot(folder, words, conf)


def extend_snapshot(folder: Path, words: list[str], conf: Path) -> list[Path]:
    """Copy what `words` are composed from beside what the run has already, which stays as it is; returns what is new."""
    new = [name for name in source_files(words, conf) if not (folder / SNAPSHOT_DIR / name).exists()]
    for name in new:
        make_dirs((folder / SNAPSHOT_DIR / name).parent)
        write_atomic_file(folder / SNAPSHOT_DIR / name, (conf / name).read_bytes())
    return [folder / SNAPSHOT_DIR / name for name in new]


def changed_files(folder: Path) -> list[str]:
    """In one line each, which files of conf/ no longer say what the run's own copy says."""
    return [
        f"conf/{name} {change}: the run keeps its own copy" for name, (_, tree) in _read_snapshot(folder).items() if (change := _describe_change(name, tree))
    ]


def _describe_change(name: str, own: dict[str, Any]) -> str:
    try:
        now = _without_hydra(saved_config.load_yaml(CONF_DIR / name) or {})
    except FileNotFoundError:
        return "is gone"
    except (OSError, ValueError, AttributeError):
        return "cannot be read any more"
    changed = [word for word in own.keys() | now.keys() if own.get(word) != now.get(word)]
    return f"has changed since ({', '.join(sorted(map(str, changed)))})" if changed else ""


@contextmanager
def as_config_dir(folder: Path) -> Iterator[Path]:
    """A conf/ to compose from: today's, with the files of the run's own copy in place of those that are called the same."""
    with tempfile.TemporaryDirectory(prefix="conf-") as temp:
        conf = Path(temp).resolve()
        shutil.copytree(CONF_DIR, conf, dirs_exist_ok=True)
        for name, (header, tree) in _read_snapshot(folder).items():
            if name == MAIN_CONFIG:
                tree = _with_current_hydra(tree)
            (conf / name).parent.mkdir(parents=True, exist_ok=True)
            (conf / name).write_text(header + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
        yield conf


def _read_snapshot(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """{name: (its @package line, its tree)} of what the run keeps, without what is said to Hydra. Empty for a run that keeps none."""
    place = folder / SNAPSHOT_DIR
    if not place.is_dir() or place.is_symlink():
        return {}
    names = sorted(str(path.relative_to(place)) for path in place.rglob("*.yaml"))
    if bad := next((name for name in names if not CONFIG_FILE_NAME.fullmatch(name)), None if len(names) <= MAX_FILES else f"{len(names)} files"):
        raise UserError("a run's copy of conf/ is none of ours", f"{place}: {bad}", "do not resume this folder; nothing in it was run")
    return {name: _read_file(place / name) for name in names}


def _read_file(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        tree = saved_config.load_yaml(path) or {}
        package = PACKAGE.match(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"a run's copy of conf/ cannot be read: {error}", str(path), "delete the file: today's of that name is taken instead") from error
    if not isinstance(tree, dict) or _has_outside_defaults(tree.get("defaults")) or (package and HYDRA_KEY.search(package[1])):
        raise UserError("a run's copy of conf/ is none of ours", str(path), "do not resume this folder; nothing in it was run")
    saved_config.reject_interpolations(_drop_strings(tree), "", path)
    return (f"# @package {package[1]}\n" if package else ""), _without_hydra(tree)


def _has_outside_defaults(defaults: Any) -> bool:
    """A list of files that is found by looking elsewhere."""
    return defaults is not None and ("${" in str(defaults) or ".." in str(defaults) or not isinstance(defaults, list))


def _drop_strings(value: Any) -> Any:
    """Values that are looked up are no harm here: those that a relaunch takes are asked again."""
    if isinstance(value, dict):
        return {key: _drop_strings(part) for key, part in value.items()}
    return None if isinstance(value, str) else [_drop_strings(part) for part in value] if isinstance(value, list) else value


def _without_hydra(tree: dict[str, Any]) -> dict[str, Any]:
    """Without what is said to Hydra: where runs go and who starts them is the program's to say, today."""
    tree = {word: value for word, value in tree.items() if not HYDRA_KEY.search(str(word))}
    if isinstance(tree.get("defaults"), list):
        tree["defaults"] = [entry for entry in tree["defaults"] if not _names_hydra(entry)]
    return tree


def _names_hydra(entry: Any) -> bool:
    return any(HYDRA_KEY.search(str(name)) for name in (entry if isinstance(entry, dict) else [entry]))


def _with_current_hydra(tree: dict[str, Any]) -> dict[str, Any]:
    try:
        now = saved_config.load_yaml(CONF_DIR / MAIN_CONFIG)
        of_hydra = [entry for entry in now["defaults"] if _names_hydra(entry)]
        return {**tree, "defaults": [*tree["defaults"], *of_hydra], "hydra": now["hydra"]}
    except (OSError, ValueError, KeyError, TypeError):  # no longer there, or no longer ours: a run is continued without it
        return tree
