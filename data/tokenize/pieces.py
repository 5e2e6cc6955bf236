r"""Cut a text into pieces that are encoded by themselves, and look up pieces that occur again.

The ids are those of the whole text. The model of a tokenizer (BPE) encodes pre-tokens independently of each other, so
every boundary of pre-tokens is a cut. The pre-tokenizers here are those whose boundaries can be seen from two
characters. Their regular expressions have no lookbehind, and only `\s+(?!\S)` looks ahead, from white space:

- A space after a character that is no white space begins a pre-token in all of them: a space is matched as the first
character of an alternative,
  or within a run of white space, which begins there. What is before it is a run that ends there whatever follows.
- So does a line feed, where no alternative continues a run of punctuation with line ends (GPT-2, but not Llama 3 and
later).

A text is never cut within white space: `\s+(?!\S)` splits a run by what follows it, and the Digits pre-tokenizer
changes what follows.

A piece that occurs again is looked up in a tenth of the time of encoding it. No Python runs per token: pieces are
looked up by `map`, and their ids, which are bytes, are joined.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

from data.tokenize.tokenizer_limits import GPT2_PATTERN, LLAMA3_PATTERNS

# White space that a text begins with, or a space (or line feed) that begins a run of it; then all up to the next such
# run. The parts make up the text.
# [^\S ] is white space but no space. Python counts four control characters as white space that the tokenizers do not:
# fewer cuts, never other ones.
CUT_AT_SPACES = re.compile(r"\s*+\S++(?:[^\S ]\s*+\S*+)*+|\s++")
CUT_AT_SPACES_AND_LINES = re.compile(r"\s*+\S++(?:[^\S \n]\s*+\S*+)*+|\s++")


def cut_pattern(stored: dict[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern whose matches are the parts of a text, None if a tokenizer.json has a form whose boundaries are
    not known here.
    """
    model, normalizer = stored["model"], stored.get("normalizer")
    if stored["added_tokens"] or model.get("dropout") or model["type"] != "BPE":
        return None  # added tokens are found before pre-tokens; dropout makes ids random
    # NFC composes nothing with a space or a line feed before or after it
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    pre_tokenizer = stored.get("pre_tokenizer") or {}
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    kinds = [_kind(part) for part in parts]
    if len(kinds) == 2 and kinds[0] == "digits":
        del kinds[0]  # it splits inside of pieces and runs only, so every boundary stays one
    if kinds in (["bytes by GPT-2's pattern"], [GPT2_PATTERN, "bytes"]):
        return CUT_AT_SPACES_AND_LINES
    if len(kinds) == 2 and kinds[0] in LLAMA3_PATTERNS and kinds[1] == "bytes":
        return CUT_AT_SPACES
    return None


def _kind(part: dict[str, Any]) -> str | None:
    """Return what a part of a pre-tokenizer does: a pattern is one that splits. None: something else."""
    match part:
        case {"type": "Digits"}:
            return "digits"
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "bytes by GPT-2's pattern" if part.get("use_regex", True) else "bytes"
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str(pattern)}}:
            return pattern
    return None


MAX_PIECES = 1 << 17  # that are remembered, about 30 MB; then all are forgotten
MAX_PIECE_CHARACTERS = 32  # of a piece that is remembered
# of a text that is cut, at most. Chinese has fewer spaces: its pieces are phrases, which hardly occur again
CHARACTERS_PER_SPACE = 12
FIRST_UNSPACED = "\u2e80"  # scripts without spaces begin here: pieces with one of their characters are not remembered
MAX_CUT_CHARACTERS = 1 << 20  # of the texts that are cut at once, because pieces take 10 times the memory of their text
ID_BYTES = 4
BytesEncoder = Callable[[list[str]], list[bytes]]  # texts -> the ids of each, as bytes of int32
T = TypeVar("T")


class PieceCache:
    """An encoder of texts that remembers the ids of their pieces."""

    def __init__(self, cuts: re.Pattern[str], encode: BytesEncoder) -> None:
        """`cuts`: from `cut_pattern`; `encode`: the encoder without this cache."""
        self._cuts, self._encode_pieces = cuts, encode
        self._known: dict[str, bytes] = {}

    def encode(self, texts: list[str]) -> list[bytes]:
        return [ids for part in limited_parts(texts, len, MAX_CUT_CHARACTERS) for ids in self._encode(part)]

    def _encode(self, texts: list[str]) -> list[bytes]:
        if len(texts) == 1 and len(texts[0]) > MAX_CUT_CHARACTERS:
            return self._encode_pieces(texts)
        found = [
            self._cuts.findall(text) if text.count(" ") * CHARACTERS_PER_SPACE > len(text) else [text] for text in texts
        ]
        known = self._known
        new = [piece for piece in dict.fromkeys(chain.from_iterable(found)) if piece not in known]
        known.update(zip(new, self._encode_pieces(new), strict=True))
        encoded = [b"".join(map(known.__getitem__, pieces)) for pieces in found]
        for piece in new:
            if len(piece) > MAX_PIECE_CHARACTERS or not (piece.isascii() or max(piece) < FIRST_UNSPACED):
                del known[piece]  # it hardly occurs again
        if len(known) > MAX_PIECES:
            known.clear()
        return encoded


def bytes_of_ids(encoded: Iterable[list[int]]) -> list[bytes]:
    """Return each list of ids as bytes of int32."""
    return [array("i", ids).tobytes() for ids in encoded]


def limited_parts(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the items in lists that have at most `limit` together by `size_of`, a larger item by itself."""
    part: list[T] = []
    size = 0
    for item in items:
        item_size = size_of(item)
        if part and size + item_size > limit:
            yield part
            part, size = [], 0
        part.append(item)
        size += item_size
    yield part
