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

from data.badrow import BadRow

BOM = b"\xef\xbb\xbf"
LONGEST = 64 << 20  # bytes of one row: more is no text, but a file without line ends
PIECE = 1 << 20  # bytes read at once
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
Items = Iterator[tuple[int, Any]]
Where = Callable[[int], str]


@contextmanager
def opened(path: Path, seekable: bool = False) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(the file on disk, what it holds, unpacked). What is packed is known by its first bytes; its ending may be anything."""
    with open(path, "rb") as disk:
        packed = next((kind for magic, kind in MAGIC.items() if disk.peek(4).startswith(magic)), None)
        if packed is None:
            yield disk, disk
            return
        import pyarrow  # reads frames after one another, and notices a zstd file that is cut off

        with io.BufferedReader(pyarrow.CompressedInputStream(disk, packed), PIECE) as file:
            if not seekable:
                yield disk, file
                return
            with tempfile.TemporaryFile() as copy:
                try:
                    shutil.copyfileobj(file, copy, PIECE)
                except OSError as error:
                    raise ValueError(f"the file cannot be unpacked: {error}", str(path), "copy it again") from error
                copy.seek(0)
                yield disk, copy


def lines(file: BinaryIO, where: Where) -> Items:
    """Lines from 1. Only \\n ends one: U+2028 inside a text does not."""
    for number in itertools.count(1):
        line = file.readline(LONGEST + 1)
        if not line:
            return
        if len(line) > LONGEST:
            while line and not line.endswith(b"\n"):
                line = file.readline(PIECE)
            yield number, too_long(where(number))
        elif line := line.removeprefix(BOM) if number == 1 else line:
            yield number, line


def too_long(where: str) -> BadRow:
    return BadRow("line too long", f"a row of more than {LONGEST >> 20} MB", where, "is a line end missing? Cut the row into shorter ones")
