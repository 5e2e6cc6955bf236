"""Processes that prepare micro-batches in advance, and what is known of one that does not: which, where it was, how it
ended.

torch's DataLoader is not used for three reasons. It sends batches through shared memory and passed file descriptors, so
that a full /dev/shm or `ulimit -n` ends in a bus error or a hang; here they go through a pipe. When a worker dies, it
raises from a signal handler, which may be in the middle of an optimizer step; here the error is raised where the batch
is requested. And it waits without hearing a stop request. Workers need no requests: which batches an index has is a
function of the step.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import queue
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext

import torch

from common.errors import TrainingError, one_line, print_safely
from data.background import Watch, describe_state
from data.batching.batch import Batch, SequenceSource
from data.batching.packing import PackedSequences
from data.types import EncodedRow
from data.worker_process import START_SECONDS, describe_exit, kill_with_parent

BATCH, ERROR, READY = b"B", b"E", b"R"  # first byte of a message
TRACEBACK_LINES = 30
NAME_SECONDS = 1.0  # for reading the names of the rows that a worker was stuck at; reading them may be what hangs
CLOSE_SECONDS = 1.0  # for a killed worker to be gone
HINTS = {
    "Too many open files": "raise the limit, e.g. ulimit -n 65536, or use data.num_workers=0",
    "No space left": "free disk space, or use data.cache=FOLDER",
}


@dataclass(frozen=True)
class BatchTask:
    """What the workers share. It can be pickled."""

    sequences: SequenceSource
    collate: Callable[[list[list[EncodedRow]]], Batch]
    # (worker, number of workers) -> sequences of each of its micro-batches, in order
    indices: Callable[[int, int], Iterator[list[int]]]

    def read(self, indices: list[int], positions: Positions, worker: int) -> Batch:
        rows = []
        for index in indices:
            positions.set(worker, index)
            rows.append(self.sequences[index])
        return self.collate(rows)

    def describe(self, positions: Positions, worker: int) -> str:
        """Return the rows that a worker reads now."""
        sequence = positions.sequence(worker)
        return "its data" if sequence is None else self.names(sequence)

    def names(self, index: int) -> str:
        """Return the rows of a sequence, or its number if they cannot be read within NAME_SECONDS."""
        names: list[str] = []
        thread = threading.Thread(target=lambda: names.extend(row.name for row in self.sequences[index]), daemon=True)
        with _thread_errors_ignored():
            thread.start()
            thread.join(NAME_SECONDS)
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else f"sequence {index}"


class Positions:
    """Which sequence each worker reads, and a count of its steps, in memory that forked workers share.

    A spawned worker has a copy of its own.
    """

    def __init__(self, count: int) -> None:
        self._count, self._memory = count, mmap.mmap(-1, 16 * count)
        for worker in range(count):
            struct.pack_into("qq", self._memory, 16 * worker, -1, 0)

    def __reduce__(self) -> tuple:
        return Positions, (self._count,)

    def set(self, worker: int, sequence: int) -> None:
        struct.pack_into("qq", self._memory, 16 * worker, sequence, self._steps(worker) + 1)

    def tick(self, worker: int) -> None:
        """Count a step, e.g. of planning the packed sequences of an epoch."""
        struct.pack_into("q", self._memory, 16 * worker + 8, self._steps(worker) + 1)

    def sequence(self, worker: int) -> int | None:
        number: int = struct.unpack_from("q", self._memory, 16 * worker)[0]
        return None if number < 0 else number

    def snapshot(self) -> bytes:
        return self._memory[:]

    def _steps(self, worker: int) -> int:
        steps: int = struct.unpack_from("q", self._memory, 16 * worker + 8)[0]
        return steps


class BatchWorkers:
    """Iterator over the micro-batches of a task: number i is computed by worker i % count.

    Raises TrainingError if a worker fails, StopRequested.
    """

    def __init__(
        self, task: BatchTask, count: int, watch: Watch, positions: Positions, receive: Callable[[Batch], Batch]
    ) -> None:
        """`receive`: applied to each batch in a thread, e.g. to pin its memory."""
        self.task, self.watch, self.positions = task, watch, positions
        self._next = 0
        self._workers: list[_Worker] = []
        context = multiprocessing.get_context("fork" if sys.platform.startswith("linux") else None)
        try:
            with _signals_blocked():
                for index in range(count):
                    self._workers.append(_Worker(context, task, index, count, positions, receive))
        except OSError as error:
            self.close()
            message = f"{count} data workers cannot be started: {error.strerror or error}"
            raise TrainingError(f"{message}; {_hint(str(error), 'use data.num_workers=0')}") from error

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        worker = self._workers[self._next % len(self._workers)]
        self._next += 1
        stuck = partial(self._stuck_error, worker)
        self.watch.wait_for(worker.ready.wait, stuck, START_SECONDS)
        message = self.watch.take(worker.received, stuck)
        if isinstance(message, Batch):
            return message
        raise self._exit_error(worker) if message is None else self._read_error(worker, message)

    def close(self) -> None:
        """Kill the workers, whatever they do, and wait a limited time for their end."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close(deadline)
        self._workers = []

    def _name(self, worker: _Worker) -> str:
        return f"data worker {worker.index} of {len(self._workers)} (pid {worker.pid})"

    def _reading(self, worker: _Worker) -> str:
        return f" while it read {self.task.describe(self.positions, worker.index)}"

    def _stuck_error(self, worker: _Worker, seconds: float) -> TrainingError:
        state = describe_state(worker.pid)
        done = "no progress for" if worker.ready.is_set() else "not ready after"
        text = (
            f"{self._name(worker)} is stuck: {done} {seconds:.1f} s (data.worker_timeout){self._reading(worker)}{state}"
        )
        return TrainingError(f"{text}; try data.num_workers=0, or a larger data.worker_timeout if reading is this slow")

    def _exit_error(self, worker: _Worker) -> TrainingError:
        worker.process.join(CLOSE_SECONDS)
        reading = self._reading(worker)
        return TrainingError(
            f"{self._name(worker)} {describe_exit(worker.process.exitcode)}{reading}; try fewer data.num_workers, or data.num_workers=0"
        )

    def _read_error(self, worker: _Worker, failure: dict[str, str]) -> TrainingError:
        if failure["type"] == "DamagedStoreError":  # it says what to do, and its traceback tells nothing
            return TrainingError(failure["message"])
        lines = failure["traceback"].splitlines()
        print_safely(
            "\n".join([*(["..."] if len(lines) > TRACEBACK_LINES else []), *lines[-TRACEBACK_LINES:]]), sys.stderr
        )
        text = f"{self._name(worker)} failed{self._reading(worker)}: {failure['type']}: {one_line(failure['message'])[:500]}"
        return TrainingError(f"{text}; {_hint(failure['message'], 'data.num_workers=0 reads in the training process')}")


