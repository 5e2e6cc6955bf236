"""Text to train a tokenizer on: the strings of rows of any schema, as a stream.

Unusable rows are counted, some rows are held out to evaluate it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from common.errors import UserError
from common.settings import check_at_least
from data.errors import BadRowError
from data.schemas.registry import SCHEMAS
from data.sources.files import Source

if TYPE_CHECKING:
    from data.tokenize.tokenizer import Tokenizer

HOLDOUT_EVERY = 20  # one row in 20 is held out ...
HOLDOUT_MAX = 10_000_000  # ... until the held-out rows of a file have this many characters
LABEL_FIELDS = ("role", "from", "type", "id")  # their strings name the author or the kind of a message and are not text
TEXT_FIELDS = {key for schema in SCHEMAS.values() for key in schema.keys} | {"input", "history", "system", "tools"}
Texts = dict[tuple[str, str], list[tuple[str, str]]]  # (file, language) -> [(file:line, text)]


@dataclass
class TokenizerConfig:
    path: list[str]  # files, globs, folders, hub:owner/name; a file named twice counts double
    to: Optional[str]  # folder to write the tokenizer to; null with tokenizer=DIR
    vocab_size: int  # number of tokens, at most
    max_lines: int  # rows read from each file, at most
    tokenizer: Optional[str]  # folder of a tokenizer to evaluate instead of training one
    compare: Optional[str]  # folder of a second tokenizer to evaluate on the same rows

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError(
                "path must name at least one file, got none", "path=[]", "e.g. path=[text.jsonl,chats.jsonl]"
            )
        check_at_least("max_lines", self.max_lines, 1, 500000)
        if self.to and self.tokenizer:
            raise UserError(
                "to= trains a tokenizer, tokenizer= evaluates one: they exclude each other",
                f"to={self.to} tokenizer={self.tokenizer}",
                "remove one",
            )
        if self.tokenizer is None and (not self.to or (Path(self.to).exists() and not Path(self.to).is_dir())):
            fix = "e.g. to=my_tokenizer, it is created if missing; or evaluate an existing one: tokenizer=DIR"
            raise UserError(f"to must be a folder, got {self.to or 'none'}", f"to={self.to}", fix)


@dataclass
class CorpusStats:
    """Counts of the rows of a corpus, and its held-out texts. Complete when the corpus has been iterated."""

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # rows left out, by reason
    first_seen: dict[str, str] = field(default_factory=dict)  # file:line of the first row of each reason
    held_out: Texts = field(default_factory=dict)

    def skip(self, error: BadRowError) -> None:
        self.bad[error.reason] += 1
        self.first_seen.setdefault(error.reason, error.setting)


def iter_corpus(sources: list[Source], max_lines: int, stats: CorpusStats) -> Iterator[str]:
    """Yield the texts of at most `max_lines` rows of each file, in order; a file that is listed twice is read twice."""
    for number, source in enumerate(sources):
        counts = CorpusStats() if source in sources[:number] else stats  # errors of a file are counted once
        capacity = HOLDOUT_MAX
        for index, (position, row) in enumerate(itertools.islice(source.rows(counts.skip), max_lines)):
            texts = [
                text
                for text in _strings({key: value for key, value in row.items() if key in TEXT_FIELDS} or row)
                if text.strip()
            ]
            where = source.where(position)
            if not texts:
                counts.skip(BadRowError("a row without text", "a row without text", where, "delete the row"))
            elif index % HOLDOUT_EVERY == 0 and capacity > 0:
                capacity -= sum(map(len, texts))
                for text in texts:
                    counts.held_out.setdefault((source.path.name, _language(text)), []).append((where, text))
            else:
                stats.rows += 1
                yield from texts


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in LABEL_FIELDS:
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _language(text: str) -> str:
    """Return "zh" if at least one character in five is Han, else "en": a rough split for the report."""
    han = sum("\u4e00" <= character <= "\u9fff" for character in text)
    return "zh" if 5 * han >= len(text) else "en"


@dataclass
class TokenizerReport:
    """Evaluation of a tokenizer on held-out texts."""

    vocab_size: int
    chars_per_token: dict[tuple[str, str], float]  # by file and language
    unknown_bytes: int  # bytes of the texts without a token: 0 for a byte-level tokenizer
    not_restored: list[str]  # file:line of texts that decoding does not restore exactly


def measure_tokenizer(tokenizer: Tokenizer, held_out: Texts) -> TokenizerReport:
    rates, characters = {}, Counter[str]()
    not_restored: list[str] = []
    for name, texts in held_out.items():
        encoded = tokenizer.encode_batch([text for _, text in texts])
        rates[name] = sum(len(text) for _, text in texts) / max(1, sum(map(len, encoded)))
        not_restored += [
            where
            for (where, text), ids in zip(texts, encoded, strict=True)
            if tokenizer.decode(ids, skip_special=False) != text
        ]
        for _, text in texts:
            characters.update(text)
    return TokenizerReport(tokenizer.vocab_size, rates, _count_unknown_bytes(tokenizer, characters), not_restored)


def _count_unknown_bytes(tokenizer: Tokenizer, characters: Counter[str]) -> int:
    """Encode and decode each character between two letters: some tokenizers drop a space at the end of a text."""
    decoded = (
        tokenizer.decode(ids, skip_special=False)
        for ids in tokenizer.encode_batch([f"x{character}x" for character in characters])
    )
    return sum(
        count * len(character.encode())
        for (character, count), text in zip(characters.items(), decoded, strict=True)
        if character not in text
    )
