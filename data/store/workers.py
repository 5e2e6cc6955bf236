"""Encodes the rows of a file on several cores: blocks in file order, few of them in memory at a time.

Not a multiprocessing pool: its spawned processes import the main module again, which may be a training command with
torch or a notebook, and they survive a killed parent. These processes import this module only, and end when the pipe
they read from closes, or with the parent.
"""

from __future__ import annotations

import concurrent.futures
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import IO, Any

from common.errors import UserError
from common.registry import import_inherited_plugins
from data.background import START_SECONDS, Watch, describe_exit, describe_state, kill_with_parent
from data.sources.files import Source
from data.tokenize.block import EncodedBlock
from data.tokenize.encoder import Encoder
from data.types import EncodingConfig

BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# one thread per process: there is a process per core
WORKER_ENV = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# of Python's garbage collector in a worker: it looks for cycles, and rows have none
NEW_OBJECTS_PER_COLLECTION = 50_000
EXIT_SECONDS = 1.0  # for a process that was killed, or has closed its pipe, to be gone
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
    pool = _Pool(source, encoding, num_workers)
    watch = Watch(timeout=timeout, progress=lambda: pool.num_encoded)
    pending: deque[tuple[_Job, int]] = deque()
    try:
        for submitted in _submit(pool, chunks):
            pending.append(submitted)
            if len(pending) > 2 * num_workers:  # for each worker one chunk to encode and one to continue with
                job, bytes_read = pending.popleft()
                yield pool.result(job, watch), bytes_read
        for job, bytes_read in pending:
            yield pool.result(job, watch), bytes_read
    finally:
        pool.close()


@lru_cache(1)
def _load_encoder(encoding: EncodingConfig, tokenizer: str) -> Encoder:
    """Cached, because loading a tokenizer takes longer than encoding a small file.

    The fingerprint is an argument: the files of a tokenizer may change.
    """
    return Encoder(encoding)


def _submit(pool: _Pool, chunks: Iterable[tuple[Chunk, int]]) -> Iterator[tuple[_Job, int]]:
    try:
        for chunk, bytes_read in chunks:
            yield pool.submit(chunk), bytes_read
    except Exception as error:  # raised in its turn, after the results of the chunks before it
        failed = _Job([])
        failed.future.set_exception(error)
        yield failed, 0


@dataclass
class _Job:
    """A chunk, its block once it is encoded, and the process that encodes it."""

    chunk: Chunk
    future: Future[EncodedBlock] = field(default_factory=Future)
    process: subprocess.Popen[bytes] | None = None
    begun: threading.Event = field(default_factory=threading.Event)  # its process is ready, or has ended


