r"""Where a text can be cut so that its parts, encoded by themselves, give the ids of the whole text.

The model of a tokenizer (BPE) encodes pre-tokens independently of each other, so every boundary of pre-tokens is a cut. The pre-tokenizers here are
those whose boundaries can be seen from two characters. Their regular expressions have no lookbehind, and only `\s+(?!\S)` looks ahead, from white space:

- A space after a character that is no white space begins a pre-token in all of them: a space is matched as the first character of an alternative,
  or within a run of white space, which begins there. What is before it is a run that ends there whatever follows.
- So does a line feed, where no alternative continues a run of punctuation with line ends (GPT-2, but not Llama 3 and later).

A text is never cut within white space: `\s+(?!\S)` splits a run by what follows it, and the Digits pre-tokenizer changes what follows.
"""

from __future__ import annotations

import re
from typing import Any

from data.tokenize.tokenizer_limits import ENDINGS

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERNS = tuple(
    ENDINGS + rf"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}", r"\p{N}+")  # Qwen, Llama 3, others
)
# White space that a text begins with, or a space (or line feed) that begins a run of it; then all up to the next such run. The parts make up the text.
# [^\S ] is white space but no space. Python counts four control characters as white space that the tokenizers do not: fewer cuts, never other ones.
CUT_AT_SPACES = re.compile(r"\s*+\S++(?:[^\S ]\s*+\S*+)*+|\s++")
CUT_AT_SPACES_AND_LINES = re.compile(r"\s*+\S++(?:[^\S \n]\s*+\S*+)*+|\s++")


def cut_pattern(stored: dict[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern whose matches are the parts of a text, None if a tokenizer.json has a form whose boundaries are not known here."""
    model, normalizer = stored["model"], stored.get("normalizer")
    if stored["added_tokens"] or model.get("dropout") or model["type"] != "BPE":
        return None  # added tokens are found before pre-tokens; dropout makes ids random
    if normalizer is not None and normalizer.get("type") != "NFC":  # NFC composes nothing with a space or a line feed before or after it
        return None
    parts = _parts(stored.get("pre_tokenizer"))
    if parts and _is_digits(parts[0]) and len(parts) == 2:  # splits inside of pieces and runs only, so every boundary stays one
        parts = parts[1:]
    if len(parts) == 1 and _is_byte_level(parts[0], use_regex=True):
        return CUT_AT_SPACES_AND_LINES
    if len(parts) == 2 and _is_byte_level(parts[1], use_regex=False):
        if _is_split(parts[0], (GPT2_PATTERN,)):
            return CUT_AT_SPACES_AND_LINES
        if _is_split(parts[0], LLAMA3_PATTERNS):
            return CUT_AT_SPACES
    return None


def _parts(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    return list(pre_tokenizer["pretokenizers"]) if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]


def _is_digits(part: dict[str, Any]) -> bool:
    return part.get("type") == "Digits"


def _is_byte_level(part: dict[str, Any], use_regex: bool) -> bool:
    return part.get("type") == "ByteLevel" and part.get("add_prefix_space") is False and part.get("use_regex", True) is use_regex


def _is_split(part: dict[str, Any], patterns: tuple[str, ...]) -> bool:
    is_isolated = part.get("type") == "Split" and part.get("behavior") == "Isolated" and part.get("invert") is False
    return is_isolated and part.get("pattern", {}).get("Regex") in patterns
