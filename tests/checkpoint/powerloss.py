"""Model of a disk that loses power: records a program's system calls and generates the disk states that may remain.

Only what was synced is certain. Of the rest, each directory entry and each file's bytes are kept or lost independently,
in any order; a rename is two entries. That is harsher than any journaling file system.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.filesystem import FileSystem

Tree = dict[str, "Tree | bytes"]
# "entry" or "data" -> what remains of one that was not synced: kept, lost, half, zeros or holes
Survival = Callable[[str], str]


@dataclass
class Node:
    """An inode: bytes of a file or entries of a folder, as requested (`data`, `entries`) and as synced (`synced`,
    `certain`).
    """

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

    def after_crash(self, survival: Survival) -> Tree | bytes:
        if not self.folder:
            return (
                self.synced if self.data == self.synced else _partly_written(self.data, self.synced, survival("data"))
            )
        entries = dict(self.certain)
        for name, node in self.pending:
            if survival("entry") == "kept":
                _apply(entries, name, node)
        return {name: node.after_crash(survival) for name, node in entries.items()}


class Recorder(FileSystem):
    """Performs each call except fsync on the real disk and records it.

    `skips` returns True for an fsync that is left out, as a bug would.
    """

    def __init__(self, root: Path, skips: Callable[[Path, list[tuple]], bool] = lambda path, log: False) -> None:
        self.root, self.skips = root, skips
        self.log: list[tuple] = []
        self.paths: dict[int, Path] = {}

    def open(self, path, flags, mode=0o777):
        fd = os.open(path, flags, mode)
        self.paths[fd] = Path(path)
        if flags & os.O_CREAT:
            self._record("create", path)
        return fd

    def write(self, fd, data):
        done = os.write(fd, data)
        self._record("write", self.paths[fd], bytes(data[:done]))
        return done

    def fsync(self, fd):
        if not self.skips(self.paths[fd], self.log):
            self._record("fsync", self.paths[fd])

    def mkdir(self, path, mode=0o777):
        os.mkdir(path, mode)
        self._record("mkdir", path)

    def rename(self, old, new):
        os.rename(old, new)
        self._record("rename", old, new)

    def unlink(self, path):
        os.unlink(path)
        self._record("remove", path)

    def rmdir(self, path):
        os.rmdir(path)
        self._record("remove", path)

    def _record(self, call, *args):
        self.log.append(
            (call, *(arg if isinstance(arg, bytes) else Path(arg).relative_to(self.root).parts for arg in args))
        )


def disk_states(log: list[tuple], survivals: dict[str, Callable[[int], Survival]]) -> Iterator[tuple[int, str, Tree]]:
    """Yield, for a power cut after each call of `log` and for each survival: (calls done, name of the survival, content
    of the disk).
    """
    root = Node(folder=True)
    for done in range(len(log) + 1):
        if done:
            _replay(root, log[done - 1])
        for name, survival in survivals.items():
            tree = root.after_crash(survival(done))
            assert isinstance(tree, dict)
            yield done, name, tree


def survival_cases(num_random: int) -> dict[str, Callable[[int], Survival]]:
    """Return the extreme cases, and `num_random` cases in which each entry and each file is drawn independently."""

    def always(entry: str, data: str) -> Callable[[int], Survival]:
        return lambda done: lambda kind: entry if kind == "entry" else data

    def random_case(seed: int) -> Callable[[int], Survival]:
        def survival(done: int) -> Survival:
            rng = random.Random(f"{seed} {done}")
            return lambda kind: rng.choice(
                ("kept", "lost") if kind == "entry" else ("kept", "lost", "half", "zeros", "holes")
            )

        return survival

    extremes = {
        "nothing": ("lost", "lost"),
        "everything": ("kept", "kept"),
        "names only": ("kept", "lost"),
        "names and zeros": ("kept", "zeros"),
        "data only": ("lost", "kept"),
    }
    return {name: always(*pair) for name, pair in extremes.items()} | {
        f"drawn {seed}": random_case(seed) for seed in range(num_random)
    }


def write_tree(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            write_tree(content, folder / name)
        else:
            (folder / name).write_bytes(content)


def _replay(root: Node, record: tuple) -> None:
    call, path, *rest = record
    node, parent = _find(root, path), _find(root, path[:-1])
    if call in ("create", "mkdir"):
        parent.put(path[-1], Node(folder=call == "mkdir"))
    elif call == "write":
        node.data += rest[0]
    elif call == "fsync":
        node.sync()
    elif call == "remove":
        parent.put(path[-1], None)
    else:
        parent.put(path[-1], None)
        _find(root, rest[0][:-1]).put(rest[0][-1], node)


def _find(root: Node, path: tuple[str, ...]) -> Node:
    node = root
    for name in path:
        node = node.entries.get(name) or Node(folder=False)  # the name that a create adds
    return node


def _apply(entries: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _partly_written(data: bytes, synced: bytes, outcome: str) -> bytes:
    half = len(synced) + (len(data) - len(synced)) // 2
    return {
        "kept": data,
        "lost": synced,
        "half": data[:half],
        "zeros": synced + bytes(len(data) - len(synced)),
        "holes": synced + bytes(half - len(synced)) + data[half:],  # later blocks reached the disk before earlier ones
    }[outcome]
