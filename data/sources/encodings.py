"""Encodings of text files: detected from their first bytes, and converted to UTF-8 while a file is read.

UTF-8 and byte order marks are certain. Other encodings are detected by the library charset-normalizer, and used only if
its result is unambiguous; otherwise the file is read as UTF-8, and its first row that is not UTF-8 names data.encoding
with the candidates.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from common.errors import UserError
from data.errors import BadRowError
from data.sources.byte_stream import READ_BYTES, iter_lines, open_stream

if TYPE_CHECKING:
    from charset_normalizer import CharsetMatch

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
        if match.chaos <= best.chaos + 0.02 and str(match) != text and names[number] != names[0]
    ]
    if best.language == "English" and "cp1252" in (names[number] for number in close):
        names = ["cp1252", *names]  # quotes and few accents, which several encodings of Europe explain equally well
        is_certain = True
    elif names[0] in MULTI_BYTE:
        is_certain = best.language != "Unknown" and not close and _has_own_letters(text, names[0])
    else:
        is_certain = best.coherence >= MIN_COHERENCE and all(
            matches[number].coherence <= best.coherence - MIN_LEAD for number in close
        )
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
    return "cp1252" if _gives(sample, "cp1252", text) else encoding


def _gives(sample: bytes, encoding: str, text: str) -> bool:
    try:
        return sample.decode(encoding) == text
    except UnicodeDecodeError:
        return False


def utf8_stream(file: BinaryIO, encoding: str) -> BinaryIO:
    """Return the content of `file` converted from `encoding` to UTF-8."""
    return file if encoding == UTF8 else io.BufferedReader(_Utf8Stream(file, encoding), READ_BYTES)


class _Utf8Stream(io.RawIOBase):
    """Bytes that are not valid in the encoding become 0xFF, which is not valid in UTF-8 either: their row is a bad row,
    and the others stay readable.
    """

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file, self._decoder = file, codecs.getincrementaldecoder(encoding)("replace")
        self._converted, self._is_end = memoryview(b""), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._converted and not self._is_end:
            chunk = self._file.read(READ_BYTES)
            self._is_end = not chunk
            text = self._decoder.decode(chunk, final=self._is_end)
            self._converted = memoryview(text.encode(UTF8, "surrogatepass").replace("\ufffd".encode(), b"\xff"))
        part, self._converted = self._converted[: len(buffer)], self._converted[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


@lru_cache(64)
def encoding_hint(path: Path, encoding: str) -> str:
    """Return the fix of a row of the text file `path` that is not valid in `encoding`."""
    if encoding != UTF8:
        return "correct or delete the row, or name another encoding: data.encoding=NAME"
    sample, scanned = b"", 0
    with open_stream(path) as (_, file):
        for _, line in iter_lines(file, lambda number: ""):
            scanned += 0 if isinstance(line, BadRowError) else len(line)
            if not isinstance(line, BadRowError) and not _is_utf8(line):
                sample += line[:DETECT_BYTES]
            if len(sample) >= DETECT_BYTES or scanned >= SCANNED_BYTES:
                break
    candidates, _ = guess_encodings(sample)
    names = " or ".join(f"data.encoding={name}" for name in candidates[:2]) or "data.encoding=NAME"
    return f"name the encoding of the file{', a guess is' if candidates else ':'} {names}; or correct the row"
