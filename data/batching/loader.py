"""Optimizer steps as lists of micro-batches: which rows a step holds is a function of (seed, epoch, step) alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial

import torch

from data.background import Watch, never, prefetch
from data.batching.batch import Batch, collate
from data.batching.batch_workers import BatchTask, BatchWorkers, shared_positions
from data.batching.packing import Sequences
from data.batching.sampler import ShuffledSampler


@dataclass(eq=False)
class StepLoader:
    """`iter_steps(start, end)` yields each optimizer step as its list of micro-batches, the short last step of an epoch
    included.

    The sequences of a step come from `sampler`, so they depend neither on the number of micro-batches or ranks nor on
    the number of workers. Of the sequences of a step rank r gets every `world_size`-th from the r-th on. All ranks get
    equally many micro-batches, because they synchronize in each: a rank with fewer sequences gets dummy batches.

    Waiting for a batch ends: by StopRequested, or by TrainingError if a worker fails, or if nothing moves for
    `worker_timeout` seconds (0: no limit).
    """

    sequences: Sequences
    sampler: ShuffledSampler
    _: KW_ONLY
    batch_size: int
    pad_id: int
    packed: bool
    num_workers: int = 0
    worker_timeout: float = 0.0
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False

    def __post_init__(self) -> None:
        self.collate = partial(
            collate, pad_id=self.pad_id, packed=self.packed
        )  # not a lambda: spawned workers unpickle it

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def first_batch(self) -> Batch:
        """Return the first micro-batch of this rank, or a dummy if it has none."""
        first = self._batch_indices(0)[:1]
        return self.collate([self.sequences[i] for i in first[0]]) if first else self._dummy

    def iter_epoch(
        self, epoch: int, skip: int = 0, stop_requested: Callable[[], bool] = never
    ) -> Generator[list[Batch]]:
        """Yield the steps of one epoch from step `skip` on.

        Close the generator if it is not exhausted: this ends its workers.
        """
        return self.iter_steps(epoch * self.steps_per_epoch + skip, (epoch + 1) * self.steps_per_epoch, stop_requested)

    def iter_steps(self, start: int, end: int, stop_requested: Callable[[], bool] = never) -> Generator[list[Batch]]:
        """Yield steps [start, end) of the whole training; workers and prefetching continue across epochs.

        Close it as `iter_epoch`.
        """
        steps, pin, positions = range(start, end), self._pinning(), shared_positions(max(1, self.num_workers))
        task = BatchTask(self.sequences, self.collate, partial(self._batches_of_worker, steps), positions)
        watch = Watch(stop_requested, self.worker_timeout, positions.tobytes)
        if self.num_workers:
            with closing(BatchWorkers(task, self.num_workers, watch, pin)) as batches:
                yield from self._whole_steps(steps, batches)
        else:
            own = self._whole_steps(steps, map(pin, task.batches(worker=0, num_workers=1)))
            yield from prefetch(own, watch, partial(task.describe, 0))

    def _whole_steps(self, steps: range, batches: Iterator[Batch]) -> Generator[list[Batch]]:
        """Yield the micro-batches of each step: those of this rank, then dummies."""
        for step in steps:
            mine = [next(batches) for _ in range(self._num_batches(step, self.rank))]
            yield mine + [self._dummy] * (self._num_batches(step, rank=0) - len(mine))

    @cached_property
    def _dummy(self) -> Batch:
        return self.collate([self.sequences[0]]).as_dummy()

    def _pinning(self) -> Callable[[Batch], Batch]:
        """Return a function that copies a batch to pinned memory, for the GPU that is current in the calling thread,
        from any thread.
        """
        if not self.pin_memory:
            return lambda batch: batch
        device = torch.cuda.current_device()

        def pin(batch: Batch) -> Batch:
            with torch.cuda.device(device):  # a new thread has GPU 0
                return batch.pin_memory()

        return pin

    def _num_batches(self, step: int, rank: int) -> int:
        """Return the number of micro-batches with rows of a rank; rank 0 has the most."""
        num_rows = self.sampler.num_items(*divmod(step, self.steps_per_epoch))  # over all ranks
        return -(-max(0, num_rows - rank) // (self.world_size * self.batch_size))

    def _batch_indices(self, step: int) -> list[list[int]]:
        """Return the sequence indices of each micro-batch of this rank, counted through the epochs."""
        epoch, step = divmod(step, self.steps_per_epoch)
        mine = (epoch * len(self.sequences) + self.sampler.indices(epoch, step)[self.rank :: self.world_size]).tolist()
        return [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)]

    def _batches_of_worker(self, steps: range, worker: int, num_workers: int) -> Iterator[list[int]]:
        """Yield the sequence indices of every `num_workers`th micro-batch of `steps`, from number `worker` on."""
        number = 0
        for step in steps:
            count = self._num_batches(step, self.rank)
            chosen = range((worker - number) % num_workers, count, num_workers)
            if chosen:  # the order of a step takes time
                batches = self._batch_indices(step)
                yield from (batches[i] for i in chosen)
            number += count
