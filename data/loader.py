"""Rows in, optimizer steps out: which rows a step holds is a function of (seed, epoch, step).

Shapes: R lines of a micro-batch, T positions, S sequences (one a row; 2 for preference pairs).
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data.order import Order
from data.rows import Row, RowSource

T = TypeVar("T")
IGNORE = -100  # the label of a position that carries no loss
ROUND_TO = 8  # widths vary less: fewer shapes for a compiler to meet
PADDING = -1  # the sequence of a position that belongs to none


class Windows(Protocol):
    """What a line of a batch is made of: one row, or several that are packed."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> list[Row]: ...
    @property
    def rows(self) -> RowSource: ...


@dataclass
class Single:
    """Every row a window of its own."""

    rows: RowSource

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Row]:
        return [self.rows[index]]


@dataclass
class Batch:
    """One micro-batch, padded on the right. Of preference pairs sequence p is the chosen side of pair p, sequence S / 2 + p its rejected side."""

    input_ids: Tensor  # (R, T)
    labels: Tensor  # (R, T) the token that follows each position, IGNORE where it carries no loss
    lengths: Tensor  # (S,) positions of each sequence
    names: list[str]  # where each row comes from, for messages; none: a stand-in that counts as nothing
    sequences: Tensor | None = None  # (R, T) packed: which sequence a position belongs to, PADDING for none; None: line r is sequence r
    position_ids: Tensor | None = None  # (R, T) packed: they begin anew with each sequence

    @property
    def supervised(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.labels.numpy() != IGNORE))

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """What the model is called with."""
        return {name: getattr(self, name) for name in ("input_ids", "labels", "lengths", "sequences", "position_ids")}

    @property
    def positions(self) -> int:
        """Of the input, without padding."""
        return int(self.lengths.numpy().sum()) if self.names else 0

    def idle(self) -> Batch:
        """A batch of the same form without rows: for a rank that has none left while others still have some."""
        return dataclasses.replace(self, labels=torch.full_like(self.labels, IGNORE), names=[])

    def to(self, device: torch.device) -> Batch:
        moved = {name: None if tensor is None else tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return Batch(names=self.names, **moved)  # type: ignore[arg-type]  # the fields of a batch, by their names

    def pin_memory(self) -> Batch:
        """In memory that a GPU reads while we go on; torch's DataLoader asks for it by this name."""
        return Batch(names=self.names, **{name: None if tensor is None else tensor.pin_memory() for name, tensor in self.inputs.items()})  # type: ignore[arg-type]  # as in `to`

    def of_sequences(self, values: Tensor) -> Tensor:
        """Sums over the positions of each sequence: (R, T) -> (S,)."""
        if self.sequences is None:
            return values.sum(-1)
        count = len(self.lengths)
        slots = torch.where(self.sequences == PADDING, count, self.sequences).flatten()
        return values.new_zeros(count + 1).index_add(0, slots, values.flatten())[:count]


def collate(windows: list[list[Row]], pad_id: int, packed: bool) -> Batch:
    rows = [row for window in windows for row in window]
    sides = len(rows[0].sequences)
    numbered = [[(side * len(rows) + p, row.sequences[side]) for side in range(sides)] for p, row in enumerate(rows)]
    if packed:
        ends = np.cumsum([len(window) for window in windows]).tolist()
        lines = [[sequence for row in numbered[end - len(window) : end] for sequence in row] for end, window in zip(ends, windows, strict=True)]
    else:
        lines = [[row[side]] for side in range(sides) for row in numbered]
    width = max(sum(len(sequence.ids) - 1 for _, sequence in line) for line in lines)
    shape = (len(lines), -(-width // ROUND_TO) * ROUND_TO)
    input_ids, labels = np.full(shape, pad_id), np.full(shape, IGNORE)
    belongs, position_ids = np.full(shape, PADDING), np.zeros(shape, np.int64)
    lengths = np.empty(sides * len(rows), np.int64)
    for r, line in enumerate(lines):
        start = 0
        for number, (ids, learn) in line:
            length = len(ids) - 1
            span = slice(start, start + length)
            input_ids[r, span] = ids[:-1]
            labels[r, span] = np.where(learn[1:], ids[1:], IGNORE)
            belongs[r, span] = number
            position_ids[r, span] = np.arange(length)
            lengths[number] = length
            start += length
    layout = (torch.from_numpy(belongs), torch.from_numpy(position_ids)) if packed else (None, None)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), torch.from_numpy(lengths), [row.name for row in rows], *layout)


class StepLoader:
    """`onward(start, end)` yields each optimizer step as its list of micro-batches; the last, short step is used too.

    The rows of a step come from `order`, so they do not depend on how the step is cut into micro-batches or dealt to ranks,
    nor on the number of workers. Of the step's windows rank r takes every `world`-th from the r-th on; all ranks make equally
    many micro-batches, for they meet in each, and one whose windows are used up stands by.
    """

    def __init__(
        self,
        windows: Windows,
        order: Order,
        *,
        batch_size: int,
        pad_id: int,
        packed: bool,
        num_workers: int = 0,
        rank: int = 0,
        world: int = 1,
        pin: bool = False,
    ) -> None:
        self.windows, self.order, self.batch_size, self.num_workers = windows, order, batch_size, num_workers
        self.collate = _Collate(pad_id, packed)
        self.rank, self.world, self.pin = rank, world, pin

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps

    def steps(self, epoch: int, skip: int = 0) -> Generator[list[Batch]]:
        """Of one epoch. Close it where it is left before its end: its workers end with it."""
        return self.onward(epoch * self.steps_per_epoch + skip, (epoch + 1) * self.steps_per_epoch)

    def onward(self, start: int, end: int) -> Generator[list[Batch]]:
        """Steps [start, end) of the whole training; where an epoch ends in between, nothing waits: workers and what is ahead go on. Close it likewise."""
        made = self._made(range(start, end))
        return made if self.num_workers else ahead(made)  # workers are ahead by themselves

    def _made(self, steps: range) -> Generator[list[Batch]]:
        loader: DataLoader = DataLoader(
            self.windows,  # type: ignore[arg-type]  # anything with __len__ and __getitem__ serves, as torch documents
            batch_sampler=(batch for step in steps for batch in self._indices(step)),
            collate_fn=self.collate,
            num_workers=self.num_workers,
            pin_memory=self.pin,
            generator=torch.Generator(),  # its own: opening a loader must not draw from the run's random state
        )
        with _signals_held():
            batches = iter(loader)
        try:
            for step in steps:
                mine = [next(batches) for _ in self._indices(step)]
                yield mine + [self._idle] * (self._batches(step) - len(mine))
        finally:
            # Left to itself it would end them when it is forgotten, and a traceback remembers it: the program would wait at its end
            # for workers that hear no signal.
            if self.num_workers:
                batches._shutdown_workers()  # type: ignore[attr-defined]  # torch has no public word for it

    @cached_property
    def _idle(self) -> Batch:
        return self.collate([self.windows[0]]).idle()

    def _batches(self, step: int) -> int:
        """Micro-batches of the rank that has the most."""
        return -(-len(self.order.step(*divmod(step, self.steps_per_epoch))[:: self.world]) // self.batch_size)

    def _indices(self, step: int) -> list[list[int]]:
        """The windows of each micro-batch of one step."""
        mine = self.order.step(*divmod(step, self.steps_per_epoch))[self.rank :: self.world].tolist()
        return [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)]


def ahead(made: Generator[T]) -> Generator[T]:
    """The same, each item made by a thread while the one before is used."""
    with closing(made), ThreadPoolExecutor(1, thread_name_prefix="feed") as thread:
        coming = thread.submit(next, made, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, made, None)
            yield item


@dataclass
class _Collate:
    """A class and not a lambda: workers that are spawned receive it by name."""

    pad_id: int
    packed: bool

    def __call__(self, windows: list[list[Row]]) -> Batch:
        return collate(windows, self.pad_id, self.packed)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C reaches the whole group. Workers begin with what is held here and go on holding it: they outlive the signal from their
    first moment on, so that the training process can finish its step."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
