"""Format and encoding of a data file, from its name and its first bytes."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError
from common.guarded_files import check_pointer
from data.sources.byte_stream import BOM, READ_BYTES, UTF8, encoding_of, open_stream, utf8_stream

EXTENSIONS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".txt", ".md"), "text"),
    **{".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow"},
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
KNOWN_EXTENSIONS = f"{', '.join(EXTENSIONS)}, each also with {', '.join(COMPRESSED[:-1])} or {COMPRESSED[-1]}"
# By file format: arguments of csv.reader, in the order in which they are tried.
CSV_FORMATS: dict[str, dict] = {
    "csv": {"delimiter": ","},
    "csv with ;": {"delimiter": ";"},
    "tsv": {"delimiter": "\t"},
    "csv with |": {"delimiter": "|"},
    "tsv without quotes": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},  # a quote is a character like any other
}
TABLE_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow"}  # of files without a known extension
JSON_START = re.compile(rb'(\[\s*)?\{\s*"')
SAMPLE_BYTES, SAMPLE_RECORDS = 256 << 10, 50  # of a CSV file, to detect its delimiter


def extension_of(path: Path) -> str:
    """Return the extension in lower case, without that of a compression."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def detect_format(path: Path, encoding: str | None, text_unit: str) -> tuple[str, str]:
    """Return (file format, encoding) of a file.

    `encoding` and `text_unit` are the settings of data. Raises UserError if it has no known format.
    """
    known = EXTENSIONS.get(extension_of(path))
    try:
        with open_stream(path) as (_, file):
            head = file.read(READ_BYTES)
        if not head:
            raise _empty_file(path)
        start = head[:100].lstrip().lower()
        check_pointer(path, head)
        if known != "text" and start.startswith((b"<!doctype html", b"<html")):
            fix = "download the file itself; its address on the Hugging Face hub has /resolve/ in place of /blob/"
            raise UserError("the file is an HTML page, not data", path, fix)
        by_magic = next(
            (kind for magic, kind in TABLE_MAGIC.items() if known is None and head.startswith(magic)), known
        )
        if by_magic in ("parquet", "arrow"):
            return by_magic, UTF8
        encoding = encoding_of(head, known in (None, "json"), encoding)
        blanks = b"\r\n" if known in ("csv", "tsv") else b" \t\r\n"
        content = head.removeprefix(BOM).lstrip(blanks) if encoding == UTF8 else b""
        if not content:  # in another encoding, or blank so far
            with open_stream(path) as (_, file):
                content = _first_content(utf8_stream(file, encoding), blanks)
    except PermissionError as error:
        raise UserError("no permission to read the file", path, f"chmod u+r {path}") from error
    except OSError as error:
        raise UserError(f"the file cannot be read: {error}", path, "copy it again") from error
    except UnicodeError as error:  # of the whole file: invalid characters are those of a row
        fix = "name another encoding, of a file without a byte order mark e.g. data.encoding=utf-16-le"
        raise UserError(f"not text in {encoding}: {error}", f"{path}, data.encoding={encoding}", fix) from error
    if not content.strip():
        raise _empty_file(path)
    if known in ("csv", "tsv"):
        return detect_csv(content, known), encoding
    if known == "text" and not _is_json(content):
        return "text lines" if text_unit == "line" else known, encoding
    if known is None and head.startswith(b"PK\x03\x04"):
        raise UserError(
            "spreadsheets and archives are not read", path, "save the sheet as CSV (UTF-8), or unpack the archive"
        )
    if known is None and content[:1] not in b"[{":
        raise UserError(
            "the file format cannot be detected by name or first byte",
            path,
            f"use one of the extensions {KNOWN_EXTENSIONS}",
        )
    first_line, _, rest = content.partition(b"\n")
    # a list on the first line with more lines after it is a (wrong) row of JSON Lines
    is_array = content.startswith(b"[") and not (rest.strip() and isinstance(_value_of(first_line), list))
    return "json array" if is_array else "jsonl", encoding


def _empty_file(path: Path) -> UserError:
    return UserError("the file is empty", path, "write one JSON object per line into it, or leave it out")


def _first_content(file: BinaryIO, blanks: bytes) -> bytes:
    """Return the first chunk that is not blank, without leading `blanks`; b"" if there is none."""
    while chunk := file.read(READ_BYTES):
        if content := chunk.removeprefix(BOM).lstrip(blanks):
            return content
    return b""


def _is_json(content: bytes) -> bool:
    """Return whether a text file begins as JSON rows do, e.g. `rows.jsonl.txt`, of which Windows hides the end: most
    lines are objects, or it is an array.
    """
    lines = [line for line in content.split(b"\n") if line.strip()]
    if len(content) >= READ_BYTES:
        lines.pop()  # it may be cut
    if 2 * sum(_is_object(line.rstrip().removesuffix(b",")) for line in lines) > len(lines):
        return True
    return JSON_START.match(content) is not None and (
        content.startswith(b"[") or not lines or _begins_with_indented_object(content)
    )


def _begins_with_indented_object(content: bytes) -> bool:
    """Return whether the text begins with an object over several lines, and nothing or another object follows."""
    text = content.decode(UTF8, "replace")
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "\n" in text[:end] and text[end:].lstrip()[:1] in ("", "{", ",")


def _is_object(line: bytes) -> bool:
    return line.lstrip().startswith(b"{") and isinstance(_value_of(line), dict)


def _value_of(line: bytes) -> Any:
    """Return the JSON value of a line, None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def detect_csv(content: bytes, otherwise: str) -> str:
    """Return the key of CSV_FORMATS whose records have as many values as the header; `otherwise` for a single column."""
    lines = content[:SAMPLE_BYTES].decode(UTF8, "replace").split("\n")
    lines = [f"{line}\n" for line in (lines[:-1] if len(content) > SAMPLE_BYTES else lines)]
    share = {name: _share_of_matching_records(lines, arguments) for name, arguments in CSV_FORMATS.items()}
    best = max(sorted(share, key=lambda name: name != otherwise), key=lambda name: share[name])
    return best if share[best] else otherwise


def _share_of_matching_records(lines: list[str], arguments: dict) -> float:
    """Return the share of the first records that have as many values as the header, 0 if the header has one value."""
    reader, lengths = csv.reader(lines, strict=True, **arguments), []
    for _ in range(SAMPLE_RECORDS):
        try:
            lengths += [len(cells)] if (cells := next(reader)) else []
        except StopIteration:
            break
        except csv.Error:
            lengths.append(-1)
    return sum(length == lengths[0] for length in lengths) / len(lengths) if lengths and lengths[0] > 1 else 0.0
