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

from runner.engine.config import Config
from runner.engine.feed import loader_of, open_feed, recipe_of, table
from runner.trained.page import Paper, open_paper, stretches

if TYPE_CHECKING:
    from data.loader import Windows
    from data.mixture import Part
    from data.rows import Row, RowSource
    from data.tokenizer import Tokenizer
    from runner.engine.feed import Feed

AT_ONCE = 1 << 16  # rows whose lengths are looked at together
SAMPLE = 512  # rows that a fill ratio is measured on
BARS, WIDEST = 10, 40
SIDES = {"preference": ("chosen", "rejected")}
Turns = list[list[tuple[int, str]]]  # of each side


@dataclass
class ShowConfig:
    n: int  # windows, or rows, to show
    row: Optional[str]  # a row's number, or file:line
    ids: bool
    packed: Optional[bool]  # null: as data.packing says
    plain: bool

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("a count cannot be negative", f"n={self.n}", "choose 0 (no row, only the counts) or more")


def show(cfg: ShowConfig, run: Config) -> None:
    """Print to stdout. Raises ValueError(what, where, fix) as training would."""
    from data.tokenizer import Tokenizer

    if cfg.packed is not None:
        data = dataclasses.replace(run.data, packing="pack" if cfg.packed else "none", group_by_length=run.data.group_by_length and not cfg.packed)
        run = dataclasses.replace(run, data=data)
    tokenizer = Tokenizer.load(Path(run.data.tokenizer))
    feed = open_feed(run, tokenizer)
    chosen = _find(cfg.row, feed) if cfg.row is not None else []
    paper = open_paper(cfg.plain)
    paper.say(table(feed.files))
    paper.say(f"an epoch shows {len(feed.train.rows):,} rows; {feed.held_out:,} are held out")
    for line in ["", *histogram(feed.train.rows), "", *_fill(feed.train, run, tokenizer), ""]:
        paper.say(line)
    windows = {"": chosen} if chosen else {f"window {w}": feed.train[w] for w in _first_windows(feed, run, tokenizer, cfg.n)}
    turns = _turns({row.name for window in windows.values() for row in window}, feed, run, tokenizer)
    if windows:
        paper.legend()
    for title, window in windows.items():
        if run.data.packing == "pack" and title:
            _layout(title, window, run, paper)
        for row in window:
            _show(row, turns.get(row.name, []), tokenizer, cfg.ids, paper)


