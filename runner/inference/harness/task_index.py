"""Find the definitions of tasks by name without parsing all task files of the harness (14,000), which takes it 12
seconds.

The names that a file defines are at the beginnings of its lines: `task: NAME`, `group: NAME`, `tag: NAME`. Only the
files of the names asked for, and of the members of groups and tags among them, are parsed, by the harness itself.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

NAME_KEY = re.compile(
    rb"""^["']?(task|group|tag|include|class)["']?[ \t]*:[ \t]*(.*(?:\n[ \t]*-[ \t].*)*)""", re.MULTILINE
)
COMMENT, LIST_MARKS = re.compile(r"(?:^|\s)#.*"), re.compile(r"(?:^|\n)\s*-\s|[\[\],\n]")
IGNORED_FOLDERS = {"__pycache__", ".ipynb_checkpoints"}


class TaskFiles:
    """The task files below a folder, by the names that they define."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._keys_of: dict[Path, dict[str, list[str]]] = {}  # of each file that was read

    @cached_property
    def files_of(self) -> dict[str, list[Path]]:
        """Return the files that define each name."""
        files: dict[str, list[Path]] = defaultdict(list)
        for path in sorted(self._paths(), key=Path.as_posix):
            keys = self._keys(path)
            defined = keys.get("group", []) if "group" in keys and "class" not in keys else keys.get("task", [])
            for name in [*defined, *self._tags(path)]:
                files[name].append(path)
        return files

    def _paths(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if name not in IGNORED_FOLDERS]
            yield from (Path(folder, name) for name in names if name.endswith(".yaml"))

    def _keys(self, path: Path) -> dict[str, list[str]]:
        """Return the values of the keys of NAME_KEY in a file; {} if it cannot be read."""
        if path not in self._keys_of:
            try:
                text = path.read_bytes()
            except OSError:
                text = b""
            self._keys_of[path] = {
                key.decode(): _items(value.decode("utf-8", "replace")) for key, value in NAME_KEY.findall(text)
            }
        return self._keys_of[path]

    def _tags(self, path: Path, depth: int = 8) -> list[str]:
        """Return the tags of a file, or else those of the last file that it includes and that has some."""
        keys = self._keys(path)
        if "tag" in keys or not depth:
            return keys.get("tag", [])
        included = [self._tags(path.parent / name, depth - 1) for name in keys.get("include", [])]
        return next((tags for tags in reversed(included) if tags), [])


def _items(value: str) -> list[str]:
    """Return the items of a YAML scalar or list of scalars."""
    lines = "\n".join(COMMENT.sub("", line) for line in value.splitlines())
    return [name for part in LIST_MARKS.split(lines) if (name := part.strip().strip("'\""))]


class TaskLibrary:
    """Task files of several folders; a definition in an earlier folder replaces those of later ones."""

    def __init__(self, folders: list[Path]) -> None:
        self._sources = [TaskFiles(folder) for folder in folders]

    def names(self) -> list[str]:
        return sorted({name for source in self._sources for name in source.files_of})

    def find(self, names: Iterable[str]) -> tuple[TaskManager, list[str]]:
        """Return a manager that knows the tasks `names` and their members, and those of `names` that are not defined."""
        manager = TaskManager(include_defaults=False)
        index: dict[str, Entry] = manager.task_index
        requested, wanted, missing, seen = set(names), list(names), [], set()
        while wanted:
            name = wanted.pop()
            if name in seen:
                continue
            seen.add(name)
            if entry := self._entry(name):
                index[name] = entry
                wanted += _members(entry)
            elif name in requested:
                missing.append(name)
        return manager, sorted(missing)

    def _entry(self, name: str) -> Entry | None:
        source = next((source for source in self._sources if name in source.files_of), None)
        found: dict[str, Entry] = {}
        for path in source.files_of[name] if source else []:
            TaskIndex.process_cfg(load_yaml(path, resolve_func=False), path, found)
        return found.get(name)


def _members(entry: Entry) -> Iterator[str]:
    """Yield the tasks of a tag or group, and of the groups inside of it.

    Members without a definition of their own are left out later.
    """
    yield from entry.tags
    yield from _listed((entry.cfg or {}).get("task"))


def _listed(members: Any) -> Iterator[str]:
    for member in members if isinstance(members, list) else []:
        if isinstance(member, str):
            yield member
        elif isinstance(member, dict):
            yield from (str(member[key]) for key in ("task", "group") if isinstance(member.get(key), str))
            yield from _listed(member.get("task"))
