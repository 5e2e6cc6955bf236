"""Optimizer steps as lists of micro-batches: which rows a step holds is a function of (seed, epoch, step) alone. Workers
prepare them in advance; of one that does not, the error says which, where it was, and how it ended.

torch's DataLoader sends batches through shared memory and passed file descriptors: a full /dev/shm or `ulimit -n` ends
in a bus error or a hang. When a worker dies, it raises from a signal handler, which may be in the middle of an optimizer
step; here the error is raised where the batch is requested. Workers need no requests.
"""

from __future__ import annotations

import itertools
import mmap
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from multiprocessing.connection import Connection

import numpy as np
import torch

from common.errors import MORE_FILES, TrainingError, one_line, print_safely
from data.background import (
    DATA_WORKER,
    START_SECONDS,
    Watch,
    Worker,
    describe_state,
    never,
    prefetch,
    start_workers,
    stop_workers,
)
from data.batching.batch import Batch, collate
from data.batching.packing import PackedSequences, Sequences
from data.batching.sampler import ShuffledSampler

TRACEBACK_LINES = 30
NAME_SECONDS = 1.0  # for reading the names of the rows that a worker was stuck at; reading them may be what hangs
HINTS = {
    "Too many open files": f"{MORE_FILES}, or use data.num_workers=0",
    "No space left": "free disk space, or use data.cache=FOLDER",
}


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
    num_workers: int = 0
    worker_timeout: float = 0.0
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False

    def __post_init__(self) -> None:
        # not a lambda: spawned workers unpickle it
        self.collate = partial(collate, pad_id=self.pad_id, packed=isinstance(self.sequences, PackedSequences))
        self.steps_per_epoch = self.sampler.steps_per_epoch

    def pad_to_one_shape(self) -> None:
        """Pad every micro-batch of packed sequences to the (R, T) of the largest: compiled layers have one program."""
        assert isinstance(self.sequences, PackedSequences)
        rows_per_step = min(self.sampler.global_batch_size, len(self.sequences))
        R = min(self.batch_size, -(-rows_per_step // self.world_size))
        self.collate = partial(self.collate, shape=(R, min(self.sequences.capacity, self.sequences.num_tokens)))

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
        task = BatchTask(self, steps, positions)
        watch = Watch(stop_requested, self.worker_timeout, positions.tobytes)
        if self.num_workers:
            with closing(worker_batches(task, self.num_workers, watch, pin)) as batches:
                yield from self._whole_steps(steps, batches)
        else:
            own = self._whole_steps(steps, map(pin, task.batches(worker=0, num_workers=1)))
            yield from prefetch(own, watch, partial(task.describe, 0))

    def _whole_steps(self, steps: range, batches: Iterator[Batch]) -> Generator[list[Batch]]:
        """Yield the micro-batches of each step: those of this rank, then dummies."""
        for step in steps:
            mine = [next(batches) for _ in range(self._num_batches(step, self.rank))]
            missing = self._num_batches(step, rank=0) - len(mine)
            yield mine + [self._dummy] * missing if missing else mine

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

    def batches_of_worker(self, steps: range, worker: int, num_workers: int) -> Iterator[list[int]]:
        """Yield the sequence indices of every `num_workers`th micro-batch of `steps`, from number `worker` on, counted
        through the epochs.
        """
        number = 0
        for step in steps:
            count = self._num_batches(step, self.rank)
            chosen = range((worker - number) % num_workers, count, num_workers)
            number += count
            if chosen:  # the order of a step takes time
                epoch, step = divmod(step, self.steps_per_epoch)
                mine = epoch * len(self.sequences) + self.sampler.indices(epoch, step)[self.rank :: self.world_size]
                yield from (mine[i * self.batch_size : (i + 1) * self.batch_size].tolist() for i in chosen)


def shared_positions(num_workers: int) -> np.ndarray:
    """Return int64 (num_workers, 2): the sequence that each worker reads, -1 at first, and a count of its steps.

    Forked workers share the memory; a spawned one has a copy of its own.
    """
    positions = np.frombuffer(mmap.mmap(-1, 16 * num_workers), np.int64).reshape(num_workers, 2)
    positions[:, 0] = -1
    return positions


@dataclass(frozen=True)
class BatchTask:
    """What the workers share. It can be pickled."""

    loader: StepLoader
    steps: range
    positions: np.ndarray  # of `shared_positions`

    def batches(self, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yield every `num_workers`th micro-batch, from number `worker` on."""
        position, sequences = self.positions[worker], self.loader.sequences

        def count_step(*_: int) -> None:
            position[1] += 1

        if isinstance(sequences, PackedSequences):
            sequences.progress = count_step
        for indices in self.loader.batches_of_worker(self.steps, worker, num_workers):
            rows = []
            for index in indices:
                position[0] = index
                count_step()
                rows.append(sequences[index])
            yield self.loader.collate(rows)

    def describe(self, worker: int) -> str:
        """Return the rows that a worker reads now, or their sequence if they cannot be read within NAME_SECONDS."""
        index = int(self.positions[worker, 0])
        if index < 0:
            return "its data"
        names: list[str] = []

        def read_names() -> None:
            with suppress(Exception):
                names.extend(row.name for row in self.loader.sequences[index])

        thread = threading.Thread(target=read_names, daemon=True)
        thread.start()
        thread.join(NAME_SECONDS)
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else f"sequence {index}"


WorkerFailure = tuple[str, str, str]  # of a worker: type of the exception, message, traceback


def worker_batches(task: BatchTask, count: int, watch: Watch, receive: Callable[[Batch], Batch]) -> Generator[Batch]:
    """Yield the micro-batches of a task: number i is computed by worker i % count.

    One batch waits in the queue of its worker, one in the thread, one in the process. `receive`: applied to each batch
    in the thread, e.g. to pin its memory. Raises TrainingError if a worker fails, StopRequested. At the end the workers
    are killed, whatever they do.
    """
    is_closed = threading.Event()

    def receive_batches(worker: Worker) -> None:
        try:
            worker.connection.recv()  # it is ready
            worker.ready.set()
            while not is_closed.is_set():
                message = worker.connection.recv()
                worker.received.put(receive(message) if isinstance(message, Batch) else message)
        except (EOFError, OSError):
            worker.ready.set()
            worker.received.put(None)
        except Exception as error:  # e.g. no memory for a batch
            worker.ready.set()
            worker.received.put(_failure_of(error))

    try:
        bodies = [partial(_send_batches, task, index, count) for index in range(count)]
        workers = start_workers(DATA_WORKER, bodies, receive_batches)
    except OSError as error:
        problem = f"{count} data workers cannot be started: {error.strerror or error}"
        raise TrainingError(f"{problem}; {_hint(str(error), 'use data.num_workers=0')}") from error
    try:
        for index, worker in itertools.cycle(enumerate(workers)):
            describe = partial(task.describe, index)
            stuck = partial(_stuck_error, worker, describe)
            watch.wait_for(worker.ready.wait, stuck, START_SECONDS)
            message: Batch | WorkerFailure | None = watch.take(worker.received, stuck)  # None: the process has ended
            if not isinstance(message, Batch):
                raise _exit_error(worker, describe) if message is None else _read_error(worker, describe, *message)
            yield message
    finally:
        is_closed.set()  # a thread ends after the message that it holds now
        for worker in workers:
            with suppress(queue.Empty):
                worker.received.get_nowait()  # it may wait for space
        stop_workers(workers)


def _stuck_error(worker: Worker, describe: Callable[[], str], seconds: float) -> TrainingError:
    state = describe_state(worker.process.pid or 0)
    done = "no progress for" if worker.ready.is_set() else "not ready after"
    text = f"{worker.name} is stuck: {done} {seconds:.1f} s (data.worker_timeout) while it read {describe()}{state}"
    return TrainingError(f"{text}; try data.num_workers=0, or a larger data.worker_timeout if reading is this slow")


def _exit_error(worker: Worker, describe: Callable[[], str]) -> TrainingError:
    text = f"{worker.name} {worker.describe_end()} while it read {describe()}"
    return TrainingError(f"{text}; try fewer data.num_workers, or data.num_workers=0")


def _read_error(worker: Worker, describe: Callable[[], str], kind: str, message: str, trace: str) -> TrainingError:
    if kind == "DamagedStoreError":  # it says what to do, and its traceback tells nothing
        return TrainingError(message)
    lines = trace.splitlines()
    print_safely("\n".join([*(["..."] if len(lines) > TRACEBACK_LINES else []), *lines[-TRACEBACK_LINES:]]), sys.stderr)
    text = f"{worker.name} failed while it read {describe()}: {kind}: {one_line(message)[:500]}"
    return TrainingError(f"{text}; {_hint(message, 'data.num_workers=0 reads in the training process')}")


def _send_batches(task: BatchTask, index: int, count: int, connection: Connection) -> None:
    """Body of a worker: send None when it is ready, then its batches, or the first error."""
    torch.set_num_threads(1)
    connection.send(None)
    try:
        for batch in task.batches(index, count):
            connection.send(batch)
    except BrokenPipeError:
        raise
    except Exception as error:  # whatever a reader raises: the training process reports it
        connection.send(_failure_of(error))


def _failure_of(error: Exception) -> WorkerFailure:
    return type(error).__name__, str(error), traceback.format_exc()


def _hint(message: str, otherwise: str) -> str:
    return next((hint for text, hint in HINTS.items() if text in message), otherwise)
