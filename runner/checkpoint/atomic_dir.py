"""Folders that are whole or do not exist, whatever is killed, fails or loses power meanwhile.

A folder is written beside its place, every file is synced, a manifest of checksums comes last, then one rename and one
fsync of the parent make it real. Whoever reads it back believes the checksums and nothing else. What stands in the
files is the business of the caller: see checkpoint.py.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import filesystem
from common.filesystem import (
    Chunks,
    as_chunks,
    make_dirs,
    read_bounded,
    remove_quietly,
    remove_tree,
    sha256_of,
    sync_dir,
    temp_name,
    write_atomic_file,
    write_new_file,
)

MANIFEST_FILE = "MANIFEST.json"
RESERVED_BYTES = 1 << 20  # bytes that stay free beside a new folder: its entries, metrics.jsonl, run.json
MAX_MANIFEST_BYTES = 1 << 20  # a longer manifest is not one of ours
STEP_NAME = re.compile(r"step-[0-9]{8}")
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class SaveError(OSError):
    """A folder could not be committed; nothing of it is left behind. `need` and `free` are bytes (free: None if unknown)."""

    def __init__(self, cause: OSError, folder: Path, need: int):
        try:
            self.free: int | None = filesystem.fs.free(folder.parent)
        except OSError:
            self.free = None
        self.need = need
        free = "an unknown number of" if self.free is None else f"{self.free:,}"
        super().__init__(
            cause.errno, f"{folder.name} was not saved: {cause.strerror or cause}; it needs {need:,} bytes, {free} bytes are free in {folder.parent}"
        )

    def __str__(self) -> str:
        return str(self.strerror)


def write_atomic_dir(parent: Path, name: str, files: Mapping[str, Chunks | Callable[[], Chunks]], manifest: dict[str, Any], expected: int = 0) -> None:
    """Commit `parent/name` with these files; once this returns, not even a power cut takes it away.

    A callable is asked for its bytes when its turn comes, so that only one file's bytes need be held at a time. The fields
    of `manifest` stand in MANIFEST.json beside the checksums. Room for `expected` bytes, all the callables will give, is asked for
    before the first is written. A good folder of that name is left as it is, a bad one is
    replaced. Raises DiskTrouble, after clearing up, when the disk is full, read-only or broken.
    """
    assert all(FILE_NAME.fullmatch(file) and file != MANIFEST_FILE for file in files), f"file names we would refuse to read back: {list(files)}"
    assert not manifest.keys() & {"files", "sha256"}, f"fields the manifest needs for itself: {list(manifest)}"
    target, temp = parent / name, parent / temp_name("tmp", name)
    written, need = 0, max(expected, sum(_payload_bytes(data) for data in files.values() if not callable(data)))
    try:
        if os.path.lexists(target):
            if verify_dir(target) is None:
                sync_dir(parent)  # whoever wrote it may have died between its rename and this
                return
            discard_dir(target)
        make_dirs(parent)
        _require_room(parent, need)
        filesystem.fs.mkdir(temp)
        entries = {}
        for file, data in files.items():
            if callable(data):
                data = data()
            written += _payload_bytes(data)
            need = max(need, written)
            _require_room(parent, _payload_bytes(data))
            entries[file] = write_new_file(temp / file, data)
        write_new_file(temp / MANIFEST_FILE, _dump_manifest({**manifest, "files": entries}))
        sync_dir(temp)
        filesystem.fs.rename(temp, target)
        sync_dir(parent)  # the commit point
        _verified[str(target)] = _stat_signature(target)  # pruning need not read back what we have just summed up
    except BaseException as error:
        remove_quietly(temp)
        if isinstance(error, OSError):
            raise SaveError(error, target, need) from error
        raise


def verify_dir(folder: Path) -> str | None:
    """None for a folder that is byte for byte what was committed, otherwise the reason why it is not."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return "not a folder"
        entries = _load_manifest(read_bounded(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES))
        present = set(os.listdir(folder)) - {MANIFEST_FILE}
        for word, names in (("missing", entries.keys() - present), ("unexpected", present - entries.keys())):
            if names:
                return f"{word}: {', '.join(sorted(names)[:4])!r}"
        for file, entry in sorted(entries.items()):
            if sha256_of(folder / file, entry["size"]) != entry["sha256"]:
                return f"{file}: the checksum differs"
    except OSError as error:
        return f"{Path(error.filename).name if error.filename else folder.name}: {error.strerror or error}"
    except ValueError as error:
        return f"{MANIFEST_FILE}: {error}"
    return None


