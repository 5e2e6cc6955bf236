"""The few calls that touch the disk, and what is built from them: files and entries that survive a power cut."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Bytes = bytes | bytearray | memoryview
Chunks = Bytes | Sequence[Bytes]  # of a file, in order: what lies in memory in parts need not be copied together first

CHUNK_BYTES = 4 << 20  # bytes a single write or read asks for


class FileSystem:
    """Every call that touches the disk goes through here, so that a test can kill, fail or record at each of them."""

    mkdir = staticmethod(os.mkdir)
    open = staticmethod(os.open)
    read = staticmethod(os.read)
    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)

    @staticmethod
    def free(folder: Path) -> int:
        """Bytes that a user without privileges may still write."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


fs = FileSystem()


def make_dirs(path: Path) -> None:
    """mkdir -p whose entries survive a power cut."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    try:
        fs.mkdir(path)
    except FileExistsError:  # another process was faster
        if not path.is_dir():
            raise
    sync_dir(path.parent)


def sync_dir(path: Path) -> None:
    _sync(path, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """What somebody else has written there."""
    _sync(path, os.O_NOFOLLOW)


def _sync(path: Path, kind: int) -> None:
    fd = fs.open(path, os.O_RDONLY | kind)
    try:
        fs.fsync(fd)
    finally:
        fs.close(fd)


def sync_tree(folder: Path) -> None:
    """Files that a library has written, and the folders they stand in, onto the disk."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
            continue
        fd = fs.open(path, os.O_RDONLY)
        try:
            fs.fsync(fd)
        finally:
            fs.close(fd)
    sync_dir(folder)


def read_bounded(path: Path, limit: int) -> bytes:
    """At most `limit` bytes of a regular file; a link, a pipe, a device or a longer file is an OSError."""
    fd, size = _open_regular(path)
    try:
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes, at most {limit:,} are believed", str(path))
        return b"".join(_chunks(fd))
    finally:
        fs.close(fd)


def write_new_file(path: Path, data: Chunks) -> dict[str, Any]:
    """Write and sync a new file; returns its size and sha256. `data` must not change meanwhile: it is read twice."""
    views = as_chunks(data)
    digest = hashlib.sha256()

    def sum_up() -> None:
        for view in views:
            digest.update(view)

    # update() lets go of the GIL, so it hides behind the disk. No executor: those refuse work while the program is leaving.
    hashing = threading.Thread(target=sum_up)
    try:
        hashing.start()
    except RuntimeError:  # nor does Python 3.12 start a thread then
        sum_up()
    try:
        _write_and_sync(path, views)
    finally:
        if hashing.ident is not None:
            hashing.join()
    return {"size": sum(map(len, views)), "sha256": digest.hexdigest()}


def as_chunks(data: Chunks) -> list[memoryview]:
    """As bytes, each as long as its len()."""
    parts = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    return [memoryview(part).cast("B") for part in parts]


def _write_and_sync(path: Path, views: list[memoryview]) -> None:
    fd = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for view in views:
            done = 0
            while done < len(view):
                done += fs.write(fd, view[done : done + CHUNK_BYTES])
        fs.fsync(fd)
    finally:
        fs.close(fd)


def write_atomic_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`: readers see the old file or the new one, and the new one survives a power cut."""
    temp = path.parent / temp_name("tmp", path.name)
    try:
        write_new_file(temp, data)
        fs.rename(temp, path)
        sync_dir(path.parent)
    except BaseException:
        remove_quietly(temp)
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`replace` with readable JSON; NaN and infinities are a ValueError, JSON has no word for them."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic_file(path, f"{text}\n".encode("utf-8", "backslashreplace"))


def sha256_of(path: Path, size: int) -> str:
    """sha256 of a regular file of exactly `size` bytes; another size is an OSError, found without reading."""
    fd, found = _open_regular(path)
    try:
        if found != size:
            raise OSError(errno.EIO, f"{found:,} bytes instead of {size:,}", str(path))
        digest = hashlib.sha256()
        for chunk in _chunks(fd):
            digest.update(chunk)
        return digest.hexdigest()
    finally:
        fs.close(fd)


def _open_regular(path: Path) -> tuple[int, int]:
    fd = fs.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # NONBLOCK: a pipe put in its place would hold us forever
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        fs.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd, found.st_size


def _chunks(fd: int) -> Iterator[bytes]:
    while chunk := fs.read(fd, CHUNK_BYTES):
        yield chunk


def temp_name(kind: str, name: str) -> str:
    """A name no other writer takes, for what is not there yet (tmp) or no longer (del)."""
    return f".{kind}-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_tree(path: Path) -> None:
    """rm -r, following no link."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        for name in os.listdir(path):
            remove_tree(path / name)
        fs.rmdir(path)
    else:
        fs.unlink(path)


def remove_quietly(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError:
        return  # not made yet, already renamed, or a broken disk: what stays is swept by the next holder of the lock
