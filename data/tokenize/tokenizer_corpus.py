"""Text to train a tokenizer on: what rows of any shape say, read as a stream; what is unusable is counted, a part is held out to measure on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from common.errors import UserError
from data.schemas.errors import BadRowError
from data.schemas.schemas import SCHEMAS
from data.sources.files import Source

if TYPE_CHECKING:
    from data.tokenize.tokenizer import Tokenizer

HOLDOUT_EVERY = 20  # one row in twenty is not trained on: the tokenizer is measured on it ...
HOLDOUT_MAX = 10_000_000  # ... until these are so many characters of a file
MEASURE_LABELS = ("role", "from", "type", "id")  # strings that say who speaks, not what is said
MEASURE_FIELDS = {key for shape in SCHEMAS.values() for key in shape.keys} | {"input", "history", "system", "tools"}


@dataclass
class TokenizerConfig:
    path: list[str]  # files of rows, globs, folders; one that is named twice counts double
    to: Optional[str]  # the folder to write
    vocab_size: int
    max_lines: int  # rows read from each file at most
    tokenizer: Optional[str]  # instead of training one, measure this
    compare: Optional[str]  # and put this one beside it

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("a tokenizer needs text", "path=[]", "name one file, or several: path=[text.jsonl,chats.jsonl]")
        if self.max_lines < 1:
            raise UserError("a count must be at least 1", f"max_lines={self.max_lines}", "give a positive whole number")
        if self.to and self.tokenizer:
            raise UserError("either train a tokenizer or measure one", f"to={self.to} tokenizer={self.tokenizer}", "leave one of them out")
        if self.tokenizer is None and (not self.to or (Path(self.to).exists() and not Path(self.to).is_dir())):
            raise UserError("a tokenizer is a folder", f"to={self.to}", "name a folder, it is made where there is none; or measure one: tokenizer=DIR")


@dataclass
class CorpusStats:
    """What was met on the way through a corpus."""

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # rows left out, by reason
    first: dict[str, str] = field(default_factory=dict)  # where each reason was met first
    held_out: dict[tuple[str, str], list[tuple[str, str]]] = field(default_factory=dict)  # (where, text) by file and language

    def skip(self, error: BadRowError) -> None:
        self.bad[error.reason] += 1
        self.first.setdefault(error.reason, error.args[1])


def iter_corpus(sources: list[Source], max_lines: int, survey: CorpusStats) -> Iterator[str]:
    """At most `max_lines` rows of each file, in order; a file that is there twice counts double."""
    for turn, source in enumerate(sources):
        seen = CorpusStats() if source in sources[:turn] else survey  # what is wrong with a file is told once
        room = HOLDOUT_MAX
        for number, (place, row) in enumerate(itertools.islice(source.rows(seen.skip), max_lines)):
            texts = [text for text in _chat_text(row) if text.strip()]
            where = source.where(place)
            if not texts:
                seen.skip(BadRowError("a row without text", "a row without text", where, "delete the row"))
            elif number % HOLDOUT_EVERY == 0 and room > 0:
                room -= sum(map(len, texts))
                for text in texts:
                    seen.held_out.setdefault((source.path.name, _language(text)), []).append((where, text))
            else:
                survey.rows += 1
                yield from texts


def _chat_text(row: dict) -> Iterator[str]:
    """The strings of the fields that rows of known shapes keep words in (not a URL beside them); of another row, all."""
    return _strings({key: value for key, value in row.items() if key in MEASURE_FIELDS} or row)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in MEASURE_LABELS:
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _language(text: str) -> str:
    """ "zh" where one character in five is Han, else "en": enough to report the two apart."""
    han = sum("\u4e00" <= character <= "\u9fff" for character in text)
    return "zh" if 5 * han >= len(text) else "en"


@dataclass
class TokenizerReport:
    """What a tokenizer makes of texts it was not trained on."""

    vocabulary: int
    characters: dict[tuple[str, str], float]  # a token, by file and language
    unknown: int  # bytes of the texts that no token stands for: 0 for any byte-level tokenizer
    changed: list[str]  # where texts stand that do not come back to the character


def measure_tokenizer(tokenizer: Tokenizer, held_out: dict[tuple[str, str], list[tuple[str, str]]]) -> TokenizerReport:
    rates, letters = {}, Counter[str]()
    changed: list[str] = []
    for name, texts in held_out.items():
        encoded = tokenizer.encode_batch([text for _, text in texts])
        rates[name] = sum(len(text) for _, text in texts) / max(1, sum(map(len, encoded)))
        changed += [where for (where, text), ids in zip(texts, encoded, strict=True) if tokenizer.decode(ids, skip_special=False) != text]
        for _, text in texts:
            letters.update(text)
    return TokenizerReport(tokenizer.vocab_size, rates, _unknown(tokenizer, letters), changed)


def _unknown(tokenizer: Tokenizer, letters: Counter[str]) -> int:
    """Each letter goes there and back between two others: at the edge of a text some tokenizers drop a space."""
    back = (tokenizer.decode(ids, skip_special=False) for ids in tokenizer.encode_batch([f"x{letter}x" for letter in letters]))
    return sum(count * len(letter.encode()) for (letter, count), text in zip(letters.items(), back, strict=True) if letter not in text)