class _Pool:
    """Worker processes, and one thread for each that waits for its replies."""

    def __init__(self, source: Source, encoding: EncodingConfig, num_workers: int) -> None:
        self.source = source
        self.num_encoded = 0  # chunks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ready: set[subprocess.Popen[bytes]] = set()
        self._threads = ThreadPoolExecutor(num_workers)
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        # Workers inherit the blocked signals: Ctrl-C goes to the whole process group, and the parent handles it.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            for _ in range(num_workers):
                self._processes.append(_start_worker(encoding, source))
        except OSError as error:
            self.close()
            message = f"{num_workers} tokenizing processes cannot be started: {error.strerror or error}"
            raise UserError(
                message,
                str(source.path),
                "raise the limits of this shell (ulimit -n, ulimit -u), or end other processes",
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        for process in self._processes:
            self._idle.put(process)

    def submit(self, chunk: Chunk) -> _Job:
        job = _Job(chunk)
        self._threads.submit(self._run, job)
        return job

    def result(self, job: _Job, watch: Watch) -> EncodedBlock:
        """Wait for the block of a job. Raises UserError if nothing moves."""
        stuck = partial(self._stuck_error, job)
        watch.wait_for(lambda seconds: job.future.done() or job.begun.wait(seconds), stuck, START_SECONDS)
        watch.wait_for(lambda seconds: bool(concurrent.futures.wait([job.future], seconds).done), stuck)
        return job.future.result()

    def _run(self, job: _Job) -> None:
        try:
            job.future.set_result(self._encode(job))
        except BaseException as error:  # raised where the block is requested
            job.future.set_exception(error)

    def _encode(self, job: _Job) -> EncodedBlock:
        process = job.process = self._idle.get()
        try:
            _send(_pipe(process.stdin), job.chunk)
            if process not in self._ready:
                pickle.load(_pipe(process.stdout))
                self._ready.add(process)
            job.begun.set()
            reply = pickle.load(_pipe(process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
            fix = "read its last output above; if the machine is out of memory, run fewer other processes"
            raise UserError(f"{self._name(process)} {describe_exit(process.poll())}", self._rows(job), fix) from error
        finally:
            job.begun.set()
            self._idle.put(process)
        self.num_encoded += 1
        if isinstance(reply, OSError):  # not to be taken for one of the cache
            fix = "raise the limits of this shell (ulimit -n), or end other processes"
            raise UserError(f"{self._name(process)} failed: {reply}", self._rows(job), fix) from reply
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _stuck_error(self, job: _Job, seconds: float) -> UserError:
        worker = "the tokenizing processes" if job.process is None else self._name(job.process)
        state = "" if job.process is None else describe_state(job.process.pid)
        done = "no rows encoded for" if job.begun.is_set() else "not ready after"
        message = f"{worker} stuck: {done} {seconds:.1f} s (data.worker_timeout){state}"
        return UserError(
            message,
            self._rows(job),
            "look at these rows and at the regular expressions of the tokenizer; or a larger data.worker_timeout",
        )

    def _name(self, process: subprocess.Popen[bytes]) -> str:
        return f"tokenizing process {self._processes.index(process)} of {len(self._processes)} (pid {process.pid})"

    def _rows(self, job: _Job) -> str:
        if not job.chunk:
            return str(self.source.path)
        first, last = (job.chunk[end][0] for end in (0, -1))
        return self.source.where(first) + (f" to {last}" if last > first else "")

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # only while it waits in the kernel for a disk
                process.wait(EXIT_SECONDS)
            _pipe(process.stdout).close()
            with suppress(BrokenPipeError):  # flushing the rest of a chunk that the worker did not read
                _pipe(process.stdin).close()


def _start_worker(encoding: EncodingConfig, source: Source) -> subprocess.Popen[bytes]:
    env = {**os.environ, **WORKER_ENV, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    # -P: modules in the current directory must not shadow the project's.
    command = [sys.executable, "-P", "-m", "data.store.workers", str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    with suppress(BrokenPipeError):  # it has died already: the first request to it raises the error
        _send(_pipe(process.stdin), (encoding, source))
    return process


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None, "the process was started with pipes"
    return end


def _send(pipe: IO[bytes], message: object) -> None:
    pickle.dump(message, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def _worker_main(parent: int) -> None:
    """Body of a worker of process `parent`: reply once when it is ready, then to each chunk with its block, or with the
    exception it raises.
    """
    kill_with_parent(parent)  # which may have died during the imports
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything that prints must not garble the replies
    try:
        import_inherited_plugins()  # one of them may register the row schema
        encoding, source = pickle.load(sys.stdin.buffer)
        encoder = Encoder(encoding)
        _send(replies, None)  # ready
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS_PER_COLLECTION)
        while True:
            _send(replies, _encode_or_error(encoder, source, pickle.load(sys.stdin.buffer)))
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        os._exit(0)  # the parent has finished or died


def _encode_or_error(encoder: Encoder, source: Source, chunk: Chunk) -> EncodedBlock | Exception:
    try:
        return encoder.encode(source, chunk)
    except Exception as error:
        return error


if __name__ == "__main__":
    _worker_main(int(sys.argv[1]))
