"""Token stores of data files: reuses the one in the cache if it matches, else builds it.

Safe for concurrent ranks and runs.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import inspect
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from common.errors import FULL_DISK_ERRORS, MORE_FILES, UserError, print_note
from common.file_lock import FileLock, lock_holder
from common.filesystem import atomic_path, read_json_object, remove_tree, sha256_of_json
from common.paths import workspace_dir
from data.schemas.registry import SCHEMAS
from data.sources.detect import COMPRESSED
from data.sources.files import Source
from data.store.reader import STORE_FORMAT, TokenStore
from data.store.workers import Chunk, encode_in_parallel
from data.store.writer import write_store
from data.tokenize.chat_template import template_messages
from data.tokenize.tokenizer import Tokenizer
from data.types import EncodingConfig, sequences_per_row

MAX_CHUNK_ROWS, MAX_CHUNK_BYTES = 512, 1 << 20  # a chunk ends at the first limit it reaches
# of .cache, whatever the umask: compiled programs are in it, too, and are not used where a group may write
NOT_SHARED = 0o755
MIN_BYTES_PER_WORKER = 2 << 20  # bytes of a file that one process encodes in the time that another one needs to start
COMPRESSION_RATIO = 4  # estimate
# Code and libraries that decide the ids of a row: after a change of any of them, files are tokenized again.
FINGERPRINTED_CODE = ("types.py", "sources/*.py", "schemas/*.py", "tokenize/*.py")
FINGERPRINTED_LIBRARIES = ("jinja2", "tokenizers")
# ns; a file that changed less than this ago may change again with the same time stamps
MTIME_GRANULARITY = 2_000_000_000
CACHE_ENTRY = re.compile(r"(\.tmp-)?[0-9a-f]{64}[\w.@-]*|contents|compiled")  # names in the folder of token stores
REPORT_EVERY = 0.1  # seconds
LOCK_POLL_SECONDS = 0.1
NOTE_WAIT_AFTER = 3.0  # seconds for which a process waits for another one without saying so
ProgressCallback = Callable[[int, int, int], None]  # (bytes of the file done, its size, rows read)
T = TypeVar("T")


def no_progress(done: int, total: int, rows: int) -> None:
    pass


def load_or_build(
    source: Source,
    encoding: EncodingConfig,
    tokenizer: Tokenizer,
    cache: Path,
    progress: ProgressCallback = no_progress,
    num_workers: int | None = None,
    worker_timeout: float = 0.0,
) -> TokenStore:
    """Return the store of `source` encoded as `encoding` says.

    A missing one is built in `cache`, by `num_workers` processes (None: by size).

    `tokenizer` is the one that `encoding` names. `progress` may raise to stop. `worker_timeout`: as in
    `encode_in_parallel`. Raises BadRowError for the first bad row if encoding.on_bad_row is error, UserError if the
    file changes meanwhile or the cache cannot be written.
    """
    with with_cache_hint(cache):
        cache.mkdir(NOT_SHARED if cache == workspace_dir() / ".cache" else 0o777, parents=True, exist_ok=True)
        content = file_sha256_cached(source.path, cache)
    parts = [
        content,
        *source.reading,
        encoding.key(tokenizer.fingerprint),
        STORE_FORMAT,
        encoding_code_fingerprint(encoding.schema),
    ]
    path = cache / sha256_of_json(parts)
    metadata: dict[str, Any] = {
        "name": source.name,
        "content": content,
        "file_format": source.file_format,
        "encoding": {**dataclasses.asdict(encoding), "tokenizer": str(encoding.tokenizer)},
        "tokenizer": tokenizer.fingerprint,
    }
    largest_id = max(tokenizer.vocab_size - 1, *tokenizer.control_ids.values())

    def build() -> None:
        # kept with the tokens: a run whose rows are in the cache renders no template
        metadata["template"] = template_messages(tokenizer, encoding.data_format)
        workers = default_workers(source) if num_workers is None else num_workers
        with write_store(path, sequences_per_row(encoding.data_format), largest_id, metadata) as writer:
            last_report = time.monotonic()
            for block, bytes_read in encode_in_parallel(
                source, encoding, tokenizer.fingerprint, _source_chunks(source), workers, worker_timeout
            ):
                writer.append(block)
                if time.monotonic() - last_report >= REPORT_EVERY:
                    last_report = time.monotonic()
                    progress(bytes_read, source.size, writer.stats.read)
            if file_sha256_cached(source.path, cache) != content:
                raise _changed_error(source.path)
        progress(source.size, source.size, writer.stats.read)

    store = open_or_build(path, lambda: TokenStore.open(path), build)
    # A file with the same bytes, and the tokenizer, may have had another name when the store was built.
    stored = store.metadata
    store.stats.first_seen = {
        reason: where.replace(stored["name"], source.name, 1) for reason, where in store.stats.first_seen.items()
    }
    stored["template"] = {
        kind: [text.replace(stored["encoding"]["tokenizer"], str(tokenizer.folder)) for text in texts]
        for kind, texts in stored["template"].items()
    }
    return store


def open_or_build(
    path: Path, open_existing: Callable[[], T | None], build: Callable[[], None], content: str = "tokens"
) -> T:
    """Return what `open_existing` returns; if that is None, `build` it first, in one process at a time.

    Files X@1, X@2, ... share the lock of X.
    """
    with with_cache_hint(path.parent, content):
        if (existing := open_existing()) is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _wait_for_lock(_lock_path(path), content)
            try:
                if (existing := open_existing()) is None:  # another process may have built it during the wait
                    _remove_stale_builds(path)
                    build()
                    existing = open_existing()
            finally:
                lock.release(delete=existing is None)  # e.g. a bad row: a refused file leaves nothing in the cache
    assert existing is not None, f"{path} is not readable after it was built"
    return existing


def _wait_for_lock(path: Path, content: str) -> FileLock:
    """Lock `path` once its holder, which builds the same, has finished or died; say who it is if that takes long."""
    waited = 0.0
    while True:
        try:
            return FileLock.acquire(path)
        except BlockingIOError:
            if waited <= NOTE_WAIT_AFTER < waited + LOCK_POLL_SECONDS:
                holder = lock_holder(path)
                print_note(
                    f"waiting for {f'process {holder}' if holder else 'another process'}, which stores {content} in {path.parent}"
                )
            time.sleep(LOCK_POLL_SECONDS)
            waited += LOCK_POLL_SECONDS


def is_own_cache(folder: Path) -> bool:
    """Return whether only this user can have written to the folder, and nothing but what this module writes is in it."""
    try:
        status = folder.stat()
        is_private = (
            stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWOTH
        )
        return is_private and all(
            CACHE_ENTRY.fullmatch(name) and not (folder / name).is_symlink() for name in os.listdir(folder)
        )
    except OSError:
        return False


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name.partition('@')[0]}.lock")


def _remove_stale_builds(path: Path) -> None:
    """Remove temporary files of killed processes: those whose lock is free, and those of `path`, whose lock the caller
    holds.
    """
    for temp in path.parent.glob(".tmp-*"):
        lock = _lock_path(path.with_name(temp.name.removeprefix(".tmp-").rsplit("-", 2)[0]))
        with suppress(OSError):  # locked, already removed, or no permission
            if lock == _lock_path(path):
                remove_tree(temp)
            else:
                with FileLock.acquire(lock):
                    remove_tree(temp)


def default_workers(source: Source) -> int:
    compressed = source.file_format == "parquet" or source.path.suffix.lower() in COMPRESSED
    return max(
        1,
        min(
            len(os.sched_getaffinity(0)), source.size * (COMPRESSION_RATIO if compressed else 1) // MIN_BYTES_PER_WORKER
        ),
    )


def fingerprinted_files(schema: str) -> list[Path]:
    """Return the files of code that encode rows, with the module of the row schema, which may be a plugin."""
    own = [file for pattern in FINGERPRINTED_CODE for file in sorted(Path(__file__).parents[1].glob(pattern))]
    return [*own, Path(inspect.getfile(SCHEMAS[schema].parse))]


@lru_cache
def encoding_code_fingerprint(schema: str) -> str:
    """Return the sha256 (hex) of `fingerprinted_files` and of the libraries' versions."""
    digest = hashlib.sha256(json.dumps([[name, version(name)] for name in FINGERPRINTED_LIBRARIES]).encode())
    for file in fingerprinted_files(schema):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _source_chunks(source: Source) -> Iterator[tuple[Chunk, int]]:
    """Yield (items, bytes of the file read so far).

    The chunks depend on the items alone, not on the number of workers.
    """
    chunk: Chunk = []
    size = bytes_read = 0

    def on_progress(done: int) -> None:
        nonlocal bytes_read
        bytes_read = done

    try:
        for item in source.items(on_progress):
            chunk.append(item)
            size += _size_of(item[1])
            if len(chunk) == MAX_CHUNK_ROWS or size >= MAX_CHUNK_BYTES:
                yield chunk, bytes_read
                chunk, size = [], 0
    except Exception as error:  # raised after the items before it are encoded: one of them may be a bad row
        yield chunk, bytes_read
        if isinstance(error, OSError):
            fix = "check the file and its disk"
            raise UserError(f"the file cannot be read: {error.strerror or error}", source.path, fix) from error
        raise
    yield chunk, bytes_read


