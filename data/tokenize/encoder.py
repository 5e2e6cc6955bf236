"""Encodes rows of files: token ids, which of them have loss, what is truncated or dropped, and the counts of all this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from data.schemas.chat import augment_example
from data.schemas.columns import unused_fields
from data.schemas.messages import CHECKED_FIELDS
from data.schemas.registry import SCHEMAS, ChatExample, Example, PreferencePair, TextExample
from data.schemas.text import example_weight
from data.sources.files import Source
from data.tokenize.block import (
    SAMPLED_ROWS,
    EncodedBlock,
    LabelledIds,
    LabelledRow,
    LossSpan,
    RowStats,
    count_sample,
)
from data.tokenize.chat_template import ChatTemplate
from data.tokenize.pieces import limited_parts
from data.tokenize.segment_plan import TemplateSegment
from data.tokenize.tokenizer import Tokenizer
from data.types import BadRowError, EncodingConfig

MAX_BATCH_CHARACTERS = 1 << 23  # rendered text that is encoded at once; a template may write far more than a row has
ROWS_RENDERED_TOGETHER = 32
TOO_LONG_REASON = "longer than data.max_length"
NO_ANSWER_REASON = "all tokens with loss are beyond data.max_length"
NO_DIFFERENCE_REASON = "chosen and rejected differ only beyond data.max_length"
ReadRow = tuple[int, str, float, Example]  # (position, where it is, weight, example)
UsableRow = tuple[int, str, float, Any]  # with its text, or the segments of each of its conversations


class Encoder:
    """Turns rows of files into blocks of token ids. Each process that encodes makes one."""

    def __init__(self, encoding: EncodingConfig) -> None:
        self.encoding, self.schema = encoding, SCHEMAS[encoding.schema]
        self.tokenizer = Tokenizer.load(encoding.tokenizer)
        self._encode_texts = self.tokenizer.caching_encoder()
        self.template = None if encoding.data_format == "text" else ChatTemplate(self.tokenizer)

    def encode(self, source: Source, chunk: Iterable[tuple[int, object]]) -> EncodedBlock:
        """Encode (position, item) pairs.

        A bad row raises BadRowError if encoding.on_bad_row is error, and is counted if it is skip.
        """
        self._stats = RowStats()
        self._encoded: list[LabelledRow] = []
        self._sample: list[ChatExample | PreferencePair] = []  # as they are in the file
        rows = self._usable_rows(source, chunk)
        if self.template is None:
            self._add_texts(list(rows))
        else:
            for batch in limited_parts(rows, _count_characters, MAX_BATCH_CHARACTERS):
                self._add_chats(batch)
        self._stats.sampled, self._stats.common_answers = count_sample(self._sample)
        return EncodedBlock(self._encoded, self._stats)

    def _read_row(self, source: Source, position: int, raw: object) -> ReadRow | BadRowError:
        """Return the row, or why it is bad."""
        self._stats.read += 1
        try:
            row, where = source.parse(position, raw), source.where(position)
            example = self.schema.read(row, where, source.turns)
            self._stats.unused.update(self._unused_fields(row, example))
            weight = example_weight(row, where)
            if not isinstance(example, TextExample):
                if position < SAMPLED_ROWS:
                    self._sample.append(example)
                example = augment_example(example, self.encoding, position)
            return position, where, weight, example
        except BadRowError as error:
            return error

    def _unused_fields(self, row: dict, example: Example) -> list[str]:
        """Return the fields of a row that no token depends on, and those of its messages that the chat template does
        not name.
        """
        unused = unused_fields(row, self.schema.fields)
        if self.template is not None:
            messages = [message for chat in example.chats for message in chat.messages]
            names = {name for message in messages for name in unused_fields(message, CHECKED_FIELDS)}
            unused += [f"messages[].{name}" for name in names if not self.template.names(name)]
        return unused

    def _handle_bad_row(self, error: BadRowError) -> None:
        if self.encoding.on_bad_row == "error":
            fix = f"{error.fix}; or skip such rows: data.on_bad_row=skip"
            raise BadRowError(error.reason, error.message, error.setting, fix) from error
        self._stats.count_dropped("bad", error.reason, error.setting)

    def _usable_rows(self, source: Source, chunk: Iterable[tuple[int, object]]) -> Iterator[UsableRow]:
        """Yield the rows that are not bad."""
        rows = [self._read_row(source, position, raw) for position, raw in chunk]
        for start in range(0, len(rows), ROWS_RENDERED_TOGETHER):
            group = rows[start : start + ROWS_RENDERED_TOGETHER]
            if self.template is not None:
                read = [row for row in group if not isinstance(row, BadRowError)]
                chats = [(chat.messages, chat.tools, where) for _, where, _, example in read for chat in example.chats]
                self.template.render_ahead(chats, self.encoding.loss_on)
            for row in group:
                try:
                    if isinstance(row, BadRowError):
                        raise row
                    position, where, weight, example = row
                    content = example.text if isinstance(example, TextExample) else self._segments(example, where)
                except BadRowError as error:
                    self._handle_bad_row(error)
                else:
                    yield position, where, weight, content

    def _segments(self, example: ChatExample | PreferencePair, where: str) -> list[list[TemplateSegment]]:
        """Render a conversation; chosen and rejected for a preference."""
        assert self.template is not None, "the schema is one of texts"
        loss_on = self.encoding.loss_on
        return [self.template.segments(chat.messages, chat.tools, where, loss_on) for chat in example.chats]

    def _add_texts(self, rows: list[UsableRow]) -> None:
        size, stats = self.encoding.max_length, self._stats
        bos, eos = np.array(self.tokenizer.bos_ids, np.int32), np.array([self.tokenizer.eos_id], np.int32)
        encoded = self._encode_texts([text for *_, text in rows])
        for (position, where, weight, _), text_ids in zip(rows, encoded, strict=True):
            ids = np.concatenate([bos, np.frombuffer(text_ids, np.int32), eos])
            too_long, last = len(ids) > size + 1, len(ids) - 1
            if too_long and self.encoding.too_long == "drop":
                stats.count_dropped("dropped", TOO_LONG_REASON, where)
                stats.count_lost_answer(last, last)
                continue
            if too_long and self.encoding.too_long == "truncate":
                stats.truncated += 1
                stats.count_lost(size, last)
                last = size
            elif too_long:
                stats.split += 1
            stats.kept += 1
            # Parts overlap by one token, so that each token is predicted exactly once.
            for start in range(0, last, size):
                part = ids[start : min(start + size, last) + 1]
                self._add(position, weight, [(part, [(1, len(part), 1.0)])])

    def _add_chats(self, rows: list[UsableRow]) -> None:
        assert self.template is not None, "the schema is one of texts"
        segments = [chat for *_, chats in rows for chat in chats]
        encoded = iter(self.template.encode_segments(segments, self._encode_texts))
        for position, where, weight, chats in rows:
            self._add_chat(position, where, weight, [next(encoded) for _ in chats])

    def _add_chat(self, position: int, where: str, weight: float, chats: list[LabelledIds]) -> None:
        """Add a conversation, or chosen and rejected, whole or truncated; or count why it is left out."""
        stats, max_ids = self._stats, self.encoding.max_length + 1
        spans = [each for _, each in chats]
        if not all(spans):
            fix = "add an answer of the assistant, or delete the row"
            return self._handle_bad_row(
                BadRowError("no assistant turn", "no assistant turn: no token has loss", where, fix)
            )
        shared, answers = _common_prefix(chats), spans
        spans = [[span for span in each if span[1] > shared] for each in spans]
        if not all(spans):  # without loss on one side it would be compared with 0
            problem = "chosen or rejected has no token with loss after what both share"
            fix = "give each an answer of its own, or delete the row"
            return self._handle_bad_row(BadRowError("no difference", problem, where, fix))
        longest = max(len(ids) for ids, _ in chats)
        if longest > max_ids:
            whole = spans
            if self.encoding.too_long == "drop":
                stats.count_lost_answer(sum(map(_count_tokens, whole)), longest - 1)
                return stats.count_dropped("dropped", TOO_LONG_REASON, where)
            stops = [self._truncation_point(ids, each, max_ids) for (ids, _), each in zip(chats, spans, strict=True)]
            spans = [
                [(start, min(end, stop), loss_weight) for start, end, loss_weight in each if start < stop]
                for each, stop in zip(spans, stops, strict=True)
            ]
            if not all(spans) or min(stops) <= shared:
                self._count_lost(whole, [[] for _ in whole], longest)
                return stats.count_dropped(
                    "dropped", NO_ANSWER_REASON if len(chats) == 1 else NO_DIFFERENCE_REASON, where
                )
            self._count_lost(whole, spans, longest)
            chats = [(ids[:stop], each) for (ids, each), stop in zip(chats, stops, strict=True)]
            stats.truncated += 1
        stats.kept += 1
        for (ids, _), each in zip(chats, answers, strict=True):
            # else a span is no answer
            count = sum(start < len(ids) for start, *_ in each) if self.encoding.loss_on == "assistant" else 0
            stats.longest_conversation = max(stats.longest_conversation, len(ids))
            stats.most_answers = max(stats.most_answers, count)
        self._add(position, weight, [(ids, each) for (ids, _), each in zip(chats, spans, strict=True)])

    def _add(self, position: int, weight: float, sequences: list[LabelledIds]) -> None:
        self._stats.tokens += sum(len(ids) for ids, _ in sequences)
        self._stats.loss_tokens += sum(_count_tokens(spans) for _, spans in sequences)
        self._encoded.append((position, weight, [(ids.tobytes(), spans) for ids, spans in sequences]))

    def _count_lost(self, whole: list[list[LossSpan]], kept: list[list[LossSpan]], longest: int) -> None:
        """Count what `kept` has lost of `whole`.

        An answer is kept whole if its end fits; a preference if both of its sequences fit.
        """
        for spans, kept_spans in zip(whole, kept, strict=True):
            for i, (start, stop, _) in enumerate(spans):
                lost = stop - start - _count_tokens(kept_spans[i : i + 1])
                if lost:
                    self._stats.count_lost_answer(lost, (stop if len(whole) == 1 else longest) - 1)

    def _truncation_point(self, ids: np.ndarray, spans: list[LossSpan], max_ids: int) -> int:
        """Return where to cut a conversation to at most `max_ids` ids: after the last complete answer, else within an
        answer.
        """
        if len(ids) <= max_ids:
            return len(ids)
        ends = [stop for _, stop, _ in spans]
        if self.encoding.loss_on == "all":  # a single span: turns end at their end token
            ends = (np.flatnonzero(ids == self.tokenizer.eos_id) + 1).tolist()
        return max((end for end in ends if end <= max_ids), default=max_ids)


def _count_characters(row: UsableRow) -> int:
    return sum(len(segment.text) for chat in row[3] for segment in chat)


def _count_tokens(spans: list[LossSpan]) -> int:
    return sum(stop - start for start, stop, _ in spans)


def _common_prefix(chats: list[LabelledIds]) -> int:
    """Return the number of tokens at the start of both chosen and rejected: turns that end before it are the prompt and
    have no loss.
    """
    if len(chats) == 1:
        return 0
    (a, _), (b, _) = chats
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter
