"""A row of a file as token ids, and which of them carry loss: what is cut, what is left out, and the count of it all."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from data.augment import augment
from data.block import Block, Growing, Span, Tally
from data.chat import ChatTemplate, Encoded, Piece
from data.formats import BadRow, Source
from data.shapes import SHAPES, Chat, Pair, Text, recognise, weight_of
from data.tokenizer import Tokenizer

T = TypeVar("T")
Item = Text | Chat | Pair

TOO_LONG = "longer than data.max_length"
LOOKED_AT = 100  # rows of a file, before it is said to be of no shape
NO_ANSWER_LEFT = "what carries loss lies beyond data.max_length"
NO_DIFFERENCE_LEFT = "chosen and rejected differ only beyond data.max_length"


def sides_of(rows: str) -> int:
    """Sequences of a row: (chosen, rejected) for a preference."""
    return 2 if rows == "preference" else 1


@dataclass(frozen=True)
class Recipe:
    """Everything beside a file's bytes that decides which ids its rows become."""

    rows: str  # text | chat | preference
    shape: str  # a name of data.shapes.SHAPES
    tokenizer: Path
    max_length: int
    too_long: str  # truncate | drop | split
    train_on: str
    on_bad_row: str
    system_prompts: tuple[str, ...] = ()
    system_prob: float = 0.0
    empty_think_prob: float = 0.0
    seed: int = 0  # of these two; without them it changes nothing, and stays 0

    @property
    def sides(self) -> int:
        return sides_of(self.rows)

    def key(self, tokenizer_fingerprint: str) -> str:
        parts = dataclasses.asdict(self) | {"tokenizer": tokenizer_fingerprint}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Sequence(NamedTuple):
    ids: np.ndarray  # int32 (n,), n <= max_length + 1: the model reads all but the last and predicts all but the first
    learn: np.ndarray  # bool (n,): learn[t] where predicting token t is a lesson; learn[0] is False, nothing predicts it


class Row(NamedTuple):
    sequences: tuple[Sequence, ...]  # one; (chosen, rejected) for a preference pair
    name: str  # file:line


class RowSource(Protocol):
    """Rows by their number: what is packed, and what batches are made of."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Row: ...
    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Positions that each of the rows [start, stop) feeds to the model."""

    @property
    def fingerprint(self) -> str: ...


