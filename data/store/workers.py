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
    pool = _Pool(source, encoding, num_workers, timeout)
    pending: deque[_Job] = deque()
    try:
        for job in _jobs(chunks):
            pending.append(job)
            pool.jobs.put(job)
            if len(pending) > 2 * num_workers:  # for each worker one chunk to encode and one to continue with
                yield pool.result(pending.popleft())
        while pending:
            yield pool.result(pending.popleft())
    finally:
        pool.close()


@lru_cache(1)
def _load_encoder(encoding: EncodingConfig, tokenizer: str) -> Encoder:
    """Cached, because loading a tokenizer takes longer than encoding a small file.

    The fingerprint is an argument: the files of a tokenizer may change.
    """
    return Encoder(encoding)


@dataclass
class _Job:
    """A chunk, its block once it is encoded, and the worker that encodes it."""

    chunk: Chunk
    bytes_read: int
    block: Future[EncodedBlock] = field(default_factory=Future)
    worker: Worker | None = None


def _jobs(chunks: Iterable[tuple[Chunk, int]]) -> Iterator[_Job]:
    try:
        for chunk, bytes_read in chunks:
            yield _Job(chunk, bytes_read)
    except Exception as error:  # raised in its turn, after the results of the chunks before it
        failed = _Job([], 0)
        failed.block.set_exception(error)
        yield failed


class _Pool:
    """Worker processes that encode jobs; each takes the next one when it is idle."""

    def __init__(self, source: Source, encoding: EncodingConfig, num_workers: int, timeout: float) -> None:
        self.source = source
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None: no more
        self._num_encoded = 0  # chunks
        self._watch = Watch(timeout=timeout, progress=lambda: self._num_encoded)
        bodies = [partial(_encode_chunks, source, encoding)] * num_workers
        try:
            self._workers = start_workers("tokenizing process", bodies, self._exchange)
        except OSError as error:
            message = f"{num_workers} tokenizing processes cannot be started: {error.strerror or error}"
            fix = "raise the limits of this shell (ulimit -n, ulimit -u), or end other processes"
            raise UserError(message, source.path, fix) from error

    def result(self, job: _Job) -> tuple[EncodedBlock, int]:
        """Wait for the block of a job. Raises UserError if nothing moves."""

        def is_done(seconds: float) -> bool:
            return bool(concurrent.futures.wait([job.block], seconds).done)

        def is_begun(seconds: float) -> bool:
            return is_done(seconds) or (job.worker is not None and job.worker.ready.is_set())

        stuck = partial(self._stuck_error, job)
        self._watch.wait_for(is_begun, stuck, START_SECONDS)
        self._watch.wait_for(is_done, stuck)
        return job.block.result(), job.bytes_read

    def _exchange(self, worker: Worker) -> None:
        """Give one worker a job after the other."""
        while (job := self.jobs.get()) is not None:
            if job.block.done():  # an error of the chunks
                continue
            job.worker = worker
            try:
                job.block.set_result(self._encode(job, worker))
            except BaseException as error:  # raised where the block is requested
                job.block.set_exception(error)

    def _encode(self, job: _Job, worker: Worker) -> EncodedBlock:
        try:
            if not worker.ready.is_set():
                worker.connection.recv()
                worker.ready.set()
            worker.connection.send(job.chunk)
            reply = worker.connection.recv()
        except (OSError, EOFError) as error:
            fix = "read its last output above; if the machine is out of memory, run fewer other processes"
            raise UserError(f"{worker.name} {worker.describe_end()}", self._rows(job), fix) from error
        self._num_encoded += 1
        if isinstance(reply, OSError):  # not to be taken for one of the cache
            fix = "raise the limits of this shell (ulimit -n), or end other processes"
            raise UserError(f"{worker.name} failed: {reply}", self._rows(job), fix) from reply
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _stuck_error(self, job: _Job, seconds: float) -> UserError:
        name, state, done = "the tokenizing processes", "", "not ready after"
        if job.worker is not None:
            name, state = job.worker.name, describe_state(job.worker.process.pid or 0)
            done = "no rows encoded for" if job.worker.ready.is_set() else done
        message = f"{name} stuck: {done} {seconds:.1f} s (data.worker_timeout){state}"
        fix = "look at these rows and at the regular expressions of the tokenizer; or a larger data.worker_timeout"
        return UserError(message, self._rows(job), fix)

    def _rows(self, job: _Job) -> str:
        if not job.chunk:
            return str(self.source.path)
        first, last = (job.chunk[end][0] for end in (0, -1))
        return self.source.where(first) + (f" to {last}" if last > first else "")

    def close(self) -> None:
        for _ in self._workers:
            self.jobs.put(None)
        stop_workers(self._workers)


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
        except Exception as error:
            reply = error
        connection.send(reply)
