"""A file's rows into blocks of ids on several cores: results in the order of the file, few of them in memory at a time.

Not multiprocessing's pools: a process that they spawn imports the main module again, which may be a training command with
torch or a notebook, and it stays behind when its parent is killed. These import `data.rows`, and end with the pipe they read from.
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
from typing import IO, Any, TypeVar

from common.errors import UserError
from data.sources.files import Source
from data.store.block import EncodedBlock
from data.tokenize.encoder import Encoder
from data.types import EncodingConfig

MAX_PENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
IN_PROCESS = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process is one thread: there is one for each core
Chunk = list[tuple[int, Any]]
T = TypeVar("T")


def encode_in_parallel(
    source: Source, recipe: EncodingConfig, tokenizer: str, chunks: Iterable[tuple[Chunk, T]], workers: int
) -> Iterator[tuple[EncodedBlock, T]]:
    """The block of each chunk, with what stands beside the chunk. Of several errors the first in the order of the file is raised,
    be it the chunks' own or an encoder's. One worker is this process itself. `tokenizer` is the fingerprint of the recipe's."""
    if workers == 1:
        encoder = _load_encoder(recipe, tokenizer)
        for chunk, beside in chunks:
            yield encoder.encode(source, chunk), beside
        return
    pool = _Pool(source, recipe, workers)
    ahead: deque[tuple[Future[EncodedBlock], T | None]] = deque()
    try:
        for block in _submit(pool, chunks):
            ahead.append(block)
            if len(ahead) > 2 * workers:  # one being worked on and one to go on with for each
                yield _first_result(ahead)
        while ahead:
            yield _first_result(ahead)
    finally:
        pool.close()


@lru_cache(1)
def _load_encoder(recipe: EncodingConfig, tokenizer: str) -> Encoder:
    """The last one stays: loading its tokenizer takes longer than most files of a folder of many. The folder's files may change meanwhile."""
    return Encoder(recipe)


def _submit(pool: _Pool, chunks: Iterable[tuple[Chunk, T]]) -> Iterator[tuple[Future[EncodedBlock], T | None]]:
    try:
        for chunk, beside in chunks:
            yield pool.submit(chunk), beside
    except Exception as error:  # takes its turn behind the chunks that were read before it
        failed: Future[EncodedBlock] = Future()
        failed.set_exception(error)
        yield failed, None


def _first_result(ahead: deque[tuple[Future[EncodedBlock], T | None]]) -> tuple[EncodedBlock, T]:
    future, beside = ahead.popleft()
    block = future.result()
    assert beside is not None, "only what failed has nothing beside it"
    return block, beside


class _Pool:
    """Processes, and a thread for each that waits for its answers."""

    def __init__(self, source: Source, recipe: EncodingConfig, workers: int) -> None:
        self.source = source
        self._threads = ThreadPoolExecutor(workers)
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        # What is held here stays held in them, from their first moment on: Ctrl-C goes to the whole group, and is the parent's to answer.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, MAX_PENDING)
        try:
            self._processes = [_start(recipe, source) for _ in range(workers)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for process in self._processes:
            self._idle.put(process)

    def submit(self, chunk: Chunk) -> Future[EncodedBlock]:
        return self._threads.submit(self._ask, chunk)

    def _ask(self, chunk: Chunk) -> EncodedBlock:
        process = self._idle.get()
        try:
            _write_frame(_pipe(process.stdin), chunk)
            answer = pickle.load(_pipe(process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            fix = "look above for its last words; if the machine is out of memory, start with less beside it"
            raise UserError(f"a process that tokenises ended before its work was done ({process.poll()})", str(self.source.path), fix) from error
        finally:
            self._idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """At once, whatever is being worked on."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            _pipe(process.stdout).close()
            try:
                _pipe(process.stdin).close()
            except BrokenPipeError:
                pass  # the rest of a chunk that it did not take


def _start(recipe: EncodingConfig, source: Source) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **IN_PROCESS, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    # -P: no module of the folder where somebody stands comes before ours.
    process = subprocess.Popen([sys.executable, "-P", "-m", "data.store.workers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    with suppress(BrokenPipeError):  # dead already: whoever asks it first says so
        _write_frame(_pipe(process.stdin), (recipe, source))
    return process


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None, "the process was started with pipes"
    return end


def _write_frame(pipe: IO[bytes], what: object) -> None:
    pickle.dump(what, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def _worker_main() -> None:
    """What a process does: answer each chunk with its block, or with the error that it raises."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whoever prints must not garble the answers
    try:
        recipe, source = pickle.load(sys.stdin.buffer)
        encoder = Encoder(recipe)
        while True:
            _write_frame(answers, _read_frame(encoder, source, pickle.load(sys.stdin.buffer)))
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        os._exit(0)  # the parent is done, or dead


def _read_frame(encoder: Encoder, source: Source, chunk: Chunk) -> EncodedBlock | Exception:
    try:
        return encoder.encode(source, chunk)
    except Exception as error:
        return error


if __name__ == "__main__":
    _worker_main()
