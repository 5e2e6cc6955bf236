"""Bytes of a data file: decompressed, converted to UTF-8, and line by line, with a limit on the bytes in memory.

UTF-8 and byte order marks are certain. Other encodings are detected by the library charset-normalizer, and used only if
its result is unambiguous; otherwise the file is read as UTF-8, and its first row that is not UTF-8 names data.encoding
with the candidates.
"""

from __future__ import annotations

import bz2
import codecs
import io
import itertools
import json
import lzma
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from common.errors import UserError
from data.types import BadRowError

if TYPE_CHECKING:
    from charset_normalizer import CharsetMatch

BOM = b"\xef\xbb\xbf"
MAX_ROW_BYTES = 64 << 20  # a longer row is a file without line ends, not text
READ_BYTES = 1 << 20  # bytes per read
MAX_EXPANSION = 200  # bytes of rows per byte of a compressed file or a table
MIN_EXPANDED_BYTES = 128 << 20  # that any file may expand to
COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
BZ2_BLOCK = b"1AY&SY"  # after b"BZh" and a digit, which alone may begin a text
UTF8 = "utf-8"
DETECT_BYTES = 64 << 10  # non-ASCII text that the detection reads
SCANNED_BYTES = 64 << 20  # of a file whose first bytes are ASCII, to find a sample for a hint
MIN_NON_ASCII = 20  # fewer non-ASCII bytes are no evidence
MAX_CHAOS = 0.05  # charset-normalizer: share of improbable characters
MIN_COHERENCE = 0.4  # charset-normalizer: agreement with the letter frequencies of a language; of single-byte encodings
MIN_LEAD = 0.05  # of the best candidate before another that gives another text
SEPARATORS = (b"\n", b" ", b'"', b",")  # bytes that are in no multi-byte character
MULTI_BYTE = ("gb18030", "big5", "cp932", "euc_jp", "cp949")
KANA, HANGUL = re.compile("[\u3040-\u30ff]"), re.compile("[\uac00-\ud7a3]")
# least share of the non-ASCII characters, in a text of the language
OWN_LETTERS = {"cp932": (KANA, 0.2), "euc_jp": (KANA, 0.2), "cp949": (HANGUL, 0.8)}
CONTAINED_IN = {  # older variant -> encoding that contains it
    **dict.fromkeys(("gb2312", "gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift_jis_2004", "shift_jisx0213"), "cp932"),
    **dict.fromkeys(("euc_jis_2004", "euc_jisx0213"), "euc_jp"),
    "euc_kr": "cp949",
}
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
        content = _decompress(disk, compression)  # its end would close the file on disk
        file = _file_of(_bounded_chunks(content, disk, path))
        if not seekable:
            yield disk, file
            return
        with tempfile.TemporaryFile() as copy:
            try:
                shutil.copyfileobj(file, copy, READ_BYTES)
            except OSError as error:
                raise UserError(f"the file cannot be decompressed: {error}", path, "copy it again") from error
            copy.seek(0)
            yield disk, copy


def _decompress(disk: BinaryIO, compression: str) -> Any:
    if compression == "bz2":
        return bz2.BZ2File(disk)
    if compression == "xz":
        return lzma.LZMAFile(disk)
    import pyarrow  # reads concatenated frames, and detects a truncated zstd file

    return pyarrow.CompressedInputStream(disk, compression)