class _Worker:
    """One process, and the thread that receives its batches: one waits in the queue, one in the thread, one in the
    process.
    """

    def __init__(
        self,
        context: BaseContext,
        task: BatchTask,
        index: int,
        count: int,
        positions: Positions,
        receive: Callable[[Batch], Batch],
    ) -> None:
        self.index = index
        self.received: queue.Queue[Batch | dict[str, str] | None] = queue.Queue(1)  # None: the process has ended
        self.ready = threading.Event()  # or ended
        self._connection, end = context.Pipe(duplex=False)
        arguments = (task, index, count, positions, end, os.getpid())
        process = context.Process(target=_worker_main, args=arguments, daemon=True)  # type: ignore[attr-defined]  # of every context
        try:
            with warnings.catch_warnings():
                # a fork beside threads: the child uses none of their locks
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        except OSError:
            self._connection.close()
            raise
        finally:
            end.close()  # the worker has the only one, so that its death ends the pipe
        self.process, self.pid = process, process.pid
        self._thread = threading.Thread(target=self._receive, args=(receive,), name=f"data worker {index}", daemon=True)
        self._thread.start()

    def _receive(self, receive: Callable[[Batch], Batch]) -> None:
        try:
            while True:
                message = self._connection.recv_bytes()
                self.ready.set()
                if message == READY:
                    continue
                self.received.put(
                    receive(Batch.from_bytes(message[1:])) if message[:1] == BATCH else json.loads(message[1:])
                )
        except (EOFError, OSError):
            self.ready.set()
            self.received.put(None)

    def kill(self) -> None:
        self.process.kill()

    def close(self, deadline: float) -> None:
        """Wait until the killed process and its thread have ended, or until `deadline`."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Empty):
                self.received.get(timeout=0.01)  # the thread may wait for space
        if not self._thread.is_alive():
            self._connection.close()


def _worker_main(task: BatchTask, index: int, count: int, positions: Positions, end: Connection, parent: int) -> None:
    """Body of a worker: send every `count`th batch from number `index` on, or the first error."""
    kill_with_parent(parent)
    torch.set_num_threads(1)
    if isinstance(task.sequences, PackedSequences):
        task.sequences.progress = lambda *_: positions.tick(index)
    try:
        end.send_bytes(READY)
        try:
            for indices in task.indices(index, count):
                end.send_bytes(BATCH + task.read(indices, positions, index).to_bytes())
        except BrokenPipeError:
            raise
        except Exception as error:  # whatever a reader raises: the training process reports it
            failure = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            end.send_bytes(ERROR + json.dumps(failure).encode())
    except BrokenPipeError:
        pass  # the training process has ended


@contextmanager
def _thread_errors_ignored() -> Iterator[None]:
    """Print no traceback of a thread that fails."""
    previous, threading.excepthook = threading.excepthook, lambda _: None
    try:
        yield
    finally:
        threading.excepthook = previous


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block stop signals while workers start: they inherit the mask and keep it.

    Ctrl-C goes to the whole process group; the workers survive it, so that the training process can finish its step.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _hint(message: str, otherwise: str) -> str:
    return next((hint for text, hint in HINTS.items() if text in message), otherwise)
