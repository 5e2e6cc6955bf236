"""Print training data as the model will see it: rows per file, their lengths, how full batches are, and single rows
with their tokens. Tokens with loss are marked, and control characters of the text cannot affect the terminal.
"""

from __future__ import annotations

import itertools
import os
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional, TextIO

import numpy as np

from common.errors import UserError, strip_control
from common.settings import CheckedSettings, at_least, settings_class
from runner.engine.config import Config
from runner.engine.data_pipeline import build_data_pipeline, build_loader, encoding_config
from runner.tracking.data_report import data_table
from runner.tracking.lines import LineConsole

if TYPE_CHECKING:
    from data.batching.mixture import MixedRows, WeightedSource
    from data.batching.packing import Sequences
    from data.tokenize.tokenizer import Tokenizer
    from data.types import EncodedRow
    from runner.engine.data_pipeline import DataPipeline

PACKED_ROWS, MEASURED_ROWS = 1 << 16, 512  # rows that the fill ratios of packed and of padded batches are measured on
HISTOGRAM_BINS, MAX_BAR_WIDTH = 10, 40
SEQUENCE_LABELS = {1: ("",), 2: ("chosen", "rejected")}
ROLE_COLORS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
MAX_CHARACTER_BYTES = 4  # of UTF-8, so also the most tokens of a character
INDENT = "    "
TurnEnds = list[list[tuple[int, str]]]  # ChatTemplate.turn_ends of each sequence of a row


@settings_class
class RowsConfig(CheckedSettings):
    # sequences to print, in training order: rows, or packed sequences
    n: int = at_least(0, 3)
    row: Optional[str]  # print this row instead: its number, or its file and line (rows.jsonl:12)
    ids: bool  # print token ids, too
    packed: Optional[bool]  # true: as with data.packing=best_fit; false: none; null: as data.packing
    plain: bool  # no colours, tokens with loss in [brackets]; always without a terminal


def inspect_rows(cfg: RowsConfig, run: Config) -> None:
    """Raises UserError as training would."""
    from data.tokenize.origin import open_tokenizer

    if cfg.packed is not None:
        data = replace(
            run.data,
            packing="best_fit" if cfg.packed else "none",
            group_by_length=run.data.group_by_length and not cfg.packed,
        )
        run = replace(run, data=data)
    tokenizer = open_tokenizer(run.data, run.init_from)
    pipeline = build_data_pipeline(run, tokenizer)
    chosen = _find_row(cfg.row, pipeline) if cfg.row is not None else []
    view = TokenView(cfg.plain)
    for line in [
        data_table(pipeline.files),
        *pipeline.notes,
        *(f"warning: {warning}" for warning in pipeline.warnings),
        f"rows per epoch: {len(pipeline.train.rows):,}, {pipeline.held_out:,} more held out",
        "",
        *length_histogram(pipeline.train.rows),
        "",
        *_fill_ratios(pipeline.train, run, tokenizer),
        "",
    ]:
        view.print(line)
    sequences = (
        {"": chosen}
        if chosen
        else {f"sequence {i}": pipeline.train[i] for i in _first_sequences(pipeline, run, tokenizer, cfg.n)}
    )
    turn_ends = _turn_ends({row.name for rows in sequences.values() for row in rows}, pipeline, run, tokenizer)
    if sequences:
        view.print_legend()
    for title, rows in sequences.items():
        if run.data.packing == "best_fit" and title:
            _print_layout(title, rows, run.data.max_length, view)
        for row in rows:
            _print_row(row, turn_ends.get(row.name, []), tokenizer, cfg.ids, view)


