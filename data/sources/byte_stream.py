"""Bytes of a file, decompressed and line by line, with a limit on the bytes in memory."""

from __future__ import annotations

import io
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError
from data.errors import BadRowError

BOM = b"\xef\xbb\xbf"
MAX_ROW_BYTES = 64 << 20  # a longer row is a file without line ends, not text
READ_BYTES = 1 << 20  # bytes per read
MAX_EXPANSION = 200  # bytes of rows per byte of a compressed file or a table
MIN_EXPANDED_BYTES = 128 << 20  # that any file may expand to
COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
BZ2_BLOCK = b"1AY&SY"  # after b"BZh" and a digit, which alone may begin a text
Items = Iterator[tuple[int, Any]]  # (position, raw row)
Locate = Callable[[int], str]  # position -> "file:line" or "file[index]", for error messages


@contextmanager
def open_stream(path: Path, seekable: bool = False) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield (file on disk, decompressed content).

    Compression is detected by the first bytes, whatever the file is called.
    """
    with open(path, "rb") as disk:
        head = disk.peek(10)[:10]
        compression = next((name for magic, name in COMPRESSION_MAGIC.items() if head.startswith(magic)), None)
        if compression is None or (compression == "bz2" and head[4:] != BZ2_BLOCK):
            yield disk, disk
            return
        with io.BufferedReader(_BoundedExpansion(disk, _decompress(disk, compression), path), READ_BYTES) as file:
            if not seekable:
                yield disk, file
                return
            with tempfile.TemporaryFile() as copy:
                try:
                    shutil.copyfileobj(file, copy, READ_BYTES)
                except OSError as error:
                    raise UserError(f"the file cannot be decompressed: {error}", str(path), "copy it again") from error
                copy.seek(0)
                yield disk, copy


def _decompress(disk: BinaryIO, compression: str) -> Any:
    if compression in ("bz2", "xz"):
        return _StandardLibraryStream(disk, compression)
    import pyarrow  # reads concatenated frames, and detects a truncated zstd file

    return pyarrow.CompressedInputStream(disk, compression)


def check_expansion(expanded: int, stored: int, path: str | Path) -> None:
    """Raise UserError if `stored` bytes of a file have become `expanded` bytes of rows, which no text does."""
    if expanded > MIN_EXPANDED_BYTES + MAX_EXPANSION * stored:
        message = f"the file expands to more than {MAX_EXPANSION} times its size: {stored:,} bytes of it are {expanded:,} bytes of rows so far"
        raise UserError(message, str(path), "if its rows are real, write them as JSON Lines without compression")


class _BoundedExpansion(io.RawIOBase):
    """Decompressed content of a file that must not expand beyond `check_expansion`."""

    def __init__(self, disk: BinaryIO, content: Any, path: Path) -> None:
        self._disk, self._content, self._path, self._expanded = disk, content, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            part = self._content.read(len(buffer))
        except MemoryError as error:  # a window of gigabytes
            raise OSError("it needs too much memory") from error
        buffer[: len(part)] = part
        self._expanded += len(part)
        check_expansion(self._expanded, self._disk.tell(), self._path)
        return len(part)

    def close(self) -> None:
        self._content.close()
        super().close()


class _StandardLibraryStream(io.RawIOBase):
    """Content of a bz2 or xz file. A damaged or truncated one raises OSError."""

    def __init__(self, disk: BinaryIO, compression: str) -> None:
        import bz2
        import lzma

        self._file = bz2.BZ2File(disk) if compression == "bz2" else lzma.LZMAFile(disk)
        self._errors = (EOFError, lzma.LZMAError)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            part = self._file.read(len(buffer))
        except self._errors as error:
            raise OSError(str(error)) from error
        buffer[: len(part)] = part
        return len(part)


def iter_lines(file: BinaryIO, locate: Locate) -> Items:
    """Yield (number from 1, line). Only \\n ends a line: U+2028 in a text does not."""
    for number in itertools.count(1):
        line = file.readline(MAX_ROW_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(READ_BYTES)
            yield number, row_too_large(locate(number))
        elif line := line.removeprefix(BOM) if number == 1 else line:
            yield number, line


def row_too_large(where: str) -> BadRowError:
    fix = "add the missing line ends, or split the row into shorter ones"
    return BadRowError("row too large", f"the row is larger than {MAX_ROW_BYTES >> 20} MB", where, fix)
