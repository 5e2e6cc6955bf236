"""A model of a disk that loses power: what a program asked for, and every state the disk may be found in afterwards.

Only what was fsynced is certain. Of the rest, each directory entry and each file's bytes live or die on their own, in
any order; a rename is two entries. That is harsher than the journal of any real file system.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.filesystem import FileSystem

Tree = dict[str, "Tree | bytes"]
Fate = Callable[[str], str]  # "entry" or "data" -> what becomes of one that was not synced


@dataclass
class Node:
    """An inode: bytes for a file, entries for a folder; what is asked for, and what is certain."""

    folder: bool
    data: bytes = b""
    synced: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    certain: dict[str, Node] = field(default_factory=dict)
    pending: list[tuple[str, Node | None]] = field(default_factory=list)

    def put(self, name: str, node: Node | None) -> None:
        self.pending.append((name, node))
        _apply(self.entries, name, node)

    def sync(self) -> None:
        self.synced = self.data
        for name, node in self.pending:
            _apply(self.certain, name, node)
        self.pending.clear()

    def after_crash(self, fate: Fate) -> Tree | bytes:
        if not self.folder:
            return self.synced if self.data == self.synced else _torn(self.data, self.synced, fate("data"))
        found = dict(self.certain)
        for name, node in self.pending:
            if fate("entry") == "kept":
                _apply(found, name, node)
        return {name: node.after_crash(fate) for name, node in found.items()}


class Recorder(FileSystem):
    """Does what it is asked to on the real disk (but fsync) and notes it. `skips` plants a bug: an fsync that is left out."""

    def __init__(self, root: Path, skips: Callable[[Path, list[tuple]], bool] = lambda path, log: False):
        self.root, self.skips = root, skips
        self.log: list[tuple] = []
        self.paths: dict[int, Path] = {}

    def open(self, path, flags, mode=0o777):
        fd = os.open(path, flags, mode)
        self.paths[fd] = Path(path)
        if flags & os.O_CREAT:
            self._note("create", path)
        return fd

    def write(self, fd, data):
        done = os.write(fd, data)
        self._note("write", self.paths[fd], bytes(data[:done]))
        return done

    def fsync(self, fd):
        if not self.skips(self.paths[fd], self.log):
            self._note("fsync", self.paths[fd])

    def mkdir(self, path, mode=0o777):
        os.mkdir(path, mode)
        self._note("mkdir", path)

    def rename(self, old, new):
        os.rename(old, new)
        self._note("rename", old, new)

    def unlink(self, path):
        os.unlink(path)
        self._note("remove", path)

    def rmdir(self, path):
        os.rmdir(path)
        self._note("remove", path)

    def _note(self, verb, *args):
        self.log.append((verb, *(arg if isinstance(arg, bytes) else Path(arg).relative_to(self.root).parts for arg in args)))


def disks(log: list[tuple], fates: dict[str, Callable[[int], Fate]]) -> Iterator[tuple[int, str, Tree]]:
    """For the power cut after each call of `log`, and each fate: (calls done, fate, what stands on the disk)."""
    root = Node(folder=True)
    for done in range(len(log) + 1):
        if done:
            _replay(root, log[done - 1])
        for name, fate in fates.items():
            tree = root.after_crash(fate(done))
            assert isinstance(tree, dict)
            yield done, name, tree


def fates(chances: int) -> dict[str, Callable[[int], Fate]]:
    """The extremes, and `chances` draws in which each entry and each file meets its own fate."""

    def always(entry: str, data: str) -> Callable[[int], Fate]:
        return lambda done: lambda kind: entry if kind == "entry" else data

    def chance(seed: int) -> Callable[[int], Fate]:
        def fate(done: int) -> Fate:
            draw = random.Random(f"{seed} {done}")
            return lambda kind: draw.choice(("kept", "lost") if kind == "entry" else ("kept", "lost", "half", "zeros", "holes"))

        return fate

    extremes = {
        "nothing": ("lost", "lost"),
        "everything": ("kept", "kept"),
        "names only": ("kept", "lost"),
        "names and zeros": ("kept", "zeros"),
        "data only": ("lost", "kept"),
    }
    return {name: always(*pair) for name, pair in extremes.items()} | {f"chance {seed}": chance(seed) for seed in range(chances)}


def lay_out(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            lay_out(content, folder / name)
        else:
            (folder / name).write_bytes(content)


def _replay(root: Node, call: tuple) -> None:
    verb, path, *rest = call
    node, parent = _find(root, path), _find(root, path[:-1])
    if verb in ("create", "mkdir"):
        parent.put(path[-1], Node(folder=verb == "mkdir"))
    elif verb == "write":
        node.data += rest[0]
    elif verb == "fsync":
        node.sync()
    elif verb == "remove":
        parent.put(path[-1], None)
    else:
        parent.put(path[-1], None)
        _find(root, rest[0][:-1]).put(rest[0][-1], node)


def _find(root: Node, path: tuple[str, ...]) -> Node:
    node = root
    for name in path:
        node = node.entries.get(name) or Node(folder=False)  # the name a create is about to give
    return node


def _apply(entries: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _torn(data: bytes, synced: bytes, fate: str) -> bytes:
    half = len(synced) + (len(data) - len(synced)) // 2
    return {
        "kept": data,
        "lost": synced,
        "half": data[:half],
        "zeros": synced + bytes(len(data) - len(synced)),
        "holes": synced + bytes(half - len(synced)) + data[half:],  # later blocks reached the disk before earlier ones
    }[fate]