class Encoder:
    """Rows of files into blocks of ids. Made once in each process that encodes."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.shape = recipe, SHAPES[recipe.shape]
        self.tokenizer = Tokenizer.load(recipe.tokenizer)
        self.template = None if recipe.rows == "text" else ChatTemplate(self.tokenizer)

    def encode(self, source: Source, chunk: Iterable[tuple[int, object]]) -> Block:
        """Raises the BadRow of the first bad row where recipe.on_bad_row is error, and counts it where it is skip."""
        tally, made = Tally(), Growing()
        if self.template is None:
            self._texts(source, list(self._good(source, chunk, tally, self._text)), tally, made)
        else:
            self._chats(source, list(self._good(source, chunk, tally, self._pieces)), tally, made)
        return made.block(tally)

    def _good(self, source: Source, chunk: Iterable[tuple[int, object]], tally: Tally, ready: Callable[[Item, int, str], T]) -> Iterator[tuple[int, float, T]]:
        """(place, weight, what is ready to be tokenised) of each row that can be used."""
        for place, raw in chunk:
            tally.read += 1
            try:
                row, where = source.row(place, raw), source.where(place)
                yield place, weight_of(row, where), ready(self.shape.read(row, where), place, where)
            except BadRow as error:
                self._bad(error, tally)

    def _bad(self, error: BadRow, tally: Tally) -> None:
        if self.recipe.on_bad_row == "error":
            what, where, fix = error.args
            raise BadRow(error.reason, what, where, f"{fix}; or leave such rows out: data.on_bad_row=skip") from error
        tally.leave_out("bad", error.reason, error.args[1])

    def _text(self, item: Item, place: int, where: str) -> str:
        assert isinstance(item, Text), "the shape is one of texts"
        return item.text

    def _pieces(self, item: Item, place: int, where: str) -> list[list[Piece]]:
        """The rendered conversation, or those of both sides of a pair."""
        recipe, template = self.recipe, self.template
        assert template is not None and not isinstance(item, Text), "the shape is one of conversations"
        item = augment(item, recipe.system_prob, recipe.system_prompts, recipe.empty_think_prob, recipe.seed, place)
        chats = (item.chosen, item.rejected) if isinstance(item, Pair) else (item,)
        return [template.pieces(chat.messages, chat.tools, where, recipe.train_on) for chat in chats]

    def _texts(self, source: Source, rows: list[tuple[int, float, str]], tally: Tally, made: Growing) -> None:
        size = self.recipe.max_length
        for (place, weight, _), ids in zip(rows, self.tokenizer.encode_batch([text for _, _, text in rows]), strict=True):
            ids = [self.tokenizer.bos_id, *ids, self.tokenizer.eos_id]
            too_long, last = len(ids) > size + 1, len(ids) - 1
            if too_long and self.recipe.too_long == "drop":
                tally.leave_out("dropped", TOO_LONG, source.where(place))
                tally.lost += last
                continue
            if too_long and self.recipe.too_long == "truncate":
                tally.cut += 1
                tally.lost += last - size
                last = size
            elif too_long:
                tally.split += 1
            tally.kept += 1
            # Parts overlap by one token, so that each token is predicted exactly once.
            for start in range(0, last, size):
                part = ids[start : min(start + size, last) + 1]
                made.add(place, weight, [(part, [(1, len(part))])])

    def _chats(self, source: Source, rows: list[tuple[int, float, list[list[Piece]]]], tally: Tally, made: Growing) -> None:
        """Conversations, and pairs of them."""
        assert self.template is not None
        encoded = iter(self.template.assemble([side for _, _, sides in rows for side in sides]))
        for place, weight, sides in rows:
            self._keep(source, place, weight, [next(encoded) for _ in sides], tally, made)

    def _keep(self, source: Source, place: int, weight: float, sides: list[Encoded], tally: Tally, made: Growing) -> None:
        """Take a conversation or a pair as it is, shortened, or not at all."""
        where, size = source.where(place), self.recipe.max_length
        learned = [_lessons(learn) for _, learn in sides]
        if not all(learned):
            return self._bad(BadRow("no assistant turn", "no assistant turn: nothing to learn", where, "add the assistant's answer, or delete the row"), tally)
        shared = _shared(sides)
        spans = [_from(spans, shared) for spans in learned]
        if not any(spans):
            return self._bad(BadRow("no difference", "chosen and rejected are the same tokens", where, "let them differ, or delete the row"), tally)
        total = sum(map(_count, spans))
        if max(len(ids) for ids, _ in sides) > size + 1:
            if self.recipe.too_long == "drop":
                tally.lost += total
                return tally.leave_out("dropped", TOO_LONG, where)
            stops = [self._stop(ids, side) for (ids, _), side in zip(sides, spans, strict=True)]
            spans = [_until(side, stop) for side, stop in zip(spans, stops, strict=True)]
            tally.lost += total - sum(map(_count, spans))
            if not any(spans) or min(stops) <= shared:
                tally.lost += sum(map(_count, spans))
                return tally.leave_out("dropped", NO_ANSWER_LEFT if len(sides) == 1 else NO_DIFFERENCE_LEFT, where)
            sides = [(ids[:stop], learn) for (ids, learn), stop in zip(sides, stops, strict=True)]
            tally.cut += 1
        tally.kept += 1
        made.add(place, weight, [(ids, side) for (ids, _), side in zip(sides, spans, strict=True)])

    def _stop(self, ids: list[int], spans: list[Span]) -> int:
        """Where a conversation that may be too long ends: with the last answer that fits whole, else in the middle of one."""
        most = self.recipe.max_length + 1
        if len(ids) <= most:
            return len(ids)
        ends = [stop for _, stop in spans]
        if self.recipe.train_on == "all":  # one stretch: its turns end where the control token says so
            ends = [t + 1 for t, token in enumerate(ids) if token == self.tokenizer.eos_id]
        return max((end for end in ends if end <= most), default=most)


def _lessons(learn: list[bool]) -> list[Span]:
    """The stretches [start, stop) of True; the first token is none, nothing predicts it."""
    edges = np.flatnonzero(np.diff(np.array([False, False, *learn[1:], False], np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _count(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _from(spans: list[Span], first: int) -> list[Span]:
    return [(max(start, first), stop) for start, stop in spans if stop > first]


def _until(spans: list[Span], last: int) -> list[Span]:
    return [(start, min(stop, last)) for start, stop in spans if start < last]


def _shared(sides: list[Encoded]) -> int:
    """Tokens that chosen and rejected begin with in common: they carry no loss, their difference in the margin is zero."""
    if len(sides) == 1:
        return 0
    (a, _), (b, _) = sides
    return next((t for t, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def shape_of(source: Source, rows: str) -> str:
    """The name of the shape that a file's rows have: that of the first row which has one that can be read as `rows`."""
    error = ValueError("the file holds no row that can be read", source.name, "look at it with: head -c 300 FILE")
    for place, raw in itertools.islice(source.items(), LOOKED_AT):
        try:
            return recognise(source.row(place, raw), rows, source.where(place)).name
        except BadRow as bad:
            error = error if isinstance(error, BadRow) else bad
    raise error
