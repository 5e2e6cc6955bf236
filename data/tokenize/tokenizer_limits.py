r"""Limits on a tokenizer.json that another has written: its parts, token ids, how much a text can grow, and the time of
its regular expressions.

The library runs regular expressions in Rust, where no signal of Python ends them. Those of public tokenizers are known;
others must first split hard texts in a process with limits (`python -m data.tokenize.tokenizer_limits <
[tokenizer.json, texts]`). No probe finds every expression that is
slow for some text: the processes that tokenize a data set have deadlines, too.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from common.limits import limit_process, run_limited
from data.tokenize.renderer import limited_environment

MAX_ADDED_TOKENS = 100_000
MAX_ADDED_CHARACTERS = 1000  # of an added token
MAX_TOKEN_ID = 4_000_000
MODEL_TYPES = ("BPE", "Unigram", "WordPiece", "WordLevel")
# of Unigram, which compares each character of a text with as many, and takes 350 bytes of memory for each byte
MAX_UNIGRAM_PIECE, MAX_PIECE_BYTES = 64, 4 << 20
MAX_WORDPIECE_INPUT = 100  # of WordPiece, whose time grows with its square
MAX_COMPONENTS = 64  # normalizers, pre-tokenizers and decoders
MAX_PATTERN_CHARACTERS = 4000  # of a regular expression
MAX_GROWTH = 64  # characters that the normalizers, or the decoders, make of one
PROBE_SECONDS, PROBE_CHARACTERS, PROBE_UNITS = 3, 10_000, 60  # processor time of a probe; of a text, and the texts
PROBE_MEMORY = 1 << 30  # bytes of the process
SECTIONS = ("normalizer", "pre_tokenizer", "decoder")
PART_FIELDS = {"type", "pattern", "prepend", "precompiled_charsmap"}  # the library knows some parts without a type
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERNS = tuple(
    ENDINGS + rf"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}", r"\p{N}+")  # Qwen, Llama 3, others
)
KNOWN_PATTERNS = frozenset(  # of public tokenizers: GPT-2, Llama 3, Qwen, GPT-4o, DeepSeek, SmolLM3
    [
        GPT2_PATTERN,
        *LLAMA3_PATTERNS,
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}?|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"\p{N}{1,3}",
        r"\d",
        r"\d{1,3}",
        r"[0-9]",
        r"\s+$",
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r" {2,}",
        r"\n",
        r" ",
    ]
)
COMMON_UNITS = (" ", "\n", "\t", "a", "A", "1", "'", "!", "_", "\u00e9", "\u4e2d", "\u0301", "aA", "a ", " \n", "1.")
LITERAL = re.compile(r"[^\\\[\](){}|?*+.^$]{1,20}")
OTHER_TOKENIZER_HINT = (
    "choose another tokenizer, or train one: python runner/tokenizer.py path=[text.jsonl] to=my_tokenizer"
)


def find_problem(stored: dict[str, Any]) -> str | None:
    """Return why a tokenizer.json is beyond the limits, before the library builds it.

    Raises KeyError or TypeError for another form.
    """
    added, model = stored["added_tokens"], stored["model"]
    if model["type"] not in MODEL_TYPES:
        return f"the model of the tokenizer must be one of {', '.join(MODEL_TYPES)}, got {model['type']}"
    vocab = model["vocab"]
    if model["type"] == "Unigram":
        pieces = [*(piece for piece, _ in vocab), *(token["content"] for token in added)]
        vocab = dict(enumerate(range(len(vocab))))
        if max(map(len, pieces), default=0) > MAX_UNIGRAM_PIECE or len("".join(pieces).encode()) > MAX_PIECE_BYTES:
            return (
                f"a piece has more than {MAX_UNIGRAM_PIECE} characters, or all have more than {MAX_PIECE_BYTES:,} bytes"
            )
    texts = [value for value in model.values() if isinstance(value, str)]
    # language: allow word
    longest_input = model.get("max_input_chars_per_word", 0)
    if max(map(len, texts)) > MAX_UNIGRAM_PIECE or longest_input > MAX_WORDPIECE_INPUT:
        return f"a prefix of the model has more than {MAX_UNIGRAM_PIECE} characters, or WordPiece splits more than {MAX_WORDPIECE_INPUT}"
    ids = [*vocab.values(), *(token["id"] for token in added)]
    if not all(type(token_id) is int and 0 <= token_id < MAX_TOKEN_ID for token_id in ids):
        return f"a token has an id outside of [0, {MAX_TOKEN_ID:,})"
    if len(added) > MAX_ADDED_TOKENS or any(len(token["content"]) > MAX_ADDED_CHARACTERS for token in added):
        return f"more than {MAX_ADDED_TOKENS:,} added tokens, or one of more than {MAX_ADDED_CHARACTERS:,} characters"
    unknown: set[str] = set()
    for section in SECTIONS:
        parts = list(_components(stored.get(section)))
        if len(parts) > MAX_COMPONENTS:
            return f"the {section} has {len(parts)} parts, at most {MAX_COMPONENTS} are allowed"
        if math.prod(map(_growth, parts)) > MAX_GROWTH:
            return f"the {section} can make a text more than {MAX_GROWTH} times as long"
        patterns = [pattern for part in parts if isinstance(pattern := part.get("pattern"), dict)]
        unknown |= {pattern["Regex"] for pattern in patterns if "Regex" in pattern} - KNOWN_PATTERNS
    if length := max((len(each) for each in unknown if len(each) > MAX_PATTERN_CHARACTERS), default=0):
        return f"a regular expression has {length:,} characters, at most {MAX_PATTERN_CHARACTERS:,} are allowed"
    # Without the vocabulary: 260,000 tokens need most of the probe's time and memory, and regular expressions do not
    # depend on them.
    probed = {**stored, "added_tokens": [], "post_processor": None, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    if unknown and (problem := _probe(json.dumps(probed), tuple(sorted(unknown)))):
        return f"the tokenizer has a regular expression that is not usable: {problem}"
    return None


def _components(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every part of a section, those in a Sequence too."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _components(item)
    if isinstance(value, dict) and PART_FIELDS & value.keys():
        yield value


def _growth(part: dict[str, Any]) -> float:
    """Return how many characters a part makes of one at most.

    Prepend adds its text once; it counts like a replacement of one character.
    """
    if "precompiled_charsmap" in part:
        return max(1.0, _longest_text(part["precompiled_charsmap"]))
    content = part.get("content", part.get("prepend", part.get("replacement", "")))
    if not isinstance(content, str):
        return 1.0
    match part:
        case {"pattern": {"String": str(replaced)}}:
            return max(1.0, len(content) / max(1, len(replaced)))
    return max(1.0, len(content))


def _longest_text(charsmap: str) -> int:
    """Return the characters of the longest text that a map of SentencePiece can write: after the size (4 bytes) and the
    trie come texts that end in NUL.
    """
    content = base64.b64decode(charsmap)
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))


@lru_cache(maxsize=8)
def _probe(tokenizer_json: str, patterns: tuple[str, ...]) -> str | None:
    """Split hard texts with the tokenizer in a process with limits; return what went wrong, or None."""
    literals = dict.fromkeys(literal for pattern in patterns for literal in (LITERAL.findall(pattern) + list(pattern)))
    units = [*COMMON_UNITS, *(literal for literal in literals if literal not in COMMON_UNITS)][:PROBE_UNITS]
    texts = [
        unit * (PROBE_CHARACTERS // len(unit)) + end
        for unit in units
        for end in ("\u0001", f"\u0001 {''.join(literals)[:200]}")
    ]
    env = limited_environment() | {"TOKENIZERS_PARALLELISM": "false"}
    command = ["-P", "-m", "data.tokenize.tokenizer_limits"]
    beyond = f"it needs more than {PROBE_SECONDS} seconds or 1 GB for texts of {PROBE_CHARACTERS:,} characters"
    try:
        run_limited(command, [tokenizer_json, texts], beyond, env)
    except ValueError as error:
        return str(error)
    return None


def probe_tokenizer() -> int:
    """Encode and decode texts with a tokenizer, within limits that the kernel holds; both are on stdin.

    Return 0 if that succeeds, or 1 with an error on stderr; a signal ends the process at a limit.
    """
    from tokenizers import Tokenizer as Engine

    tokenizer_json, texts = json.load(sys.stdin)
    limit_process(PROBE_MEMORY, PROBE_SECONDS + math.ceil(time.process_time()))  # those of the start do not count
    try:
        engine = Engine.from_str(tokenizer_json)
        for text in texts:
            engine.encode(text, add_special_tokens=False)
            if engine.decoder is not None:
                engine.decoder.decode([text])
    except BaseException as error:  # a panic of the library is no Exception
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(probe_tokenizer())
