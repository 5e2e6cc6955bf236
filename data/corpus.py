"""Text to train a tokenizer on: every string that rows of any shape hold, read as a stream; what is unusable is counted."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.formats import Source

HOLD_OUT_EVERY = 20  # one row in twenty is not trained on: the tokenizer is measured on it
LABELS = ("role", "from")  # strings that say who speaks, not what is said


@dataclass
class TokenizerConfig:
    path: list[str]  # files of rows; one that is named twice counts double
    to: str  # the folder to write
    vocab_size: int
    max_lines: int  # rows read from each file at most

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("a tokenizer needs text", "path=[]", "name one file, or several: path=[text.jsonl,chats.jsonl]")
        if self.max_lines < 1:
            raise ValueError("a count must be at least 1", f"max_lines={self.max_lines}", "give a positive whole number")
        if not self.to or (Path(self.to).exists() and not Path(self.to).is_dir()):
            raise ValueError("a tokenizer is a folder", f"to={self.to}", "name a folder; it is made where there is none")


@dataclass
class Survey:
    """What was met on the way through a corpus."""

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # rows left out, by reason
    first: dict[str, str] = field(default_factory=dict)  # where each reason was met first
    held_out: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # texts by file and language

    def skip(self, error: ValueError) -> None:
        reason, where = error.args[0], error.args[1]
        self.bad[reason] += 1
        self.first.setdefault(reason, where)


def corpus(paths: list[Path], max_lines: int, survey: Survey) -> Iterator[str]:
    """At most `max_lines` rows of each file, in order; a path that is named twice counts double."""
    for turn, path in enumerate(paths):
        source, again = Source.open(path), path in paths[:turn]
        seen = Survey() if again else survey  # what is wrong with a file is told once
        for number, (place, row) in enumerate(itertools.islice(source.rows(seen.skip), max_lines)):
            texts = [text for text in _strings(row) if text.strip()]
            if not texts:
                seen.skip(ValueError("a row without text", source.where(place)))
            elif number % HOLD_OUT_EVERY == 0:
                for text in texts:
                    seen.held_out.setdefault((path.name, _language(text)), []).append(text)
            else:
                survey.rows += 1
                yield from texts


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in LABELS:
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _language(text: str) -> str:
    """ "zh" where one character in five is Han, else "en": enough to report the two apart."""
    han = sum("\u4e00" <= character <= "\u9fff" for character in text)
    return "zh" if 5 * han >= len(text) else "en"
