"""Readers of JSON Lines, JSON arrays and plain text.

A reader of a file format is a function (file, locate) -> (position, raw) pairs, in file order. `file` has the
decompressed bytes. `raw` is the row as JSON bytes or as a dict, or the BadRowError of a row that cannot be read;
`Source.parse` returns the row or raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from common.errors import UserError
from common.limits import check_json_size
from data.sources.byte_stream import BOM, MAX_ROW_BYTES, READ_BYTES, Items, Locate, iter_lines, row_too_large
from data.types import BadRowError, not_utf8

# A string up to its end, or a bracket outside of strings. Possessive quantifiers: a string of megabytes is scanned
# once.
JSON_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[\[\]{}]', re.DOTALL)
REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+("?)', re.DOTALL)


def read_json_array(file: BinaryIO, locate: Locate) -> Items:
    """Yield (index from 0, JSON bytes) of each item of an array; an invalid item leaves the others readable."""
    index = 0
    for level, part in _split_array(file, locate):
        if level == IN_ROW:
            yield index, row_too_large(locate(index)) if part is None else part
            index += 1
        elif level == BETWEEN:
            for raw in _scalars_between(part, locate(index)):
                yield index, raw
                index += not isinstance(raw, BadRowError)
        elif level == UNCLOSED:
            message = "the array is not closed: the file is truncated, or a bracket of this row is missing"
            yield (
                index,
                BadRowError("truncated file", message, locate(index), "copy the file again, or correct the row"),
            )
        elif part is None or part.removeprefix(BOM).strip():
            text = "text" if part is None else repr(part.removeprefix(BOM).strip()[:40])
            raise UserError(
                f"invalid JSON: {text} outside of the array",
                locate(index),
                "write one array of rows per file, or one row per line",
            )


def _scalars_between(gap: bytes | None, where: str) -> Iterator[Any]:
    """Yield the values between two objects: nothing if it is one comma, else numbers and strings (rows of a wrong type)
    or an error.
    """
    if gap is None:
        yield row_too_large(where)
        return
    gap = gap.strip()
    try:
        check_json_size(gap)
        yield from json.loads(b"[" + gap.removeprefix(b",").removesuffix(b",") + b"]")
    except ValueError:  # includes UnicodeDecodeError
        yield BadRowError(
            "invalid JSON",
            f"invalid JSON: {gap[:40]!r} before this row",
            where,
            "write one comma between two rows, and nothing else",
        )


# open brackets; a row that is nested deeper than the parser allows is one bad row, a file of brackets is refused
MAX_UNMATCHED = 10_000
# nesting levels of a part of the file: outside the array, in it, in one of its rows
OUTSIDE, BETWEEN, IN_ROW, UNCLOSED = range(4)


def _split_array(file: BinaryIO, locate: Locate) -> Iterator[tuple[int, bytes | None]]:
    """Yield (level, bytes) of each row and of the text around rows; None for a part that is too large.

    Counts brackets outside of strings only: the JSON of a row is checked when it is parsed.
    """
    part, depth, in_string = bytearray(), 0, False
    for chunk in _chunks_without_split_escapes(file):
        begin = position = 0
        if in_string and (rest := REST_OF_STRING.match(chunk)):
            in_string, position = not rest[1], rest.end()
        for token in JSON_TOKEN.finditer(chunk, position):
            if token[1] is not None:
                in_string = not token[1]
                continue
            before, depth = depth, depth + (1 if token[0] in b"[{" else -1)
            if depth > MAX_UNMATCHED:
                raise UserError(
                    f"more than {MAX_UNMATCHED:,} brackets are open at once: no JSON of rows",
                    locate(0),
                    "copy the file again",
                )
            if min(before, depth) > 1:
                continue
            if before == 2:
                end = after = token.end()
            elif depth == 2:
                end = after = token.start()
            else:  # the brackets of the array are in no part; any other bracket stays in its part and is an error there
                end, after = token.start() if token[0] == b"[]"[before : before + 1] else token.end(), token.end()
            _append(part, chunk[begin:end])
            yield min(before, IN_ROW), _take(part)
            begin, depth = after, max(depth, 0)
        _append(part, chunk[begin:])
    yield (UNCLOSED if depth else OUTSIDE), _take(part)


def _append(part: bytearray, more: bytes) -> None:
    """Append at most so much that the part is longer than MAX_ROW_BYTES."""
    part += more[: MAX_ROW_BYTES + 1 - len(part)]


def _take(part: bytearray) -> bytes | None:
    """Empty the part and return its bytes, None if they are more than MAX_ROW_BYTES."""
    content = bytes(part) if len(part) <= MAX_ROW_BYTES else None
    part.clear()
    return content


def _chunks_without_split_escapes(file: BinaryIO) -> Iterator[bytes]:
    """Yield chunks that do not end between a backslash and the character it escapes."""
    while chunk := file.read(READ_BYTES):
        while chunk.endswith(b"\\") and (more := file.read(1)):
            chunk += more
        yield chunk


def read_text(file: BinaryIO, locate: Locate) -> Items:
    """Yield (line number, {"text": ...}): the file as one document, a long one in several, split at line ends."""
    line, rest, more = 1, file.read(len(BOM)).removeprefix(BOM), True
    while more:
        chunk = file.read(READ_BYTES)
        more = len(chunk) == READ_BYTES
        document, rest = rest + chunk, b""
        if more:
            end = _end_of_document(document)
            document, rest = document[:end], document[end:]
        if document.strip():
            yield line, _decode_document(document, locate(line))
        line += document.count(b"\n")


def read_text_lines(file: BinaryIO, locate: Locate) -> Items:
    """Yield (line number, {"text": ...}) of each line that is not blank."""
    for number, line in iter_lines(file, locate):
        if isinstance(line, BadRowError):
            yield number, line
        elif content := line.rstrip(b"\r\n").strip():
            yield number, _decode_document(content, locate(number))


def _end_of_document(chunk: bytes) -> int:
    """Return the end of the last line; without line ends, a position that is not within a UTF-8 character."""
    if end := chunk.rfind(b"\n") + 1:
        return end
    starts = (len(chunk) - back for back in range(1, 5) if chunk[-back] & 0xC0 != 0x80)
    return next(starts, len(chunk))


def _decode_document(document: bytes, where: str) -> dict | BadRowError:
    try:
        text = document.decode("utf-8")
    except UnicodeDecodeError as error:
        return not_utf8(f"{where}, byte {error.start + 1} from there", error.reason)
    if "\0" in text:
        return BadRowError(
            "binary data",
            "the text contains NUL characters",
            where,
            "remove the binary file, or name its encoding: data.encoding=utf-16-le",
        )
    return {"text": text.replace("\r\n", "\n")}
