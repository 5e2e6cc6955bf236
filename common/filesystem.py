"""File operations whose result survives a power cut: atomic files, synced folders, bounded reads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from common.errors import DISK_ERRORS
from common.limits import parse_json

Result = TypeVar("Result")
Bytes = bytes | bytearray | memoryview
# content of a file, in order; parts of it need not be copied together first. An iterator only where it is read once
Chunks = Bytes | Iterable[Bytes]

ELF_HEADER = struct.Struct("<40sQ10xHH2x")  # the offset of the table of sections, the size of an entry, their number
CHUNK_BYTES = 4 << 20  # bytes per write or read call
RETRY_SECONDS = (0.1, 1.0)  # waits before an operation of a disk that failed is tried again
# e.g. of FUSE and of Windows mounts
NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR})
NO_FOLDER_SYNC_PROMISE = "this file system does not sync folders: after a power cut the newest checkpoints may be missing; a kill of the process loses none"

WEAKER_PROMISES: list[str] = []  # what the file systems that this process has written to cannot do


class FileSystem:
    """Every system call on the disk that must be durable, so that a test can kill, fail or record at each of them."""

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
        """Return the bytes that a user without privileges can still write."""
        stats = os.statvfs(folder)
        return stats.f_bavail * stats.f_frsize


fs = FileSystem()


def retry_disk(action: Callable[[], Result]) -> Result:
    """Return `action()`, repeated after RETRY_SECONDS while it fails with one of DISK_ERRORS.

    Raises the last OSError.
    """
    for seconds in RETRY_SECONDS:
        try:
            return action()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
        time.sleep(seconds)
    return action()


def describe_disk_error(error: OSError, folder: Path, need: int = 0) -> str:
    """Return the reason, the bytes that were needed (0: unknown) and the bytes that are free in `folder`."""
    try:
        free = f"{fs.free(folder):,}"
    except OSError:
        free = "an unknown number of"
    return (
        f"{error.strerror or error}; "
        + (f"it needs {need:,} bytes, " if need else "")
        + f"{free} bytes are free in {folder}"
    )


def add_weaker_promise(promise: str) -> None:
    """Record what this file system cannot do. The run says it once."""
    if promise not in WEAKER_PROMISES:
        WEAKER_PROMISES.append(promise)


def make_dir(path: Path) -> None:
    """Create one folder, synced, unless it exists. Raises FileNotFoundError if its parent does not exist."""
    if path.is_dir():
        return
    try:
        fs.mkdir(path)
    except FileExistsError:  # created by another process meanwhile
        if not path.is_dir():
            raise
    sync_path(path.parent)


def make_dirs(path: Path) -> None:
    """Create a folder and its parents, synced."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    make_dir(path)


def sync_path(path: Path) -> None:
    """Sync a folder's entries, or a file that another library has written.

    Where folders cannot be synced, a weaker promise is recorded.
    """
    fd = fs.open(path, os.O_RDONLY | os.O_NONBLOCK)  # NONBLOCK: opening a pipe would block
    try:
        fs.fsync(fd)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
        add_weaker_promise(NO_FOLDER_SYNC_PROMISE)
    finally:
        fs.close(fd)


def sync_tree(folder: Path) -> None:
    """Sync the files that another library has written, and their folders."""
    for path in folder.iterdir():
        (sync_tree if path.is_dir() else sync_path)(path)
    sync_path(folder)


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the content of a regular file.

    Raises OSError for a link, a pipe, a device, or a file longer than `limit` bytes.
    """
    fd, size = open_regular(path)
    try:
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes, at most {limit:,} are read", str(path))
        return b"".join(iter(lambda: fs.read(fd, CHUNK_BYTES), b""))
    finally:
        fs.close(fd)


def read_texts(folder: Path, names: Iterable[str], limit: int) -> dict[str, str]:
    """Return name -> text of the files that can be read, of at most `limit` bytes together."""
    texts: dict[str, str] = {}
    for name in names:
        with suppress(OSError, ValueError):
            content = read_bounded(folder / name, limit)
            texts[name] = content.decode("utf-8")
            limit -= len(content)
    return texts


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; {} where there is none, it is damaged, or longer than 16 MiB."""
    try:
        content = parse_json(read_bounded(path, 16 << 20))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_new_file(path: Path, data: Chunks) -> None:
    """Write and sync a new file."""
    fd = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for view in as_chunks(data):
            write_all(fd, view)
        fs.fsync(fd)
    finally:
        fs.close(fd)


def write_hashed_file(path: Path, data: Chunks) -> dict[str, Any]:
    """Write and sync a new file; return its size and sha256.

    `data` must not change meanwhile: it is read twice.
    """
    views = list(as_chunks(data))
    digest = hashlib.sha256()

    def update_digest() -> None:
        for view in views:
            digest.update(view)

    # update() releases the GIL, so hashing runs while the disk writes. No executor: it rejects work during interpreter
    # shutdown.
    hashing = threading.Thread(target=update_digest)
    try:
        hashing.start()
    except RuntimeError:  # Python 3.12 starts no thread during shutdown
        update_digest()
    try:
        write_new_file(path, views)
    finally:
        if hashing.ident is not None:
            hashing.join()
    return {"size": sum(map(len, views)), "sha256": digest.hexdigest()}


