"""A row of a file as token ids, and which of them carry loss: what is cut, what is left out, and the count of it all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from common.errors import UserError
from data.schemas.augment import augment_row
from data.schemas.errors import BadRowError
from data.schemas.schemas import SCHEMAS, PreferencePair, TextExample, detect_schema, example_weight
from data.sources.files import Source
from data.store.block import BlockBuilder, EncodedBlock, RowStats, SpanPair
from data.tokenize.chat_template import ChatTemplate, Encoded, TemplateSegment
from data.tokenize.tokenizer import Tokenizer
from data.types import EncodingConfig, SourceItem

T = TypeVar("T")

TOO_LONG_REASON = "longer than data.max_length"
DETECTION_ROWS = 100  # rows of a file, before it is said to be of no shape
NO_ANSWER_REASON = "what carries loss lies beyond data.max_length"
NO_DIFFERENCE_REASON = "chosen and rejected differ only beyond data.max_length"


class Encoder:
    """Rows of files into blocks of ids. Made once in each process that encodes."""

    def __init__(self, recipe: EncodingConfig) -> None:
        self.recipe, self.shape = recipe, SCHEMAS[recipe.shape]
        self.tokenizer = Tokenizer.load(recipe.tokenizer)
        self.template = None if recipe.rows == "text" else ChatTemplate(self.tokenizer)

    def encode(self, source: Source, chunk: Iterable[tuple[int, object]]) -> EncodedBlock:
        """Raises the BadRow of the first bad row where recipe.on_bad_row is error, and counts it where it is skip."""
        tally, made = RowStats(), BlockBuilder()
        if self.template is None:
            self._texts(source, list(self._good(source, chunk, tally, self._text)), tally, made)
        else:
            self._chats(source, list(self._good(source, chunk, tally, self._pieces)), tally, made)
        return made.block(tally)

    def _good(
        self, source: Source, chunk: Iterable[tuple[int, object]], tally: RowStats, ready: Callable[[SourceItem, int, str], T]
    ) -> Iterator[tuple[int, float, T]]:
        """(place, weight, what is ready to be tokenised) of each row that can be used."""
        for place, raw in chunk:
            tally.read += 1
            try:
                row, where = source.row(place, raw), source.where(place)
                yield place, example_weight(row, where), ready(self.shape.read(row, where), place, where)
            except BadRowError as error:
                self._bad(error, tally)

    def _bad(self, error: BadRowError, tally: RowStats) -> None:
        if self.recipe.on_bad_row == "error":
            what, where, fix = error.args
            raise BadRowError(error.reason, what, where, f"{fix}; or leave such rows out: data.on_bad_row=skip") from error
        tally.leave_out("bad", error.reason, error.args[1])

    def _text(self, item: SourceItem, place: int, where: str) -> str:
        assert isinstance(item, TextExample), "the shape is one of texts"
        return item.text

    def _pieces(self, item: SourceItem, place: int, where: str) -> list[list[TemplateSegment]]:
        """The rendered conversation, or those of both sides of a pair."""
        recipe, template = self.recipe, self.template
        assert template is not None and not isinstance(item, TextExample), "the shape is one of conversations"
        item = augment_row(item, recipe.system_prob, recipe.system_prompts, recipe.empty_think_prob, recipe.seed, place)
        chats = (item.chosen, item.rejected) if isinstance(item, PreferencePair) else (item,)
        return [template.pieces(chat.messages, chat.tools, where, recipe.train_on) for chat in chats]

    def _texts(self, source: Source, rows: list[tuple[int, float, str]], tally: RowStats, made: BlockBuilder) -> None:
        size = self.recipe.max_length
        for (place, weight, _), ids in zip(rows, self.tokenizer.encode_batch([text for _, _, text in rows]), strict=True):
            ids = [self.tokenizer.bos_id, *ids, self.tokenizer.eos_id]
            too_long, last = len(ids) > size + 1, len(ids) - 1
            if too_long and self.recipe.too_long == "drop":
                tally.leave_out("dropped", TOO_LONG_REASON, source.where(place))
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

    def _chats(self, source: Source, rows: list[tuple[int, float, list[list[TemplateSegment]]]], tally: RowStats, made: BlockBuilder) -> None:
        """Conversations, and pairs of them."""
        assert self.template is not None
        encoded = iter(self.template.assemble([side for _, _, sides in rows for side in sides]))
        for place, weight, sides in rows:
            self._keep(source, place, weight, [next(encoded) for _ in sides], tally, made)

    def _keep(self, source: Source, place: int, weight: float, sides: list[Encoded], tally: RowStats, made: BlockBuilder) -> None:
        """Take a conversation or a pair as it is, shortened, or not at all."""
        where, size = source.where(place), self.recipe.max_length
        learned = [supervised_spans(learn) for _, learn in sides]
        if not all(learned):
            return self._bad(
                BadRowError("no assistant turn", "no assistant turn: nothing to learn", where, "add the assistant's answer, or delete the row"), tally
            )
        shared = _shared(sides)
        spans = [_from(spans, shared) for spans in learned]
        if not any(spans):
            return self._bad(BadRowError("no difference", "chosen and rejected are the same tokens", where, "let them differ, or delete the row"), tally)
        total = sum(map(_count, spans))
        if max(len(ids) for ids, _ in sides) > size + 1:
            if self.recipe.too_long == "drop":
                tally.lost += total
                return tally.leave_out("dropped", TOO_LONG_REASON, where)
            stops = [self._stop(ids, side) for (ids, _), side in zip(sides, spans, strict=True)]
            spans = [_until(side, stop) for side, stop in zip(spans, stops, strict=True)]
            tally.lost += total - sum(map(_count, spans))
            if not any(spans) or min(stops) <= shared:
                tally.lost += sum(map(_count, spans))
                return tally.leave_out("dropped", NO_ANSWER_REASON if len(sides) == 1 else NO_DIFFERENCE_REASON, where)
            sides = [(ids[:stop], learn) for (ids, learn), stop in zip(sides, stops, strict=True)]
            tally.cut += 1
        tally.kept += 1
        made.add(place, weight, [(ids, side) for (ids, _), side in zip(sides, spans, strict=True)])

    def _stop(self, ids: list[int], spans: list[SpanPair]) -> int:
        """Where a conversation that may be too long ends: with the last answer that fits whole, else in the middle of one."""
        most = self.recipe.max_length + 1
        if len(ids) <= most:
            return len(ids)
        ends = [stop for _, stop in spans]
        if self.recipe.train_on == "all":  # one stretch: its turns end where the control token says so
            ends = [t + 1 for t, token in enumerate(ids) if token == self.tokenizer.eos_id]
        return max((end for end in ends if end <= most), default=most)


def supervised_spans(learn: list[bool]) -> list[SpanPair]:
    """The stretches [start, stop) of True; the first token is none, nothing predicts it."""
    edges = np.flatnonzero(np.diff(np.array([False, False, *learn[1:], False], np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _count(spans: list[SpanPair]) -> int:
    return sum(stop - start for start, stop in spans)


def _from(spans: list[SpanPair], first: int) -> list[SpanPair]:
    return [(max(start, first), stop) for start, stop in spans if stop > first]


def _until(spans: list[SpanPair], last: int) -> list[SpanPair]:
    return [(start, min(stop, last)) for start, stop in spans if start < last]


def _shared(sides: list[Encoded]) -> int:
    """Tokens that chosen and rejected begin with in common: they carry no loss, their difference in the margin is zero."""
    if len(sides) == 1:
        return 0
    (a, _), (b, _) = sides
    return next((t for t, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def schema_of_source(source: Source, rows: str) -> str:
    """The name of the shape that a file's rows have: that of the first row which has one that can be read as `rows`."""
    error = UserError("the file holds no row that can be read", source.name, "look at it with: head -c 300 FILE")
    for place, raw in itertools.islice(source.items(), DETECTION_ROWS):
        try:
            return detect_schema(source.row(place, raw), rows, source.where(place)).name
        except BadRowError as bad:
            error = error if isinstance(error, BadRowError) else bad
    raise error