def _bounded_chunks(content: Any, disk: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the content. Raises OSError if the file is damaged or truncated, UserError if it expands too much."""
    expanded = 0
    while True:
        try:
            chunk = content.read(READ_BYTES)
        except MemoryError as error:  # a window of gigabytes
            raise OSError("it needs too much memory") from error
        except (EOFError, lzma.LZMAError) as error:
            raise OSError(str(error)) from error
        if not chunk:
            return
        expanded += len(chunk)
        check_expansion(expanded, disk.tell(), path)
        yield chunk


def check_expansion(expanded: int, stored: int, path: str | Path) -> None:
    """Raise UserError if `stored` bytes of a file have become `expanded` bytes of rows, which no text does."""
    if expanded > MIN_EXPANDED_BYTES + MAX_EXPANSION * stored:
        message = f"the file expands to more than {MAX_EXPANSION} times its size: {stored:,} bytes of it are {expanded:,} bytes of rows so far"
        raise UserError(message, path, "if its rows are real, write them as JSON Lines without compression")


def _file_of(chunks: Iterator[bytes]) -> BinaryIO:
    return io.BufferedReader(_ChunkStream(chunks), READ_BYTES)


class _ChunkStream(io.RawIOBase):
    """The bytes of `chunks`, one after another."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (chunk := next(self._chunks, None)) is None:
                return 0
            self._rest = memoryview(chunk)
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
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


def read_jsonl(file: BinaryIO, locate: Locate) -> Items:
    return (item for item in iter_lines(file, locate) if isinstance(item[1], BadRowError) or item[1].strip())


def row_too_large(where: str) -> BadRowError:
    fix = "add the missing line ends, or split the row into shorter ones"
    return BadRowError("row too large", f"the row is larger than {MAX_ROW_BYTES >> 20} MB", where, fix)


# --- encodings ---


def check_encoding(name: str) -> str:
    """Return Python's name of an encoding of text. Raises UserError."""
    try:
        "".encode(name)
        return codecs.lookup(name).name
    except (LookupError, UnicodeError, ValueError) as error:
        fix = "e.g. data.encoding=gb18030, big5, cp932, cp1252 or utf-16; null detects it"
        raise UserError(
            f"data.encoding must be an encoding of text that Python knows, got {name}", f"data.encoding={name}", fix
        ) from error


def encoding_of(head: bytes, is_json: bool, given: str | None) -> str:
    """Return the encoding of a file that begins with `head`: UTF-8 unless another one is certain.

    `given` (data.encoding) replaces the detection, except of a file with a byte order mark or with valid UTF-8 of at
    least MIN_NON_ASCII bytes.
    """
    unicode = json.detect_encoding(head[:4])  # by the byte order mark, and in JSON by zero bytes
    if unicode in ("utf-16", "utf-32") or (is_json and not unicode.startswith(UTF8)):
        return unicode
    is_utf8, non_ascii = _is_utf8(head), len(head) - len(head.decode("ascii", "ignore"))
    if unicode == "utf-8-sig" or (is_utf8 and (non_ascii >= MIN_NON_ASCII or given is None)):
        return UTF8
    if given is not None:
        return given
    candidates, is_certain = guess_encodings(head)
    return candidates[0] if is_certain else UTF8


def _is_utf8(head: bytes) -> bool:
    """Return whether most of the non-ASCII text is valid UTF-8; an invalid byte then is an error of its row."""
    try:
        codecs.getincrementaldecoder(UTF8)().decode(head)  # the last character may be cut
        return True
    except UnicodeDecodeError:
        text = head.decode(UTF8, "replace")
        invalid = text.count("\ufffd")
        return len(text) - len(text.encode("ascii", "ignore")) - invalid >= invalid


def guess_encodings(content: bytes) -> tuple[list[str], bool]:
    """Return (candidates, the most probable one first, whether the first is certain)."""
    sample = b"".join(line for line in content.splitlines(keepends=True) if not line.isascii())[:DETECT_BYTES]
    sample, matches = _match_encodings(sample)
    if not matches:
        return [], False
    best, text = matches[0], str(matches[0])
    names = [_common_name(match.encoding, sample, str(match)) for match in matches]
    close = [
        number
        for number, match in enumerate(matches)
        if match.chaos <= MAX_CHAOS and str(match) != text and names[number] != names[0]
    ]
    is_western = "cp1252" in (names[number] for number in close)
    if best.language == "English" and is_western:
        names = ["cp1252", *names]  # quotes and few accents, which several encodings of Europe explain equally well
        is_certain = True
    elif names[0] in MULTI_BYTE:
        is_certain = best.language != "Unknown" and not close and _has_own_letters(text, names[0])
    else:
        is_certain = best.coherence >= MIN_COHERENCE and all(
            matches[number].coherence <= best.coherence - MIN_LEAD for number in close
        )
        names = ["cp1252", *names] if is_western and not is_certain else names  # the most used of them
    enough = len(sample) - len(sample.decode("ascii", "ignore")) >= MIN_NON_ASCII
    return list(dict.fromkeys(names)), is_certain and enough and best.chaos < MAX_CHAOS


def _has_own_letters(text: str, encoding: str) -> bool:
    """Return whether a text has the letters of the language of its encoding: short texts of others are valid in it,
    too.
    """
    letters, least_share = OWN_LETTERS.get(encoding, (KANA, 0.0))
    return len(letters.findall(text)) >= least_share * sum(not character.isascii() for character in text)


def _match_encodings(sample: bytes) -> tuple[bytes, list[CharsetMatch]]:
    """Return the text that was examined, and what charset-normalizer finds.

    A character that is cut at the end would exclude its encoding: the text ends at a separator, or up to 3 bytes are
    left out.
    """
    from charset_normalizer import from_bytes

    if (end := max(map(sample.rfind, SEPARATORS)) + 1) > len(sample) // 2:
        sample = sample[:end]
    attempts = []
    for part in [sample] if end == len(sample) else [sample[: len(sample) - cut] for cut in range(4)]:
        found = from_bytes(part, steps=16, chunk_size=1024)
        attempts.append(
            (part, [match for match in found if match.encoding not in ("ascii", "utf_8", "utf_16_be", "utf_16_le")])
        )
    return min(attempts, key=lambda attempt: attempt[1][0].chaos if attempt[1] else 1.0)


def _common_name(encoding: str, sample: bytes, text: str) -> str:
    """Return the name of the encoding that contains `encoding` and is used most."""
    if encoding in CONTAINED_IN:
        return CONTAINED_IN[encoding]
    return "cp1252" if sample.decode("cp1252", "replace") == text else encoding


def utf8_stream(file: BinaryIO, encoding: str) -> BinaryIO:
    """Return the content of `file` converted from `encoding` to UTF-8.

    Bytes that are not valid in the encoding become 0xFF, which is not valid in UTF-8 either: their row is a bad row,
    and the others stay readable.
    """
    if encoding == UTF8:
        return file
    texts = codecs.iterdecode(iter(lambda: file.read(READ_BYTES), b""), encoding, "replace")
    return _file_of(text.encode(UTF8, "surrogatepass").replace("\ufffd".encode(), b"\xff") for text in texts)


@lru_cache(64)
def encoding_hint(path: Path, encoding: str) -> str:
    """Return the fix of a row of the text file `path` that is not valid in `encoding`."""
    if encoding != UTF8:
        return "correct or delete the row, or name another encoding: data.encoding=NAME"
    sample, scanned = b"", 0
    with open_stream(path) as (_, file):
        for _, line in iter_lines(file, lambda number: ""):
            if isinstance(line, BadRowError):
                continue
            scanned += len(line)
            if not _is_utf8(line):
                sample += line[:DETECT_BYTES]
            if len(sample) >= DETECT_BYTES or scanned >= SCANNED_BYTES:
                break
    candidates, _ = guess_encodings(sample)
    names = " or ".join(f"data.encoding={name}" for name in candidates[:3]) or "data.encoding=NAME"
    return f"name the encoding of the file{', a guess is' if candidates else ':'} {names}; or correct the row"
