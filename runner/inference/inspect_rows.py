"""Rows as a run will see them: what became of each file, how long rows are, how full batches, and the rows themselves."""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import numpy as np

from common.errors import UserError
from runner.engine.config import Config
from runner.engine.data_pipeline import build_data_pipeline, build_loader, encoding_config
from runner.engine.data_report import data_table
from runner.inference.token_view import PlainTokenView, open_token_view, token_spans

if TYPE_CHECKING:
    from data.batching.batch import Windows
    from data.batching.mixture import WeightedSource
    from data.tokenize.tokenizer import Tokenizer
    from data.types import EncodedRow, RowSource
    from runner.engine.data_pipeline import DataPipeline

PREVIEW_ROWS = 1 << 16  # rows whose lengths are looked at together
SAMPLE_ROWS = 512  # rows that a fill ratio is measured on
HISTOGRAM_BINS, MAX_BAR_WIDTH = 10, 40
SIDE_LABELS = {"preference": ("chosen", "rejected")}
TurnSpans = list[list[tuple[int, str]]]  # of each side


@dataclass
class ShowConfig:
    n: int  # windows, or rows, to show
    row: Optional[str]  # a row's number, or file:line
    ids: bool
    packed: Optional[bool]  # null: as data.packing says
    plain: bool

    def __post_init__(self) -> None:
        if self.n < 0:
            raise UserError("a count cannot be negative", f"n={self.n}", "choose 0 (no row, only the counts) or more")


def inspect_rows(cfg: ShowConfig, run: Config) -> None:
    """Print to stdout. Raises ValueError(what, where, fix) as training would."""
    from data.tokenize.tokenizer import Tokenizer

    if cfg.packed is not None:
        data = dataclasses.replace(run.data, packing="pack" if cfg.packed else "none", group_by_length=run.data.group_by_length and not cfg.packed)
        run = dataclasses.replace(run, data=data)
    tokenizer = Tokenizer.load(Path(run.data.tokenizer))
    feed = build_data_pipeline(run, tokenizer)
    chosen = _find_row(cfg.row, feed) if cfg.row is not None else []
    paper = open_token_view(cfg.plain)
    paper.say(data_table(feed.files))
    paper.say(f"an epoch shows {len(feed.train.rows):,} rows; {feed.held_out:,} are held out")
    for line in ["", *histogram(feed.train.rows), "", *_print_packing(feed.train, run, tokenizer), ""]:
        paper.say(line)
    windows = {"": chosen} if chosen else {f"window {w}": feed.train[w] for w in _first_windows(feed, run, tokenizer, cfg.n)}
    turns = _turns({row.name for window in windows.values() for row in window}, feed, run, tokenizer)
    if windows:
        paper.legend()
    for title, window in windows.items():
        if run.data.packing == "pack" and title:
            _layout(title, window, run, paper)
        for row in window:
            _print_example(row, turns.get(row.name, []), tokenizer, cfg.ids, paper)


