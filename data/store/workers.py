"""Encodes the rows of a file on several cores: blocks in file order, few of them in memory at a time."""

from __future__ import annotations

import concurrent.futures
import gc
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from common.errors import UserError
from common.registry import import_inherited_plugins
from data.background import START_SECONDS, Watch, Worker, describe_state, start_workers, stop_workers
from data.sources.files import Source
from data.tokenize.block import EncodedBlock
from data.tokenize.encoder import Encoder
from data.types import EncodingConfig

# of Python's garbage collector in a worker: it looks for cycles, and rows have none
NEW_OBJECTS_PER_COLLECTION = 50_000
Chunk = list[tuple[int, Any]]  # (position in the source, item)


def encode_in_parallel(
    source: Source,
    encoding: EncodingConfig,
    tokenizer: str,
    chunks: Iterable[tuple[Chunk, int]],
    num_workers: int,
    timeout: float = 0.0,
) -> Iterator[tuple[EncodedBlock, int]]:
    """Yield (block, bytes read) for each (chunk, bytes read).

    Of several errors, of the chunks or of an encoder, the first in file order is raised.

    One worker is the calling process. `tokenizer` is the fingerprint of the tokenizer in `encoding`. Raises UserError
    if a process dies, or if no process finishes a chunk for `timeout` seconds (0: no limit), which begin when the
    process of the chunk is ready.
    """
    if num_workers == 1:
        encoder = _load_encoder(encoding, tokenizer)
        for chunk, bytes_read in chunks:
            yield encoder.encode(source, chunk), bytes_read
        return
    jobs: SimpleQueue[_Job | None] = SimpleQueue()  # a worker takes the next one when it is idle; None: no more
    pending: deque[_Job] = deque()

    def exchange(worker: Worker) -> None:
        while (job := jobs.get()) is not None:
            if not job.block.done():  # else an error of the chunks
                job.encode(worker)

    try:
        workers = start_workers(
            "tokenizing process", [partial(_encode_chunks, source, encoding)] * num_workers, exchange
        )
    except OSError as error:
        message = f"{num_workers} tokenizing processes cannot be started: {error.strerror or error}"
        fix = "raise the limits of this shell (ulimit -n, ulimit -u), or end other processes"
        raise UserError(message, source.path, fix) from error
    watch = Watch(timeout=timeout, progress=lambda: sum(job.block.done() for job in pending))
    try:
        for job in _jobs(source, chunks):
            pending.append(job)
            jobs.put(job)
            if len(pending) > 2 * num_workers:  # for each worker one chunk to encode and one to continue with
                yield pending.popleft().result(watch)
        while pending:
            yield pending.popleft().result(watch)
    finally:
        for _ in workers:
            jobs.put(None)
        stop_workers(workers)


@lru_cache(1)
def _load_encoder(encoding: EncodingConfig, tokenizer: str) -> Encoder:
    """Cached, because loading a tokenizer takes longer than encoding a small file.

    The fingerprint is an argument: the files of a tokenizer may change.
    """
    return Encoder(encoding)


@dataclass(eq=False)
class _Job:
    """A chunk, its block once it is encoded, and the worker that encodes it."""

    rows: str  # where they are, for messages
    chunk: Chunk
    bytes_read: int
    block: Future[EncodedBlock] = field(default_factory=Future)
    worker: Worker | None = None

    def result(self, watch: Watch) -> tuple[EncodedBlock, int]:
        """Wait for the block. Raises UserError if nothing moves."""

        def is_done(seconds: float) -> bool:
            return bool(concurrent.futures.wait([self.block], seconds).done)

        def is_begun(seconds: float) -> bool:
            return is_done(seconds) or (self.worker is not None and self.worker.ready.is_set())

        watch.wait_for(is_begun, self._stuck_error, START_SECONDS)
        watch.wait_for(is_done, self._stuck_error)
        return self.block.result(), self.bytes_read

    def encode(self, worker: Worker) -> None:
        """Body of the thread of a worker: exchange the chunk for its block, or the exception to raise."""
        self.worker = worker
        try:
            if not worker.ready.is_set():
                worker.connection.recv()
                worker.ready.set()
            worker.connection.send(self.chunk)
            reply = worker.connection.recv()
            if isinstance(reply, OSError):  # not to be taken for one of the cache
                fix = "raise the limits of this shell (ulimit -n), or end other processes"
                reply = UserError(f"{worker.name} failed: {reply}", self.rows, fix)
        except (OSError, EOFError):
            fix = "read its last output above; if the machine is out of memory, run fewer other processes"
            reply = UserError(f"{worker.name} {worker.describe_end()}", self.rows, fix)
        except Exception as error:  # e.g. a row that cannot be pickled
            reply = error
        if isinstance(reply, Exception):
            self.block.set_exception(reply)
        else:
            self.block.set_result(reply)

    def _stuck_error(self, seconds: float) -> UserError:
        name, state, done = "the tokenizing processes", "", "not ready after"
        if self.worker is not None:
            name, state = self.worker.name, describe_state(self.worker.process.pid or 0)
            done = "no rows encoded for" if self.worker.ready.is_set() else done
        message = f"{name} stuck: {done} {seconds:.1f} s (data.worker_timeout){state}"
        fix = "look at these rows and at the regular expressions of the tokenizer; or a larger data.worker_timeout"
        return UserError(message, self.rows, fix)


def _jobs(source: Source, chunks: Iterable[tuple[Chunk, int]]) -> Iterator[_Job]:
    try:
        for chunk, bytes_read in chunks:
            yield _Job(_describe_rows(source, chunk), chunk, bytes_read)
    except Exception as error:  # raised in its turn, after the results of the chunks before it
        failed = _Job(str(source.path), [], 0)
        failed.block.set_exception(error)
        yield failed


def _describe_rows(source: Source, chunk: Chunk) -> str:
    if not chunk:
        return str(source.path)
    first, last = chunk[0][0], chunk[-1][0]
    return source.where(first) + (f" to {last}" if last > first else "")


def _encode_chunks(source: Source, encoding: EncodingConfig, connection: Connection) -> None:
    """Body of a worker: send None when it is ready, then for each chunk its block, or the exception it raises."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process: there is a process per core
    import_inherited_plugins()  # one of them may register the row schema
    encoder = Encoder(encoding)
    connection.send(None)
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION)
    while True:
        chunk = connection.recv()
        try:
            reply: EncodedBlock | Exception = encoder.encode(source, chunk)
        except Exception as error:  # e.g. a row that cannot be pickled
            reply = error
        connection.send(reply)
