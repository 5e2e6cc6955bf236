"""Rows in, optimizer steps out: which rows a step holds is a function of (seed, epoch, step).

Shapes: R lines of a micro-batch, T positions, S sequences (one a row; 2 for preference pairs).
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch.utils.data import DataLoader

from data.batching.batch import Batch, Windows, collate
from data.batching.sampler import ShuffledSampler
from data.types import EncodedRow

T = TypeVar("T")


class StepLoader:
    """`onward(start, end)` yields each optimizer step as its list of micro-batches; the last, short step is used too.

    The rows of a step come from `order`, so they do not depend on how the step is cut into micro-batches or dealt to ranks,
    nor on the number of workers. Of the step's windows rank r takes every `world`-th from the r-th on; all ranks make equally
    many micro-batches, for they meet in each, and one whose windows are used up stands by.
    """

    def __init__(
        self,
        windows: Windows,
        order: ShuffledSampler,
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
        return made if self.num_workers else prefetch(made)  # workers are ahead by themselves

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


def prefetch(made: Generator[T]) -> Generator[T]:
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

    def __call__(self, windows: list[list[EncodedRow]]) -> Batch:
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
