"""Optimizer steps as lists of micro-batches: which rows a step holds is a function of (seed, epoch, step) alone."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch.utils.data import DataLoader

from data.batching.batch import Batch, SequenceSource, collate
from data.batching.sampler import ShuffledSampler

T = TypeVar("T")


class StepLoader:
    """`iter_steps(start, end)` yields each optimizer step as its list of micro-batches, the short last step of an epoch included.

    The sequences of a step come from `sampler`, so they depend neither on the number of micro-batches or ranks nor on the number
    of workers. Of the sequences of a step rank r gets every `world_size`-th from the r-th on. All ranks get equally many
    micro-batches, because they synchronize in each: a rank with fewer sequences gets dummy batches.
    """

    def __init__(
        self,
        sequences: SequenceSource,
        sampler: ShuffledSampler,
        *,
        batch_size: int,
        pad_id: int,
        packed: bool,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool = False,
    ) -> None:
        self.sequences, self.sampler, self.batch_size, self.num_workers = sequences, sampler, batch_size, num_workers
        self.collate = partial(collate, pad_id=pad_id, packed=packed)  # not a lambda: spawned workers unpickle it
        self.rank, self.world_size, self.pin_memory = rank, world_size, pin_memory

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def iter_epoch(self, epoch: int, skip: int = 0) -> Generator[list[Batch]]:
        """Yield the steps of one epoch from step `skip` on. Close the generator if it is not exhausted: this ends its workers."""
        return self.iter_steps(epoch * self.steps_per_epoch + skip, (epoch + 1) * self.steps_per_epoch)

    def iter_steps(self, start: int, end: int) -> Generator[list[Batch]]:
        """Yield steps [start, end) of the whole training; workers and prefetching continue across epochs. Close it as `iter_epoch`."""
        batches = self._load(range(start, end))
        return batches if self.num_workers else prefetch(batches)  # workers prefetch by themselves

    def _load(self, steps: range) -> Generator[list[Batch]]:
        loader: DataLoader = DataLoader(
            self.sequences,  # type: ignore[arg-type]  # torch documents that __len__ and __getitem__ suffice
            batch_sampler=(batch for step in steps for batch in self._batch_indices(step)),
            collate_fn=self.collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # without it a DataLoader draws from the global random state of the run
        )
        with _signals_blocked():
            batches = iter(loader)
        try:
            for step in steps:
                mine = [next(batches) for _ in self._batch_indices(step)]
                yield mine + [self._dummy] * (self._num_batches(step) - len(mine))
        finally:
            # torch ends workers when the iterator is collected, but a traceback may keep it alive: the process would then wait at
            # exit for workers which have signals blocked.
            if self.num_workers:
                batches._shutdown_workers()  # type: ignore[attr-defined]  # torch has no public method for it

    @cached_property
    def _dummy(self) -> Batch:
        return self.collate([self.sequences[0]]).as_dummy()

    def _num_batches(self, step: int) -> int:
        """Return the number of micro-batches of rank 0, which has the most."""
        return -(-len(self.sampler.indices(*divmod(step, self.steps_per_epoch))[:: self.world_size]) // self.batch_size)

    def _batch_indices(self, step: int) -> list[list[int]]:
        """Return the sequence indices of each micro-batch of this rank, counted through the epochs."""
        epoch, step = divmod(step, self.steps_per_epoch)
        mine = (epoch * len(self.sequences) + self.sampler.indices(epoch, step)[self.rank :: self.world_size]).tolist()
        return [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)]


def prefetch(items: Generator[T]) -> Generator[T]:
    """Yield the same items; a thread computes the next one while the caller uses the current one."""
    with closing(items), ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        pending = thread.submit(next, items, None)
        while (item := pending.result()) is not None:
            pending = thread.submit(next, items, None)
            yield item


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block stop signals while workers start: they inherit the mask and keep it. Ctrl-C goes to the whole process group; the workers
    survive it, so that the training process can finish its step."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