def as_chunks(data: Chunks) -> Iterator[memoryview]:
    """Yield byte views: len() of each is its size in bytes."""
    for part in [data] if isinstance(data, bytes | bytearray | memoryview) else data:
        yield memoryview(part).cast("B")


def write_all(fd: int, data: Bytes) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += fs.write(fd, view[done : done + CHUNK_BYTES])


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder.

    The file or folder that is made there is renamed to `path`; it is removed if the block raises.

    Readers see the old content or the new one. The caller syncs what it makes; the rename is synced here.
    """
    temp = path.parent / temp_name("tmp", path.name)
    try:
        yield temp
        fs.rename(temp, path)
        sync_path(path.parent)
    except BaseException:
        remove_quietly(temp)
        raise


def write_atomic_file(path: Path, data: Chunks) -> None:
    """Replace `path` by `data`: readers see the old file or the new one, and the new one survives a power cut."""
    with atomic_path(path) as temp:
        write_new_file(temp, data)


def write_atomic_files(files: Iterable[tuple[Path, Chunks]]) -> None:
    """Write each file with `write_atomic_file`, in a folder that is created if it is missing."""
    for path, data in files:
        make_dirs(path.parent)
        write_atomic_file(path, data)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON with `write_atomic_file`.

    Raises ValueError for NaN and infinities, which JSON cannot represent.
    """
    write_atomic_file(path, json_bytes(content))


def json_bytes(content: dict[str, Any]) -> bytes:
    """Return what `write_json` writes; a byte of a path that is not UTF-8 becomes an escape."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


def dump_sealed_json(body: dict[str, Any]) -> bytes:
    """Return `body` as JSON with an additional field `sha256`, the checksum of the other fields."""
    return _indented_json({**body, "sha256": hashlib.sha256(_indented_json(body)).hexdigest()})


def load_sealed_json(raw: bytes) -> dict[str, Any]:
    """Return the body. Raises ValueError unless `raw` is exactly what `dump_sealed_json` wrote."""
    try:
        body = parse_json(raw)
        intact = _indented_json(body) == raw  # also detects changed whitespace
        digest = body.pop("sha256")
        intact &= hashlib.sha256(_indented_json(body)).hexdigest() == digest
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError("not a manifest") from error
    if not intact:
        raise ValueError("changed after it was written")
    return body


def _indented_json(body: Any) -> bytes:
    return json.dumps(body, indent=1, allow_nan=False).encode()


def sha256_of(path: Path, size: int) -> str:
    """Return the sha256 of a regular file of `size` bytes.

    Raises OSError, without reading, if it has another size.
    """
    fd, actual = open_regular(path)
    try:
        if actual != size:
            raise OSError(errno.EIO, f"{actual:,} bytes instead of {size:,}", str(path))
        digest = hashlib.sha256()
        while chunk := fs.read(fd, CHUNK_BYTES):
            digest.update(chunk)
        return digest.hexdigest()
    finally:
        fs.close(fd)


def sha256_of_json(value: Any) -> str:
    """Return the sha256 of a JSON value; the order of names in objects makes no difference."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def crc32_of(fd: int, size: int) -> int:
    """Return the crc32 of the first `size` bytes of an open file."""
    checksum = 0
    for start in range(0, size, CHUNK_BYTES):
        checksum = zlib.crc32(os.pread(fd, min(CHUNK_BYTES, size - start), start), checksum)
    return checksum


def open_regular(path: Path) -> tuple[int, int]:
    """Return a descriptor, to read, and the size of a regular file.

    Raises OSError for a link, a pipe or a device.
    """
    fd = fs.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # NONBLOCK: opening a pipe would block
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        fs.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd, status.st_size


def temp_name(kind: str, name: str) -> str:
    """Return a unique hidden name for what is being written (`tmp`) or deleted (`del`)."""
    return f".{kind}-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_tree(path: Path) -> None:
    """Delete a file or folder; links are not followed."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        for name in os.listdir(path):
            remove_tree(path / name)
        fs.rmdir(path)
    else:
        fs.unlink(path)


def is_private_dir(folder: Path, forbidden: int) -> bool:
    """Return whether `folder` is a folder of this user, no link, without the permissions `forbidden` for others."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & forbidden


def remove_quietly(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError:
        # not created yet, already renamed, or a broken disk; leftovers are removed when the run is opened again
        # (remove_temp)
        return


def is_complete_program(program: Path) -> bool:
    """Return whether a shared object has all its sections.

    The linker writes the ELF header, which says where they are, and their table, last.
    """
    with program.open("rb") as file:
        header = file.read(ELF_HEADER.size)
    if len(header) < ELF_HEADER.size or header.startswith(b"\0\0\0\0"):
        return False
    if not header.startswith(b"\x7fELF\x02\x01"):  # 64 bits, little-endian; another format is not judged
        return True
    _, sections_at, section_size, sections = ELF_HEADER.unpack(header)
    return program.stat().st_size >= sections_at + section_size * sections
