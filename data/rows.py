"""A file of rows as token ids: everything is encoded once, into flat arrays."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.chat import ChatTemplate, Encoded
from data.formats import SHAPES, Source, check_text, fields
from data.tokenizer import Tokenizer

CHUNK = 1024  # rows encoded in one call: enough to keep every core busy, little to hold at once


@dataclass(frozen=True)
class Sequence:
    ids: np.ndarray  # int32 (n,), n <= max_length + 1: the model reads all but the last and predicts all but the first
    learn: np.ndarray  # bool (n,): learn[t] where predicting token t is a lesson; learn[0] is False, nothing predicts it


@dataclass(frozen=True)
class Row:
    sequences: tuple[Sequence, ...]  # one; (chosen, rejected) for a preference pair
    name: str  # file:line


@dataclass(frozen=True)
class Rows:
    """Sequence s is `tokens[offsets[s]:offsets[s + 1]]`; row i is `sides` sequences from `index[i] * sides` on."""

    tokens: np.ndarray  # int32
    learn: np.ndarray  # bool, one a token
    offsets: np.ndarray  # int64
    places: np.ndarray  # int64, where each row stands in the source
    index: np.ndarray  # int64, which rows these are: `take` shares all other arrays
    sides: int
    source: Source
    fingerprint: str  # of the file's bytes and of everything that turned them into ids

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Row:
        row = int(self.index[i])
        spans = [slice(*self.offsets[s : s + 2]) for s in range(row * self.sides, (row + 1) * self.sides)]
        return Row(tuple(Sequence(self.tokens[span], self.learn[span]) for span in spans), self.source.where(int(self.places[row])))

    def take(self, indices: np.ndarray) -> Rows:
        return replace(self, index=self.index[indices])


# What one row of the file becomes: sequences of (ids, learn), `sides` of them for each row of the result.
Made = tuple[int, list[Encoded]]


def build_rows(shape: str, path: Path, tokenizer: Tokenizer, max_length: int) -> Rows:
    """Encode a file of `text`, `chat` or `preference` rows.

    Text longer than max_length is cut into rows that overlap by one token, so that each token is predicted exactly once.
    Conversations are cut off at max_length. A row that holds nothing to learn is refused by name.
    """
    source = Source.open(path)
    make = {"text": _texts, "chat": _chats, "preference": _pairs}[shape](source, tokenizer, max_length)
    raw = ((place, fields(row, shape, source.where(place))) for place, row in source.rows())
    store = _Store()
    while chunk := list(itertools.islice(raw, CHUNK)):
        store.add(make(chunk))
    if not store.places:
        raise ValueError("the file holds no row", str(source.path), "give a file with one JSON object a line")
    sides = len(SHAPES[shape])
    return store.rows(sides, source, _fingerprint(source.path, shape, tokenizer, max_length))


def _texts(source: Source, tokenizer: Tokenizer, max_length: int) -> Callable[[list], Iterator[Made]]:
    def make(chunk: list) -> Iterator[Made]:
        texts = [check_text(text, source.where(place)) for place, (text,) in chunk]
        for (place, _), ids in zip(chunk, tokenizer.encode_batch(texts), strict=True):
            ids = [tokenizer.bos_id, *ids, tokenizer.eos_id]
            for start in range(0, len(ids) - 1, max_length):
                part = ids[start : start + max_length + 1]
                yield place, [(part, [True] * len(part))]

    return make


def _chats(source: Source, tokenizer: Tokenizer, max_length: int) -> Callable[[list], Iterator[Made]]:
    template = ChatTemplate(tokenizer)

    def make(chunk: list) -> Iterator[Made]:
        encoded = template.encode_batch((messages, None, f"{source.where(place)} conversations") for place, (messages,) in chunk)
        for (place, _), chat in zip(chunk, encoded, strict=True):
            yield place, [_cut(chat, max_length, source.where(place))]

    return make


def _pairs(source: Source, tokenizer: Tokenizer, max_length: int) -> Callable[[list], Iterator[Made]]:
    """Tokens that chosen and rejected begin with in common carry no loss: their difference in the margin is zero."""
    template = ChatTemplate(tokenizer)

    def make(chunk: list) -> Iterator[Made]:
        sides = ((messages, None, f"{source.where(place)} {name}") for place, pair in chunk for name, messages in zip(SHAPES["preference"], pair, strict=True))
        encoded = template.encode_batch(sides)
        for i, (place, _) in enumerate(chunk):
            where = source.where(place)
            chosen, rejected = (_cut(side, max_length, where) for side in encoded[2 * i : 2 * i + 2])
            shared = next((t for t, (a, b) in enumerate(zip(chosen[0], rejected[0], strict=False)) if a != b), min(len(chosen[0]), len(rejected[0])))
            yield place, [_unlearn(side, shared, max_length, where) for side in (chosen, rejected)]

    return make


def _cut(chat: Encoded, max_length: int, where: str) -> Encoded:
    ids, learn = chat[0][: max_length + 1], chat[1][: max_length + 1]
    if not any(learn[1:]):
        if any(chat[1]):
            what = f"the assistant's first word is token {chat[1].index(True)}: nothing to learn is left"
            raise ValueError(what, where, f"raise data.max_length={max_length}, or delete the row")
        raise ValueError("no assistant turn: nothing to learn", where, "add the assistant's answer, or delete the row")
    return ids, learn


def _unlearn(side: Encoded, shared: int, max_length: int, where: str) -> Encoded:
    ids, learn = side
    learn = [False] * shared + learn[shared:]
    if not any(learn):
        raise ValueError(f"chosen and rejected do not differ within {max_length} tokens of data.max_length", where, "raise data.max_length, or delete the row")
    return ids, learn


class _Store:
    """Grows the flat arrays chunk by chunk."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.learn: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.places: list[int] = []

    def add(self, made: Iterator[Made]) -> None:
        tokens: list[int] = []
        learn: list[bool] = []
        for place, sequences in made:
            self.places.append(place)
            for ids, lesson in sequences:
                tokens += ids
                learn += [False, *lesson[1:]]
                self.lengths.append(len(ids))
        self.tokens.append(np.array(tokens, np.int32))
        self.learn.append(np.array(learn, bool))

    def rows(self, sides: int, source: Source, fingerprint: str) -> Rows:
        return Rows(
            tokens=np.concatenate(self.tokens),
            learn=np.concatenate(self.learn),
            offsets=np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64),
            places=np.array(self.places, np.int64),
            index=np.arange(len(self.places)),
            sides=sides,
            source=source,
            fingerprint=fingerprint,
        )


def _fingerprint(path: Path, shape: str, tokenizer: Tokenizer, max_length: int) -> str:
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(f"{content} {shape} {tokenizer.fingerprint} {max_length}".encode()).hexdigest()