def histogram(rows: RowSource) -> list[str]:
    """How many rows have how many positions (tokens that the model reads)."""
    longest, counts = 1, np.zeros(1, np.int64)
    for start in range(0, len(rows), AT_ONCE):
        lengths = rows.lengths(start, min(start + AT_ONCE, len(rows)))
        longest = max(longest, int(lengths.max()))
        counts = _sum(counts, np.bincount(lengths))
    width = -(-longest // BARS)
    bars = np.add.reduceat(counts[1:], np.arange(0, len(counts) - 1, width))
    lines = []
    for i, count in enumerate(bars.tolist()):
        span = f"{i * width + 1}-{min((i + 1) * width, longest)}"
        lines.append(f"{span:>11} {count:>10,} {'#' * -(-count * WIDEST // int(bars.max()))}".rstrip())
    return ["  positions       rows", *lines]


def _sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    size = max(len(a), len(b))
    return np.pad(a, (0, size - len(a))) + np.pad(b, (0, size - len(b)))


def _fill(windows: Windows, run: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """The share of the computed positions that hold a token."""
    from data.loader import Single
    from data.packing import Packed, best_fit
    from data.rows import sides_of

    rows, capacity = windows.rows, run.data.max_length * sides_of(run.stage.rows)
    if isinstance(windows, Packed):
        packed = windows.fill
        yield f"packed: {len(windows):,} windows of {capacity:,} positions, {len(rows) / len(windows):.1f} rows each, {packed:.1%} of the positions hold a token"
    else:
        lengths = rows.lengths(0, min(AT_ONCE, len(rows)))
        packed = lengths.sum() / (len(best_fit(lengths, capacity)) * capacity)
        yield f"packed (data.packing=pack): {packed:.1%} of the positions would hold a token"
    data = dataclasses.replace(run.data, packing="none", num_workers=0)
    loader = loader_of(Single(rows), dataclasses.replace(run, data=data), tokenizer, run.train.batch_size)
    tokens = positions = seen = 0
    for batch in itertools.chain.from_iterable(loader.steps(epoch=0)):
        tokens, positions, seen = tokens + int(batch.lengths.sum()), positions + batch.input_ids.numel(), seen + len(batch.names)
        if seen >= SAMPLE:
            break
    how = "padded, rows of like length together" if data.group_by_length else "padded"
    yield f"{how}: batches of {run.train.batch_size} rows, {tokens / positions:.1%} of the positions hold a token (measured on {seen:,} rows)"


def _first_windows(feed: Feed, run: Config, tokenizer: Tokenizer, count: int) -> list[int]:
    """The windows that the first steps of training see."""
    order = loader_of(feed.train, run, tokenizer, run.train.batch_size * run.train.accumulation_steps).order
    numbers = itertools.chain.from_iterable(order.step(0, step).tolist() for step in range(order.steps))
    return list(itertools.islice(numbers, count))


def _find(wanted: str, feed: Feed) -> list[Row]:
    """The row of a number, or all that was made of file:line."""
    rows = feed.train.rows
    if wanted.isdecimal():
        if int(wanted) >= len(rows):
            raise ValueError(
                f"there are {len(rows):,} rows to train on", f"row={wanted}", f"choose 0 to {len(rows) - 1}, or name one by its file: row=FILE:LINE"
            )
        return [rows[int(wanted)]]
    name, _, place = wanted.rstrip("]").rpartition("[" if wanted.endswith("]") else ":")
    for part in _parts(feed):
        if name and place.isdecimal() and f"/{part.source.name}".endswith(f"/{name.removeprefix('./')}"):
            if found := _made_of(part, int(place)):
                return found
    raise ValueError(
        "no row was made of that", f"row={wanted}", "give a number, or the file and line of a row that was kept, as messages name it: row=rows.jsonl:12"
    )


def _parts(feed: Feed) -> list[Part]:
    from data.mixture import Rows

    rows = [windows.rows for windows in (feed.train, feed.val) if windows is not None]
    return [part for each in rows if isinstance(each, Rows) for part in each.parts]


def _made_of(part: Part, place: int) -> list[Row]:
    """A store's rows stand in the order of their file."""
    from data.mixture import Rows

    rows = Rows((part,))

    def place_of(i: int) -> int:
        return part.store.read(int(part.locate(np.array([i]))[0]))[1]

    first = bisect_left(range(len(rows)), place, key=place_of)
    return [rows[i] for i in itertools.takewhile(lambda i: place_of(i) == place, range(first, len(rows)))]


def _turns(names: set[str], feed: Feed, run: Config, tokenizer: Tokenizer) -> dict[str, Turns]:
    """Who speaks where, of the conversations of these names: a store does not know, so they are read again."""
    from data.augment import augment
    from data.chat import ChatTemplate
    from data.shapes import SHAPES, Pair, Text

    if run.stage.rows == "text":
        return {}
    template, recipe = ChatTemplate(tokenizer), recipe_of(run, tokenizer)
    found: dict[str, Turns] = {}
    for part in _parts(feed):
        shape = SHAPES[part.store.facts["recipe"]["shape"]]
        for place, raw in part.source.items():
            if len(found) == len(names):
                return found
            if (where := part.source.where(place)) in names and where not in found:
                item = shape.read(part.source.row(place, raw), where)
                assert not isinstance(item, Text)
                item = augment(item, recipe.system_prob, recipe.system_prompts, recipe.empty_think_prob, recipe.seed, place)
                chats = (item.chosen, item.rejected) if isinstance(item, Pair) else (item,)
                found[where] = [template.turns(chat.messages, chat.tools, where) for chat in chats]
    return found


def _layout(title: str, window: list[Row], run: Config, paper: Paper) -> None:
    """Which positions of a window hold which row."""
    capacity, at, lines = run.data.max_length * len(window[0].sequences), 0, []
    for row in window:
        for side, (ids, _) in zip(SIDES.get(run.stage.rows, ("",)), row.sequences, strict=True):
            lines.append(f"  positions {at}-{at + len(ids) - 2}: {row.name} {side}".rstrip())
            at += len(ids) - 1
    if at < capacity:
        lines.append(f"  positions {at}-{capacity - 1}: padding")
    paper.say(f"\n{title}: {at:,} of {capacity:,} positions, {len(window)} row{'s' * (len(window) > 1)}, each reads itself alone")
    for line in lines:
        paper.say(line)


def _show(row: Row, turns: Turns, tokenizer: Tokenizer, ids: bool, paper: Paper) -> None:
    sides = SIDES["preference"] if len(row.sequences) == 2 else ("",)
    for number, (side, sequence) in enumerate(zip(sides, row.sequences, strict=True)):
        lessons = int(sequence.learn.sum())
        paper.say(f"\n{row.name} {side}".rstrip() + f": {len(sequence.ids):,} tokens, {lessons:,} with loss")
        parts = list(stretches(tokenizer, sequence.ids, sequence.learn, turns[number] if turns else []))
        paper.sequence(parts)
        if ids:
            paper.ids(parts)
