"""Atomic folders: complete with verified checksums, or absent, after any kill, write error or power cut.

A folder is written under a temporary name, every file is synced, a manifest of checksums is written last, then a rename
and an fsync of the parent commit it. Readers trust the checksums only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import filesystem
from common.errors import FULL_DISK_ERRORS
from common.filesystem import (
    Chunks,
    as_chunks,
    atomic_path,
    describe_disk_error,
    dump_sealed_json,
    load_sealed_json,
    make_dir,
    read_bounded,
    remove_quietly,
    sha256_of,
    sync_path,
    temp_name,
    write_atomic_file,
    write_hashed_file,
    write_new_file,
)

MANIFEST_FILE = "MANIFEST.json"
RESERVED_BYTES = 1 << 20  # kept free besides a new folder: for its directory entries, metrics.jsonl and run.json
TEMPORARY = (".tmp-", ".del-")  # beginnings of the names of files of interrupted writers
MAX_MANIFEST_BYTES = 1 << 20  # a longer file is no manifest
STEP_NAME = re.compile(r"step-[0-9]{8}")
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class SaveError(OSError):
    """A folder could not be committed, and no part of it remains. `need`: its size in bytes."""

    def __init__(self, cause: OSError, folder: Path, need: int) -> None:
        self.need = need
        reason = describe_disk_error(cause, folder.parent, space_for(need) if need else 0)
        super().__init__(cause.errno, f"{folder.name} was not saved: {reason}")

    def __str__(self) -> str:
        return str(self.strerror)


def write_atomic_dir(
    parent: Path,
    name: str,
    files: Mapping[str, Chunks],
    manifest: dict[str, Any],
) -> None:
    """Commit the folder `parent/name` with these files; once this returns, it survives a power cut.

    Their size is checked against the free space first. The fields of `manifest` are stored in MANIFEST.json. A valid
    folder of that name is left as it is, an invalid one is replaced. Raises SaveError, after removing what was written,
    if the disk is full, read-only or broken.
    """
    assert all(FILE_NAME.fullmatch(file) and file != MANIFEST_FILE for file in files), (
        f"file names that could not be read back: {list(files)}"
    )
    assert not manifest.keys() & {"files", "name", "sha256"}, f"reserved fields of the manifest: {list(manifest)}"
    contents = {file: list(as_chunks(data)) for file, data in files.items()}
    target, size = parent / name, sum(len(view) for views in contents.values() for view in views)
    try:
        if os.path.lexists(target):
            if verify_dir(target) is None:
                sync_path(parent)  # its writer may have been killed between the rename and the sync
                return
            discard_dir(target)
        make_dir(parent)  # not its parents: a run directory that has been moved is not created again
        if missing_bytes(parent, size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with atomic_path(target) as temp:
            filesystem.fs.mkdir(temp)
            entries = {file: write_hashed_file(temp / file, views) for file, views in contents.items()}
            write_new_file(temp / MANIFEST_FILE, dump_sealed_json({**manifest, "name": name, "files": entries}))
            sync_path(temp)
        _verified[str(target)] = _stat_signature(target)  # so that pruning does not read it back
    except OSError as error:
        raise SaveError(error, target, size) from error


def verify_dir(folder: Path) -> str | None:
    """Return None if every file that was committed is there, byte for byte, otherwise the reason why not.

    Other names, e.g. `.DS_Store` or `.nfs*`, are no part of the folder: nothing reads them.
    """
    try:
        for file, entry in sorted(_read_entries(folder).items()):
            if sha256_of(folder / file, entry["size"]) != entry["sha256"]:
                return f"{file}: wrong checksum"
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error.strerror or error)
    except ValueError as error:
        return f"{MANIFEST_FILE}: {error}"
    return None


def read_verified(folder: Path, file: str, limit: int) -> bytes:
    """Return the content of one file of a step folder.

    Raises OSError or ValueError unless it has the checksum of the manifest.
    """
    entry = _read_entries(folder).get(file)
    content = read_bounded(folder / file, limit)
    if entry is None or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise ValueError(f"{file}: wrong checksum")
    return content


def foreign_names(folder: Path) -> list[str]:
    """Return the names in a valid step folder that are no part of it."""
    entries = _read_entries(folder)
    return sorted(set(os.listdir(folder)) - {MANIFEST_FILE, *entries})


def newest_valid(parent: Path) -> tuple[Path | None, list[tuple[str, str]]]:
    """Return the newest valid step folder in `parent`, and (name, reason) of every newer one that was skipped."""
    skipped: list[tuple[str, str]] = []
    for name in step_names(parent):
        reason = verify_dir(parent / name)
        if reason is None:
            return parent / name, skipped
        skipped.append((name, reason))
    return None, skipped


def prune_dirs(parent: Path, keep: int, protect: set[str]) -> list[str]:
    """Delete valid step folders except the newest `keep` (at least two) and the protected ones; return the deleted
    names.

    Invalid folders are neither counted nor deleted.
    """
    valid = valid_names(parent)
    surplus = [name for name in valid[max(keep, 2) :] if name not in protect]
    for name in reversed(surplus):  # oldest first: an interruption leaves the newer ones
        discard_dir(parent / name)
    return surplus


def valid_names(parent: Path) -> list[str]:
    """Return the names of the valid step folders, newest first."""
    return [name for name in step_names(parent) if _verified_cached(parent / name)]


def discard_dir(folder: Path) -> None:
    """Delete a step folder.

    It is renamed durably first, so that no partly deleted folder ever has its name.

    What cannot be deleted after that, e.g. `.nfs*` files that NFS keeps while a reader has them open, is left to
    `remove_temp`.
    """
    trash = folder.parent / temp_name("del", folder.name)
    try:
        filesystem.fs.rename(folder, trash)
    except OSError as error:
        if error.errno not in (errno.EXDEV, *FULL_DISK_ERRORS):  # EXDEV: a folder of a lower layer of overlayfs
            raise
        filesystem.fs.unlink(folder / MANIFEST_FILE)  # invalid from here on
        trash = folder
    else:
        sync_path(folder.parent)
    _verified.pop(str(folder), None)
    remove_quietly(trash)


def remove_temp(parent: Path, kinds: tuple[str, ...] = TEMPORARY) -> list[str]:
    """Remove temporary files of interrupted writers; return their names.

    The caller must hold the lock: a running writer's files look the same.

    Files that cannot be deleted are left: they have no effect, and the next call tries again.
    """
    leftovers = sorted(name for name in os.listdir(parent) if name.startswith(kinds))
    for name in leftovers:
        remove_quietly(parent / name)
    return leftovers


def write_pointer(parent: Path, kind: str, name: str) -> None:
    """Write `name` to the file `parent/kind` (latest, best). For users, and for commands that are given this path; `best` also keeps a folder from pruning. A resume reads neither."""
    try:
        write_atomic_file(parent / kind, f"{name}\n".encode())
    except OSError as error:
        raise SaveError(error, parent / kind, 0) from error


def _read_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the field `files` of the manifest.

    Raises ValueError if it is damaged, of another folder, or not one of `write_atomic_dir`.
    """
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise OSError(errno.ENOTDIR, "not a folder")
    body = load_sealed_json(read_bounded(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES))
    try:
        entries = {
            file: {"size": int(entry["size"]), "sha256": str(entry["sha256"])} for file, entry in body["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError("not a manifest") from error
    if not all(FILE_NAME.fullmatch(file) for file in entries):
        raise ValueError("contains file names outside its folder")
    if (name := body.get("name", folder.name)) != folder.name:  # manifests of format 2 have no name
        raise ValueError(f"it is that of {name!r}: the folder was renamed, or the file copied")
    return entries


def space_for(need: int) -> int:
    """Return how many bytes must be free before a folder of `need` bytes is written."""
    return int(need * 1.1) + RESERVED_BYTES


def missing_bytes(parent: Path, need: int) -> int:
    """Return how many bytes must become free before `need` bytes are written to `parent`; 0: there is enough space."""
    return max(0, space_for(need) - filesystem.fs.free(parent))


_verified: dict[str, list[tuple[Any, ...]] | None] = {}  # folder -> signature of its files when it was valid


def _verified_cached(folder: Path) -> bool:
    """Return whether a folder is valid.

    One that this process has written or verified is read again only if a file has changed since.
    """
    signature = _stat_signature(folder)
    if signature is None:
        return False
    if _verified.get(str(folder)) != signature:
        if verify_dir(folder) is not None:
            return False
        _verified[str(folder)] = signature
    return True


def _stat_signature(folder: Path) -> list[tuple[Any, ...]] | None:
    """Return a value that changes whenever a file in `folder` does; None if it cannot be read."""
    try:
        return sorted(
            (entry.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            for entry in os.scandir(folder)
            if (status := entry.stat(follow_symlinks=False))
        )
    except OSError:
        return None


def step_names(parent: Path) -> list[str]:
    """Return the names of all step folders, newest first."""
    names = os.listdir(parent) if parent.is_dir() else []
    return sorted((name for name in names if STEP_NAME.fullmatch(name)), reverse=True)
