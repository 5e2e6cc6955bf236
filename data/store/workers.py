"""Encodes the rows of a file on several cores: blocks in file order, few of them in memory at a time.

Not a multiprocessing pool: its spawned processes import the main module again, which may be a training command with torch or a
notebook, and they survive a killed parent. These processes import this module only, and end when the pipe they read from closes.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from queue import SimpleQueue
from typing import IO, Any

from common.errors import UserError
from common.plugins import import_inherited_plugins
from data.sources.files import Source
from data.tokenize.block import EncodedBlock
from data.tokenize.encoder import Encoder
from data.types import EncodingConfig

BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
WORKER_ENV = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # one thread per process: there is a process per core
Chunk = list[tuple[int, Any]]  # (position in the source, item)


def encode_in_parallel(
    source: Source, encoding: EncodingConfig, tokenizer: str, chunks: Iterable[tuple[Chunk, int]], num_workers: int
) -> Iterator[tuple[EncodedBlock, int]]:
    """Yield (block, bytes read) for each (chunk, bytes read). Of several errors, of the chunks or of an encoder, the first in file order is raised.

    One worker is the calling process. `tokenizer` is the fingerprint of the tokenizer in `encoding`.
    """
    if num_workers == 1:
        encoder = _load_encoder(encoding, tokenizer)
        for chunk, bytes_read in chunks:
            yield encoder.encode(source, chunk), bytes_read
        return
    pool = _Pool(source, encoding, num_workers)
    pending: deque[tuple[Future[EncodedBlock], int]] = deque()
    try:
        for submitted in _submit(pool, chunks):
            pending.append(submitted)
            if len(pending) > 2 * num_workers:  # for each worker one chunk to encode and one to continue with
                future, bytes_read = pending.popleft()
                yield future.result(), bytes_read
        for future, bytes_read in pending:
            yield future.result(), bytes_read
    finally:
        pool.close()


@lru_cache(1)
def _load_encoder(encoding: EncodingConfig, tokenizer: str) -> Encoder:
    """Cached, because loading a tokenizer takes longer than encoding a small file. The fingerprint is an argument: the files of a tokenizer may change."""
    return Encoder(encoding)


def _submit(pool: _Pool, chunks: Iterable[tuple[Chunk, int]]) -> Iterator[tuple[Future[EncodedBlock], int]]:
    try:
        for chunk, bytes_read in chunks:
            yield pool.submit(chunk), bytes_read
    except Exception as error:  # raised in its turn, after the results of the chunks before it
        failed: Future[EncodedBlock] = Future()
        failed.set_exception(error)
        yield failed, 0


class _Pool:
    """Worker processes, and one thread for each that waits for its replies."""

    def __init__(self, source: Source, encoding: EncodingConfig, num_workers: int) -> None:
        self.source = source
        self._threads = ThreadPoolExecutor(num_workers)
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        # Workers inherit the blocked signals: Ctrl-C goes to the whole process group, and the parent handles it.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            self._processes = [_start_worker(encoding, source) for _ in range(num_workers)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        for process in self._processes:
            self._idle.put(process)

    def submit(self, chunk: Chunk) -> Future[EncodedBlock]:
        return self._threads.submit(self._encode, chunk)

    def _encode(self, chunk: Chunk) -> EncodedBlock:
        process = self._idle.get()
        try:
            _send(_pipe(process.stdin), chunk)
            reply = pickle.load(_pipe(process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            fix = "read its last output above; if the machine is out of memory, run fewer other processes"
            raise UserError(f"a tokenizing process ended early, exit code {process.poll()}", str(self.source.path), fix) from error
        finally:
            self._idle.put(process)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            _pipe(process.stdout).close()
            with suppress(BrokenPipeError):  # flushing the rest of a chunk that the worker did not read
                _pipe(process.stdin).close()


def _start_worker(encoding: EncodingConfig, source: Source) -> subprocess.Popen[bytes]:
    env = {**os.environ, **WORKER_ENV, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    # -P: modules in the current directory must not shadow the project's.
    process = subprocess.Popen([sys.executable, "-P", "-m", "data.store.workers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    with suppress(BrokenPipeError):  # it has died already: the first request to it raises the error
        _send(_pipe(process.stdin), (encoding, source))
    return process


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None, "the process was started with pipes"
    return end


def _send(pipe: IO[bytes], message: object) -> None:
    pickle.dump(message, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def _worker_main() -> None:
    """Body of a worker process: reply to each chunk with its block, or with the exception it raises."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything that prints must not garble the replies
    try:
        import_inherited_plugins()  # one of them may register the row schema
        encoding, source = pickle.load(sys.stdin.buffer)
        encoder = Encoder(encoding)
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
    _worker_main()
