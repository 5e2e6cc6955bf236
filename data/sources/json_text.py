"""How each kind of file is taken apart into rows, as a stream: what is held at once does not grow with the file.

A reader gets the bytes (unpacked already), gives (place, raw), and names places by `where`; raw is what `Source.row` makes a row of: bytes of JSON, a row as it is, or the BadRow that stands in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from common.errors import UserError
from data.schemas.errors import BadRowError
from data.sources.byte_stream import BOM, MAX_LINE_BYTES, READ_BYTES, ItemPosition, Items, iter_lines, line_too_long
from data.sources.tables import read_arrow, read_csv, read_parquet

# To the end of a string, and what else matters outside of one. Possessive: a string of megabytes is walked through once.
JSON_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[\[\]{}]', re.DOTALL)
REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+("?)', re.DOTALL)


def read_jsonl(file: BinaryIO, where: ItemPosition) -> Items:
    return (item for item in iter_lines(file, where) if isinstance(item[1], BadRowError) or item[1].strip())


def read_array(file: BinaryIO, where: ItemPosition) -> Items:
    """Items of a JSON array from 0, as the bytes of each: one broken row leaves the others readable."""
    place = 0
    for level, part in _split_array(file):
        if level == IN_ROW:
            yield place, line_too_long(where(place)) if part is None else part
            place += 1
        elif level == BETWEEN:
            for raw in _between(part, where(place)):
                yield place, raw
                place += not isinstance(raw, BadRowError)
        elif level == UNCLOSED:
            what = "the array is not closed: the file is cut off, or a bracket of this row is missing"
            yield place, BadRowError("file cut off", what, where(place), "copy the file again, or mend the row")
        elif part is None or part.removeprefix(BOM).strip():
            found = "more" if part is None else repr(part.removeprefix(BOM).strip()[:40])
            raise UserError(f"broken JSON: {found} stands outside of the array", where(place), "a file is one array of rows, or holds one row a line")


def _between(gap: bytes | None, where: str) -> Iterator[Any]:
    """A comma stands between two rows, and nothing is wrong; else numbers and strings, which are rows of a wrong kind."""
    if gap is None:
        yield line_too_long(where)
        return
    gap = gap.strip()
    try:
        yield from json.loads(b"[" + gap.removeprefix(b",").removesuffix(b",") + b"]")
    except ValueError:  # UnicodeDecodeError is one, too
        yield BadRowError("broken JSON", f"broken JSON: {gap[:40]!r} before this row", where, "put one comma between two rows, and nothing else")


OUTSIDE, BETWEEN, IN_ROW, UNCLOSED = range(4)


def _split_array(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """The file in parts: rows, and what stands around them. Brackets outside of strings are counted, no more. None: a part too long to hold."""
    held, depth, in_string = _BoundedBuffer(), 0, False
    for chunk in _whole_escapes(file):
        begin = at = 0
        if in_string and (rest := REST_OF_STRING.match(chunk)):
            in_string, at = not rest[1], rest.end()
        for token in JSON_TOKEN.finditer(chunk, at):
            if token[1] is not None:
                in_string = not token[1]
                continue
            before, depth = depth, depth + (1 if token[0] in b"[{" else -1)
            if min(before, depth) > 1:
                continue
            if before == 2:
                end = after = token.end()
            elif depth == 2:
                end = after = token.start()
            else:  # the brackets of the array belong to no part; any other is left in, to be found there
                end, after = token.start() if token[0] == b"[]"[before : before + 1] else token.end(), token.end()
            held.add(chunk[begin:end])
            yield min(before, IN_ROW), held.take()
            begin, depth = after, max(depth, 0)
        held.add(chunk[begin:])
    yield (UNCLOSED if depth else OUTSIDE), held.take()


class _BoundedBuffer:
    """Bytes collected so far, and not more than a row may have."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, part: bytes) -> None:
        self.size += len(part)
        self.parts = [*self.parts, part] if self.size <= MAX_LINE_BYTES else []

    def take(self) -> bytes | None:
        taken = b"".join(self.parts) if self.size <= MAX_LINE_BYTES else None
        self.parts, self.size = [], 0
        return taken


def _whole_escapes(file: BinaryIO) -> Iterator[bytes]:
    """Pieces of the file that do not end between a backslash and what it escapes."""
    while chunk := file.read(READ_BYTES):
        while chunk.endswith(b"\\") and (more := file.read(1)):
            chunk += more
        yield chunk


def read_text(file: BinaryIO, where: ItemPosition) -> Items:
    """One file is one document; a longer one is cut at line ends. Counted by the line that a piece begins with."""
    line, rest, more = 1, file.read(len(BOM)).removeprefix(BOM), True
    while more:
        read = file.read(READ_BYTES)
        more = len(read) == READ_BYTES
        piece = rest + read
        piece, rest = (piece[: (seam := _seam(piece))], piece[seam:]) if more else (piece, b"")
        if piece.strip():
            yield line, _document(piece, where(line))
        line += piece.count(b"\n")


def _seam(piece: bytes) -> int:
    """After the last line end; where there is none, not inside of a character."""
    if end := piece.rfind(b"\n") + 1:
        return end
    starts = (len(piece) - back for back in range(1, 5) if piece[-back] & 0xC0 != 0x80)
    return next(starts, len(piece))


def _document(piece: bytes, where: str) -> dict | BadRowError:
    try:
        words = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        fix = "save the file as UTF-8, e.g. with: iconv -f LATIN1 -t UTF-8"
        return BadRowError("not UTF-8", f"not UTF-8: {error.reason}", f"{where}, byte {error.start + 1} from there", fix)
    if "\0" in words:
        return BadRowError("not a text", "the text holds NUL characters", where, "is it a binary file, or UTF-16? Save it as UTF-8")
    return {"text": words.replace("\r\n", "\n")}


TEXT_READERS: dict[str, Callable[[BinaryIO, ItemPosition], Items]] = {
    "jsonl": read_jsonl,
    "array": read_array,
    "text": read_text,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
}