def histogram(rows: RowSource) -> list[str]:
    """How many rows have how many positions (tokens that the model reads)."""
    longest, counts = 1, np.zeros(1, np.int64)
    for start in range(0, len(rows), PREVIEW_ROWS):
        lengths = rows.lengths(start, min(start + PREVIEW_ROWS, len(rows)))
        longest = max(longest, int(lengths.max()))
        counts = _print_totals(counts, np.bincount(lengths))
    width = -(-longest // HISTOGRAM_BINS)
    bars = np.add.reduceat(counts[1:], np.arange(0, len(counts) - 1, width))
    lines = []
    for i, count in enumerate(bars.tolist()):
        span = f"{i * width + 1}-{min((i + 1) * width, longest)}"
        lines.append(f"{span:>11} {count:>10,} {'#' * -(-count * MAX_BAR_WIDTH // int(bars.max()))}".rstrip())
    return ["  positions       rows", *lines]


def _print_totals(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    size = max(len(a), len(b))
    return np.pad(a, (0, size - len(a))) + np.pad(b, (0, size - len(b)))


def _print_packing(windows: Windows, run: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """The share of the computed positions that hold a token."""
    from data.batching.batch import UnpackedWindows
    from data.batching.packing import PackedWindows, best_fit_plan
    from data.types import sequences_per_row

    rows, capacity = windows.rows, run.data.max_length * sequences_per_row(run.stage.rows)
    if isinstance(windows, PackedWindows):
        packed = windows.fill
        yield f"packed: {len(windows):,} windows of {capacity:,} positions, {len(rows) / len(windows):.1f} rows each, {packed:.1%} of the positions hold a token"
    else:
        lengths = rows.lengths(0, min(PREVIEW_ROWS, len(rows)))
        packed = lengths.sum() / (len(best_fit_plan(lengths, capacity)) * capacity)
        yield f"packed (data.packing=pack): {packed:.1%} of the positions would hold a token"
    data = dataclasses.replace(run.data, packing="none", num_workers=0)
    loader = build_loader(UnpackedWindows(rows), dataclasses.replace(run, data=data), tokenizer, run.train.batch_size)
    tokens = positions = seen = 0
    for batch in itertools.chain.from_iterable(loader.steps(epoch=0)):
        tokens, positions, seen = tokens + int(batch.lengths.sum()), positions + batch.input_ids.numel(), seen + len(batch.names)
        if seen >= SAMPLE_ROWS:
            break
    how = "padded, rows of like length together" if data.group_by_length else "padded"
    yield f"{how}: batches of {run.train.batch_size} rows, {tokens / positions:.1%} of the positions hold a token (measured on {seen:,} rows)"


def _first_windows(feed: DataPipeline, run: Config, tokenizer: Tokenizer, count: int) -> list[int]:
    """The windows that the first steps of training see."""
    order = build_loader(feed.train, run, tokenizer, run.train.batch_size * run.train.accumulation_steps).order
    numbers = itertools.chain.from_iterable(order.step(0, step).tolist() for step in range(order.steps))
    return list(itertools.islice(numbers, count))


def _find_row(wanted: str, feed: DataPipeline) -> list[EncodedRow]:
    """The row of a number, or all that was made of file:line."""
    rows = feed.train.rows
    if wanted.isdecimal():
        if int(wanted) >= len(rows):
            raise UserError(
                f"there are {len(rows):,} rows to train on", f"row={wanted}", f"choose 0 to {len(rows) - 1}, or name one by its file: row=FILE:LINE"
            )
        return [rows[int(wanted)]]
    name, _, place = wanted.rstrip("]").rpartition("[" if wanted.endswith("]") else ":")
    for part in _parts(feed):
        if name and place.isdecimal() and f"/{part.source.name}".endswith(f"/{name.removeprefix('./')}"):
            if found := _describe_sequence(part, int(place)):
                return found
    raise UserError(
        "no row was made of that", f"row={wanted}", "give a number, or the file and line of a row that was kept, as messages name it: row=rows.jsonl:12"
    )


def _parts(feed: DataPipeline) -> list[WeightedSource]:
    from data.batching.mixture import MixedRows

    rows = [windows.rows for windows in (feed.train, feed.val) if windows is not None]
    return [part for each in rows if isinstance(each, MixedRows) for part in each.parts]


def _describe_sequence(part: WeightedSource, place: int) -> list[EncodedRow]:
    """A store's rows stand in the order of their file."""
    from data.batching.mixture import MixedRows

    rows = MixedRows((part,))

    def place_of(i: int) -> int:
        return part.store.read(int(part.locate(np.array([i]))[0]))[1]

    first = bisect_left(range(len(rows)), place, key=place_of)
    return [rows[i] for i in itertools.takewhile(lambda i: place_of(i) == place, range(first, len(rows)))]


def _turns(names: set[str], feed: DataPipeline, run: Config, tokenizer: Tokenizer) -> dict[str, TurnSpans]:
    """Who speaks where, of the conversations of these names: a store does not know, so they are read again."""
    from data.schemas.augment import augment_row
    from data.schemas.schemas import SCHEMAS, PreferencePair, TextExample
    from data.tokenize.chat_template import ChatTemplate

    if run.stage.rows == "text":
        return {}
    template, recipe = ChatTemplate(tokenizer), encoding_config(run, tokenizer)
    found: dict[str, TurnSpans] = {}
    for part in _parts(feed):
        shape = SCHEMAS[part.store.facts["recipe"]["shape"]]
        for place, raw in part.source.items():
            if len(found) == len(names):
                return found
            if (where := part.source.where(place)) in names and where not in found:
                item = shape.read(part.source.row(place, raw), where)
                assert not isinstance(item, TextExample)
                item = augment_row(item, recipe.system_prob, recipe.system_prompts, recipe.empty_think_prob, recipe.seed, place)
                chats = (item.chosen, item.rejected) if isinstance(item, PreferencePair) else (item,)
                found[where] = [template.turns(chat.messages, chat.tools, where) for chat in chats]
    return found


def _layout(title: str, window: list[EncodedRow], run: Config, paper: PlainTokenView) -> None:
    """Which positions of a window hold which row."""
    capacity, at, lines = run.data.max_length * len(window[0].sequences), 0, []
    for row in window:
        for side, (ids, _) in zip(SIDE_LABELS.get(run.stage.rows, ("",)), row.sequences, strict=True):
            lines.append(f"  positions {at}-{at + len(ids) - 2}: {row.name} {side}".rstrip())
            at += len(ids) - 1
    if at < capacity:
        lines.append(f"  positions {at}-{capacity - 1}: padding")
    paper.say(f"\n{title}: {at:,} of {capacity:,} positions, {len(window)} row{'s' * (len(window) > 1)}, each reads itself alone")
    for line in lines:
        paper.say(line)


def _print_example(row: EncodedRow, turns: TurnSpans, tokenizer: Tokenizer, ids: bool, paper: PlainTokenView) -> None:
    sides = SIDE_LABELS["preference"] if len(row.sequences) == 2 else ("",)
    for number, (side, sequence) in enumerate(zip(sides, row.sequences, strict=True)):
        lessons = int(sequence.learn.sum())
        paper.say(f"\n{row.name} {side}".rstrip() + f": {len(sequence.ids):,} tokens, {lessons:,} with loss")
        parts = list(token_spans(tokenizer, sequence.ids, sequence.learn, turns[number] if turns else []))
        paper.sequence(parts)
        if ids:
            paper.ids(parts)
