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
COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
Items = Iterator[tuple[int, Any]]  # (position, raw row)
Locate = Callable[[int], str]  # position -> "file:line" or "file[index]", for error messages


@contextmanager
def open_stream(path: Path, seekable: bool = False) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield (file on disk, decompressed content). Compression is detected by the first bytes, whatever the file is called."""
    with open(path, "rb") as disk:
        compression = next((name for magic, name in COMPRESSION_MAGIC.items() if disk.peek(4).startswith(magic)), None)
        if compression is None:
            yield disk, disk
            return
        import pyarrow  # reads concatenated frames, and detects a truncated zstd file

        with io.BufferedReader(pyarrow.CompressedInputStream(disk, compression), READ_BYTES) as file:
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