def newest_valid(parent: Path) -> tuple[Path | None, list[tuple[str, str]]]:
    """The newest good step folder under `parent`, and every newer one that was passed over, with the reason."""
    passed: list[tuple[str, str]] = []
    for name in _steps(parent):
        reason = verify_dir(parent / name)
        if reason is None:
            return parent / name, passed
        passed.append((name, reason))
    return None, passed


def prune_dirs(parent: Path, keep: int, protect: set[str]) -> list[str]:
    """Delete good step folders beyond the newest `keep` and the protected ones; returns the names deleted.

    Only folders proven good are counted and only such are deleted: at least two stay, whatever `keep` says.
    """
    good = [name for name in _steps(parent) if _verified_cached(parent / name)]
    gone = [name for name in good[max(keep, 2) :] if name not in protect]
    for name in reversed(gone):  # oldest first: an interruption leaves the newer ones
        discard_dir(parent / name)
    return gone


def discard_dir(folder: Path) -> None:
    """Delete a step folder. Its renaming is made durable first, so that nothing half deleted ever bears its name."""
    dead = folder.parent / temp_name("del", folder.name)
    filesystem.fs.rename(folder, dead)
    sync_dir(folder.parent)
    _verified.pop(str(folder), None)
    remove_tree(dead)


def remove_temp(parent: Path) -> list[str]:
    """Remove what interrupted writers left behind. Only for the holder of the lock: a living writer's folder looks the same."""
    litter = sorted(name for name in os.listdir(parent) if name.startswith((".tmp-", ".del-")))
    for name in litter:
        remove_tree(parent / name)
    return litter


def write_pointer(parent: Path, kind: str, name: str) -> None:
    """Note `name` in the file `parent/kind` (latest, best). For people and for speed: `newest` never asks it."""
    write_atomic_file(parent / kind, f"{name}\n".encode())


def read_pointer(parent: Path, kind: str) -> str | None:
    """The step folder a hint names; None where there is no hint, or none that could be one of ours."""
    try:
        name = read_bounded(parent / kind, 64).decode("ascii", "replace").strip()
    except OSError:
        return None
    return name if STEP_NAME.fullmatch(name) else None


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1, allow_nan=False).encode()


def _dump_manifest(body: dict[str, Any]) -> bytes:
    return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def _load_manifest(raw: bytes) -> dict[str, dict[str, Any]]:
    """The `files` of a sealed manifest; ValueError when it is not exactly what `_seal` wrote."""
    try:
        body = json.loads(raw)
        sealed = _canonical(body) == raw  # one spelling only: even a changed space is a change
        digest = body.pop("sha256")
        sealed &= hashlib.sha256(_canonical(body)).hexdigest() == digest
        entries = {file: {"size": int(entry["size"]), "sha256": str(entry["sha256"])} for file, entry in body["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("not a manifest") from error
    if not sealed:
        raise ValueError("it was changed after it was written")
    if not all(FILE_NAME.fullmatch(file) for file in entries):
        raise ValueError("it names files outside its folder")
    return entries


def _require_room(parent: Path, need: int) -> None:
    if filesystem.fs.free(parent) < need * 1.1 + RESERVED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_verified: dict[str, list[tuple[Any, ...]] | None] = {}


def _verified_cached(folder: Path) -> bool:
    """Verified now, or written or verified earlier by this process with no file touched since: pruning must not read gigabytes at every save."""
    mark = _stat_signature(folder)
    if mark is None:
        return False
    if _verified.get(str(folder)) != mark:
        if verify_dir(folder) is not None:
            return False
        _verified[str(folder)] = mark
    return True


def _stat_signature(folder: Path) -> list[tuple[Any, ...]] | None:
    """What changes whenever a file in `folder` does; None where it cannot be looked at."""
    try:
        return sorted(
            (entry.name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            for entry in os.scandir(folder)
            if (found := entry.stat(follow_symlinks=False))
        )
    except OSError:
        return None


def _steps(parent: Path) -> list[str]:
    names = os.listdir(parent) if parent.is_dir() else []
    return sorted((name for name in names if STEP_NAME.fullmatch(name)), reverse=True)


def _payload_bytes(data: Chunks) -> int:
    return sum(map(len, as_chunks(data)))
