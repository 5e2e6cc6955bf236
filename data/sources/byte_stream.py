"""Bytes of a file, unpacked and line by line, with a bound on what is held at once."""

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
from data.schemas.errors import BadRowError

BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 64 << 20  # bytes of one row: more is no text, but a file without line ends
READ_BYTES = 1 << 20  # bytes read at once
COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
Items = Iterator[tuple[int, Any]]
ItemPosition = Callable[[int], str]


@contextmanager
def open_stream(path: Path, seekable: bool = False) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(the file on disk, what it holds, unpacked). What is packed is known by its first bytes; its ending may be anything."""
    with open(path, "rb") as disk:
        packed = next((kind for magic, kind in COMPRESSION_MAGIC.items() if disk.peek(4).startswith(magic)), None)
        if packed is None:
            yield disk, disk
            return
        import pyarrow  # reads frames after one another, and notices a zstd file that is cut off

        with io.BufferedReader(pyarrow.CompressedInputStream(disk, packed), READ_BYTES) as file:
            if not seekable:
                yield disk, file
                return
            with tempfile.TemporaryFile() as copy:
                try:
                    shutil.copyfileobj(file, copy, READ_BYTES)
                except OSError as error:
                    raise UserError(f"the file cannot be unpacked: {error}", str(path), "copy it again") from error
                copy.seek(0)
                yield disk, copy


def iter_lines(file: BinaryIO, where: ItemPosition) -> Items:
    """Lines from 1. Only \\n ends one: U+2028 inside a text does not."""
    for number in itertools.count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(READ_BYTES)
            yield number, line_too_long(where(number))
        elif line := line.removeprefix(BOM) if number == 1 else line:
            yield number, line


def line_too_long(where: str) -> BadRowError:
    return BadRowError("line too long", f"a row of more than {MAX_LINE_BYTES >> 20} MB", where, "is a line end missing? Cut the row into shorter ones")