def length_histogram(rows: MixedRows) -> list[str]:
    """Return a text histogram of the number of input tokens per row."""
    lengths = rows.lengths(0, len(rows))
    longest = int(lengths.max())
    width = -(-longest // HISTOGRAM_BINS)
    starts = range(1, longest + 1, width)
    bars = np.histogram(lengths, [*starts, starts[-1] + width])[0].tolist()
    lines = []
    for start, count in zip(starts, bars, strict=True):
        span = f"{start}-{min(start + width - 1, longest)}"
        lines.append(f"{span:>11} {count:>10,} {'#' * -(-count * MAX_BAR_WIDTH // max(bars))}".rstrip())
    return ["     tokens       rows", *lines]


def _fill_ratios(sequences: Sequences, run: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Return the fraction of computed positions that hold a token, packed and padded."""
    from data.batching.packing import PackedSequences, UnpackedSequences, best_fit_plan
    from data.types import sequences_per_row

    rows, capacity = sequences.rows, run.data.max_length * sequences_per_row(run.stage.data_format)
    if isinstance(sequences, PackedSequences):
        per_sequence = len(rows) / len(sequences)
        yield f"packed: {len(sequences):,} sequences of {capacity:,} positions, {per_sequence:.1f} rows each, {sequences.fill_ratio:.1%} filled with tokens"
    else:
        lengths = rows.lengths(0, min(PACKED_ROWS, len(rows)))
        fill_ratio = lengths.sum() / (len(best_fit_plan(lengths, capacity)) * capacity)
        yield f"packed (data.packing=best_fit) it would be: {fill_ratio:.1%} filled with tokens"
    data = replace(run.data, packing="none", num_workers=0)
    loader = build_loader(UnpackedSequences(rows), replace(run, data=data), tokenizer, run.train.batch_size)
    tokens = positions = measured = 0
    for batch in itertools.chain.from_iterable(loader.iter_epoch(epoch=0)):
        tokens += int(batch.lengths.sum())
        positions += batch.input_ids.numel()
        measured += len(batch.names)
        if measured >= MEASURED_ROWS:
            break
    name = "padded, grouped by length" if data.group_by_length else "padded"
    yield f"{name}: batches of {run.train.batch_size} rows, {tokens / positions:.1%} filled with tokens (measured on {measured:,} rows)"


def _first_sequences(pipeline: DataPipeline, run: Config, tokenizer: Tokenizer, count: int) -> list[int]:
    """Return the numbers of the first `count` sequences of the training."""
    sampler = build_loader(pipeline.train, run, tokenizer, run.train.batch_size * run.train.accumulation_steps).sampler
    numbers = itertools.chain.from_iterable(
        sampler.indices(0, step).tolist() for step in range(sampler.steps_per_epoch)
    )
    return list(itertools.islice(numbers, count))


def _find_row(wanted: str, pipeline: DataPipeline) -> list[EncodedRow]:
    """Return the row of a number, or all encoded rows of FILE:LINE or FILE[INDEX]."""
    rows = pipeline.train.rows
    if wanted.isdecimal():
        if int(wanted) >= len(rows):
            raise UserError(
                f"row must be at most {len(rows) - 1}, got {wanted}",
                f"row={wanted}",
                f"row={len(rows) - 1}, or the file and line: row=FILE:LINE",
            )
        return [rows[int(wanted)]]
    name, _, position = wanted.rstrip("]").rpartition("[" if wanted.endswith("]") else ":")
    for part in _weighted_sources(pipeline):
        if name and position.isdecimal() and f"/{part.source.name}".endswith(f"/{name.removeprefix('./')}"):
            if rows_at := _rows_at(part, int(position)):
                return rows_at
    raise UserError(
        f"no row of the data is named {wanted}",
        f"row={wanted}",
        "row=0, or the file and line of a row that was not dropped: row=FILE:LINE",
    )


def _weighted_sources(pipeline: DataPipeline) -> list[WeightedSource]:
    return [part for sequences in (pipeline.train, *pipeline.val.values()) for part in sequences.rows.sources]


def _rows_at(part: WeightedSource, position: int) -> list[EncodedRow]:
    """Return the encoded rows made from one position of a file.

    Rows of a store are in the order of the file.
    """
    from data.batching.mixture import MixedRows

    rows = MixedRows((part,))

    def position_of(i: int) -> int:
        return part.store.read(int(part.locate(np.array([i]))[0]))[1]

    first = bisect_left(range(len(rows)), position, key=position_of)
    return [rows[i] for i in itertools.takewhile(lambda i: position_of(i) == position, range(first, len(rows)))]


def _turn_ends(names: set[str], pipeline: DataPipeline, run: Config, tokenizer: Tokenizer) -> dict[str, TurnEnds]:
    """Return where the turns of the rows with these names end.

    Token stores do not have it, so the files are read again.
    """
    from data.schemas.chat import augment_example
    from data.schemas.registry import SCHEMAS, TextExample
    from data.tokenize.chat_template import ChatTemplate

    if run.stage.data_format == "text":
        return {}
    template, encoding = ChatTemplate(tokenizer), encoding_config(run, tokenizer)
    ends: dict[str, TurnEnds] = {}
    for part in _weighted_sources(pipeline):
        schema = SCHEMAS[part.store.metadata["encoding"]["schema"]]
        for position, raw in part.source.items():
            if len(ends) == len(names):
                return ends
            if (where := part.source.where(position)) in names and where not in ends:
                example = schema.read(part.source.parse(position, raw), where, part.source.turns)
                assert not isinstance(example, TextExample)
                chats = augment_example(example, encoding, position).chats
                ends[where] = [template.turn_ends(chat.messages, chat.tools, where) for chat in chats]
    return ends


def _print_layout(title: str, rows: list[EncodedRow], max_length: int, view: TokenView) -> None:
    """Print which positions of a packed sequence hold which row."""
    capacity, start, lines = max_length * len(rows[0].sequences), 0, []
    for row in rows:
        for label, (ids, _) in zip(SEQUENCE_LABELS[len(row.sequences)], row.sequences, strict=True):
            lines.append(f"  positions {start}-{start + len(ids) - 2}: {row.name} {label}".rstrip())
            start += len(ids) - 1
    if start < capacity:
        lines.append(f"  positions {start}-{capacity - 1}: padding")
    view.print(
        f"\n{title}: {start:,} of {capacity:,} positions, {len(rows)} row{'s' * (len(rows) > 1)}; attention stays within a row"
    )
    for line in lines:
        view.print(line)


def _print_row(row: EncodedRow, turn_ends: TurnEnds, tokenizer: Tokenizer, ids: bool, view: TokenView) -> None:
    for i, (label, sequence) in enumerate(zip(SEQUENCE_LABELS[len(row.sequences)], row.sequences, strict=True)):
        view.print(
            f"\n{row.name} {label}".rstrip()
            + f": {len(sequence.ids):,} tokens, {np.count_nonzero(sequence.loss_mask):,} with loss"
        )
        spans = list(
            token_spans(
                tokenizer, sequence.ids.tolist(), sequence.loss_mask.tolist(), turn_ends[i] if turn_ends else []
            )
        )
        view.print_spans(spans)
        if ids:
            view.print_ids(spans)


@dataclass(frozen=True)
class TokenSpan:
    """The fewest tokens that decode to complete characters."""

    text: str
    ids: list[int]
    loss_weight: float  # 0: no loss
    role: str  # "" for plain text

    @property
    def has_loss(self) -> bool:
        return self.loss_weight > 0


def token_spans(
    tokenizer: Tokenizer, ids: list[int], loss_mask: Sequence[float], turn_ends: list[tuple[int, str]]
) -> Iterator[TokenSpan]:
    """Split a sequence into spans. loss_mask: (T,) as of a TokenSequence; turn_ends: see ChatTemplate.turn_ends."""
    turns, characters, last_start, start = list(turn_ends), 0, 0, 0
    for stop in range(1, len(ids) + 1):
        # with the span before, whose characters are complete: the space that a first token has is not decoded
        text, before = (tokenizer.decode(ids[last_start:end], skip_special=False) for end in (stop, start))
        text = text.removeprefix(before)
        is_incomplete = text.endswith("\ufffd") and tokenizer.decode(ids[stop : stop + 1]).startswith("\ufffd")
        if is_incomplete and stop - start < MAX_CHARACTER_BYTES and loss_mask[stop] == loss_mask[start]:
            continue
        while turns and characters >= turns[0][0]:
            turns.pop(0)
        yield TokenSpan(text, ids[start:stop], float(loss_mask[start]), turns[0][1] if turns else "")
        characters, last_start, start = characters + len(text), start, stop


def escape_whitespace(text: str) -> str:
    r"""Print tabs as \t and newlines as \n and a line break; escape other control characters."""
    return strip_control(text.replace("\t", "\\t").replace("\n", "\\n\n"))


class TokenView:
    r"""Prints tokens: on a terminal with one colour per role, tokens with loss bold, others dim.

    If `plain`, or without a terminal: tokens with loss are in [brackets], brackets of the text are \[escaped\].
    """

    def __init__(self, plain: bool, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self._out = LineConsole(stream)
        self._terminal = None
        if not plain and stream.isatty() and not os.environ.get("NO_COLOR"):
            from rich.console import Console

            self._terminal = Console(file=stream, highlight=False, soft_wrap=True)

    def print(self, text: str = "") -> None:
        self._out.print(strip_control(text))

    def print_legend(self) -> None:
        if self._terminal is None:
            self.print(
                "[tokens with loss] and tokens without; [tokens]x0.5 have that weight in the loss; \\n is a line break"
            )
        else:
            roles = ", ".join(f"[{color}]{role}[/]" for role, color in ROLE_COLORS.items())
            self._terminal.print(
                f"[bold]tokens with loss[/], [dim]tokens without[/]; x0.5 behind tokens: their weight in the loss; {roles}; \\n is a line break"
            )

    def print_spans(self, spans: Iterable[TokenSpan]) -> None:
        self._print_marked((span, escape_whitespace(span.text)) for span in spans)

    def print_ids(self, spans: Iterable[TokenSpan]) -> None:
        self._print_marked(((span, str(token)) for span in spans for token in span.ids), "ids: ", " ")

    def _print_marked(self, parts: Iterable[tuple[TokenSpan, str]], head: str = "", separator: str = "") -> None:
        from rich.text import Text

        text, line_break = Text(INDENT + head), "\n" + INDENT
        for number, ((weight, style), group) in enumerate(itertools.groupby(parts, lambda part: self._mark(part[0]))):
            marked = separator.join(part for _, part in group)
            if self._terminal is None:
                marked = marked.replace("[", "\\[").replace("]", "\\]")
                marked = f"[{marked}]" if weight else marked
            factor = "" if weight in (0, 1) else f"x{weight:g}"
            text.append(separator if number else "").append((marked + factor).replace("\n", line_break), style)
        if text.plain.endswith(line_break):
            text.right_crop(len(line_break))
        if self._terminal is None:
            self._out.print(text.plain)
        else:
            self._terminal.print(text)

    def _mark(self, span: TokenSpan) -> tuple[float, str]:
        """Return what tokens that are printed together share: their weight in the loss, and their style."""
        if self._terminal is None:
            return span.loss_weight, ""
        return span.loss_weight, f"{'bold' if span.has_loss else 'dim'} {ROLE_COLORS.get(span.role, '')}".strip()
