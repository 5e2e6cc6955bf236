"""Files of a folder that another may have made: no link is followed out of it, and nothing but regular files is opened.

A path that the user types may be a link itself; these rules hold for what is inside. One kind of link is followed, for
reading only: those of the Hugging Face cache, from `models--NAME/snapshots/COMMIT/FILE` to `models--NAME/blobs/HASH`
(`common/hub.py`).
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError
from common.filesystem import make_dirs, open_regular, read_bounded, write_atomic_file
from common.hub import snapshot_link_target
from common.limits import parse_json, parse_record

MAX_TOKENIZER_BYTES = 64 << 20  # of each file of a tokenizer; the largest tokenizer.json in use has 35 MB
# of a folder of Hugging Face, as far as it has them
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
)
GENERATION_CONFIG = "generation_config.json"  # how a model is sampled, and its stop tokens
MAX_MODEL_JSON_BYTES = 16 << 20  # of config.json and its like
RECORDS_BYTES = 1 << 16  # of the end of a log, where its last records are
DAMAGED_DIR = "damaged"  # in a run directory: files that could not be read, as they were
DOWNLOAD_HINT = "write or download the folder again"
LFS_POINTER = b"version https://git-lfs"
REPLACE_HINT = "replace it by a regular file or folder, if you trust where this folder came from"


def open_append(path: Path) -> BinaryIO:
    """Open a regular file for reading and appending, without a buffer; it is created if needed.

    Raises OSError for a link, a pipe or a device, UserError for a file with a second name, which would be changed, too.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if status.st_nlink > 1:
        os.close(fd)
        fix = f"make it a file of its own: cp {path} {path}.new && mv {path}.new {path}"
        raise UserError(
            f"the file has {status.st_nlink} names (hard links): appending to it would change it under each of them",
            path,
            fix,
        )
    return open(fd, "a+b", buffering=0)


def read_from(path: Path, start: int, limit: int | None = None) -> bytes:
    """Return the content of a regular file from byte `start` on, at most its last `limit` bytes.

    Raises OSError for a link, a pipe or a device.
    """
    fd, size = open_regular(path)
    with open(fd, "rb") as file:
        file.seek(start if limit is None else max(start, size - limit))
        return file.read()


def last_lines(path: Path, limit: int, start: int = 0) -> list[str]:
    """Return the lines in the last `limit` bytes of a text file, from byte `start` on; [] if it cannot be read."""
    try:
        return read_from(path, start, limit).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def last_records(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in the last RECORDS_BYTES of a log, oldest first; {} for a line that is none."""
    return [parse_record(line.encode()) for line in last_lines(path, RECORDS_BYTES)]


def check_own_files(folder: Path, names: Iterable[str], shallow: Iterable[str] = ()) -> None:
    """Raise UserError if one of `names` in `folder`, or anything below it, is neither a regular file nor a folder.

    Of the names in `shallow` only the entry itself is looked at. What does not exist, or cannot be listed, is left to
    its reader.
    """
    for name in shallow:
        _check_entry(folder / name)
    pending = [folder / name for name in names]
    while pending:
        path = pending.pop()
        if _check_entry(path):
            try:
                pending += [path / name for name in os.listdir(path)]
            except OSError:
                continue


def keep_damaged(folder: Path, name: str, content: bytes) -> str:
    """Write the content of the damaged file `name` of `folder` to `folder/damaged/name`, or with a number; return that
    name. No copy is replaced.
    """
    first = copy = folder / DAMAGED_DIR / name
    make_dirs(first.parent)
    number = 1
    while os.path.lexists(copy):
        with suppress(OSError):  # a link or a folder
            if read_from(copy, 0) == content:  # kept by a launch that was killed
                break
        number += 1
        copy = first.with_name(f"{first.name}.{number}")
    else:
        write_atomic_file(copy, content)
    return str(copy.relative_to(folder))


def check_source_file(path: Path) -> Path:
    """Return `path`, in a folder of a model or tokenizer; of a link within the Hugging Face cache its target.

    Raises UserError for any other link, a pipe or a device.
    """
    source = (path.is_symlink() and snapshot_link_target(path)) or path
    _check_entry(source)
    return source


def open_source_file(path: Path) -> tuple[int, int]:
    """Return a descriptor, to read, and the size of a file of a model folder.

    Raises UserError for what `check_source_file` refuses, and for a missing file.
    """
    source = check_source_file(path)
    try:
        return open_regular(source)
    except OSError as error:
        raise _unreadable(path, error) from error


def read_source_file(path: Path, limit: int) -> bytes:
    """Return the content of a file of a model or tokenizer folder.

    Raises FileNotFoundError, and UserError for what `check_source_file` refuses.
    """
    source = check_source_file(path)
    try:
        content = read_bounded(source, limit)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    check_pointer(path, content)
    return content


def parse_object(content: bytes | str, path: Path) -> dict[str, Any]:
    """Return the JSON object in the content of a file of a model or tokenizer folder. Raises UserError."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise UserError(f"invalid JSON: {error}", path, DOWNLOAD_HINT) from error
    if not isinstance(value, dict):
        raise UserError(f"expected a JSON object, got {type(value).__name__}", path, DOWNLOAD_HINT)
    return value


@contextmanager
def reporting_missing_fields(where: str | Path) -> Iterator[None]:
    """Turn the error of a missing or mistyped field of such an object into a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"a field is missing or has another type: {error}", where, DOWNLOAD_HINT) from error


def check_pointer(path: Path, content: bytes) -> None:
    """Raise UserError if a file that begins with `content` is one that a clone without Git LFS has."""
    if content.startswith(LFS_POINTER):
        raise UserError(
            "a pointer of Git LFS is in place of the file",
            path,
            f"git -C {shlex.quote(str(path.parent))} lfs pull",
        )


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"the file cannot be read: {error.strerror or error}", path, "copy or download the folder again")


def copy_unchanged_tokenizer(source: Path, target: Path) -> None:
    """Copy the TOKENIZER_FILES of a folder, as `read_source_file` reads them, to `target`, a folder of this process."""
    for name in TOKENIZER_FILES:
        if os.path.lexists(source / name):
            (target / name).write_bytes(read_source_file(source / name, MAX_TOKENIZER_BYTES))


def _check_entry(path: Path) -> bool:
    """Return whether `path` is a folder.

    Raises UserError if it is neither a folder, nor a regular file, nor absent.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        return stat.S_ISDIR(mode)
    if stat.S_ISLNK(mode):
        raise UserError(
            "this is a link, and no link is followed in a folder of a run, model or tokenizer", path, REPLACE_HINT
        )
    raise UserError("this is neither a regular file nor a folder, and is not opened", path, REPLACE_HINT)