def _size_of(raw: object) -> int:
    """Estimate the bytes of an item, parsed or not."""
    if isinstance(raw, (bytes, str)):
        return len(raw)
    parts = raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ()
    return 8 + sum(map(_size_of, parts))


def file_sha256_cached(path: Path, cache: Path) -> str:
    """Return the checksum of a data file, sha256 (hex); its bytes are read once for the same size, times and inode."""
    real = path.resolve()
    record = cache / "contents" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()}.json"
    started, signature = time.time_ns(), _file_signature(real)
    known = read_json_object(record)
    if known.get("signature") == signature and "sha256" in known:
        return known["sha256"]
    with open(real, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    if _file_signature(real) != signature:
        raise _changed_error(path)
    if started - max(signature[1:3]) > MTIME_GRANULARITY:
        record.parent.mkdir(exist_ok=True)
        with atomic_path(record) as temp:  # not synced: a damaged record is ignored
            temp.write_text(
                json.dumps({"path": str(real), "signature": signature, "sha256": content}), encoding="utf-8"
            )
    return content


def _changed_error(path: Path) -> UserError:
    return UserError("the file changed while it was read", path, "start again when no process writes to it")


def _file_signature(path: Path) -> list[int]:
    """Return the attributes of a file that change with its content."""
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


@contextmanager
def with_cache_hint(cache: Path, content: str = "tokens") -> Iterator[None]:
    """Turn an OSError into a UserError that names data.cache."""
    try:
        yield
    except OSError as error:
        fix = "use another folder: data.cache=FOLDER"
        if error.errno in FULL_DISK_ERRORS:
            fix = f"free disk space, or {fix}"
        elif error.errno == errno.EMFILE:
            fix = MORE_FILES
        raise UserError(f"{content} cannot be stored: {error.strerror or error}", f"data.cache={cache}", fix) from error
