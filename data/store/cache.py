"""A file's token store: the one that is there where it fits, else a new one. Safe when several ranks or runs ask at once."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from common.errors import UserError
from data.sources.files import COMPRESSED, Source
from data.store.layout import STORE_FORMAT
from data.store.reader import TokenStore
from data.store.workers import Chunk, encode_in_parallel
from data.store.writer import StoreWriter, remove_store
from data.tokenize.tokenizer import Tokenizer
from data.types import EncodingConfig

CHUNK_ROWS, CHUNK_BYTES = 512, 1 << 20  # whichever is reached first
MIN_BYTES_PER_WORKER = 2 << 20  # bytes of a file: it encodes them in the time it takes to start
COMPRESSION_RATIO = 4  # times the size on disk, about
# What decides which ids a row becomes: a change in these files, or another version of these libraries, and it is tokenised again.
FINGERPRINTED_CODE = (
    "schemas/augment", "schemas/errors", "schemas/messages", "schemas/schemas", "store/block", "tokenize/chat_template", "tokenize/encoder",
    "tokenize/jinja_sandbox", "tokenize/tokenizer", "sources/byte_stream", "sources/files", "sources/json_text", "sources/tables",
)  # fmt: skip
FINGERPRINTED_LIBRARIES = ("jinja2", "tokenizers")
MTIME_GRANULARITY = 2_000_000_000  # ns after a file's last change from which on its time stamps would show another one
REPORT_EVERY = 0.1  # seconds
ProgressCallback = Callable[[int, int, int], None]  # bytes of the file done, bytes in all, rows read


def no_progress(done: int, total: int, rows: int) -> None:
    pass


def load_or_build(
    source: Source, recipe: EncodingConfig, tokenizer: Tokenizer, cache: Path, progress: ProgressCallback = no_progress, workers: int | None = None
) -> TokenStore:
    """The store of what `recipe` makes of `source`, in `cache`; built in `workers` processes (None: as many as are worth it) where it is missing.

    `tokenizer` is that of the recipe, already loaded. `progress` may raise, to stop building. Raises BadRow for the first bad row
    where the recipe says so, and ValueError where the file changes meanwhile or the cache cannot be written.
    """
    with with_cache_hint(cache):
        cache.mkdir(parents=True, exist_ok=True)
        content = file_sha256_cached(source.path, cache)
    recipe_key = recipe.key(tokenizer.fingerprint)
    key = hashlib.sha256(json.dumps([content, source.kind, recipe_key, STORE_FORMAT, code_fingerprint()]).encode()).hexdigest()
    store = _open_existing(cache / key)
    if store is None:
        with locked_build(cache / f"{key}.lock"):
            store = _open_existing(cache / key)  # somebody else's, while we waited
            if store is None:
                remove_stale_builds(cache, cache / key)
                facts = {
                    "name": source.name,
                    "content": content,
                    "kind": source.kind,
                    "recipe": {**dataclasses.asdict(recipe), "tokenizer": str(recipe.tokenizer)},
                    "tokenizer": tokenizer.fingerprint,
                }
                _build_store(cache / key, source, recipe, tokenizer, facts, progress, _count_workers(source) if workers is None else workers)
                store = _open_existing(cache / key)
                assert store is not None, f"{cache / key} was written a moment ago"
    # The same bytes may have stood in another file when the store was built.
    store.tally.first = {why: where.replace(store.facts["name"], source.name, 1) for why, where in store.tally.first.items()}
    return store


def _open_existing(folder: Path) -> TokenStore | None:
    with with_cache_hint(folder.parent):
        return TokenStore.open(folder)


def _count_workers(source: Source) -> int:
    packed = source.kind == "parquet" or source.path.suffix.lower() in COMPRESSED
    return max(1, min(len(os.sched_getaffinity(0)), source.size * (COMPRESSION_RATIO if packed else 1) // MIN_BYTES_PER_WORKER))


@lru_cache(1)
def code_fingerprint() -> str:
    """sha256 over CODE and LIBRARIES, in hex."""
    digest = hashlib.sha256(json.dumps([[name, version(name)] for name in FINGERPRINTED_LIBRARIES]).encode())
    for name in FINGERPRINTED_CODE:
        digest.update(hashlib.sha256((Path(__file__).parents[1] / f"{name}.py").read_bytes()).digest())
    return digest.hexdigest()


def _build_store(folder: Path, source: Source, recipe: EncodingConfig, tokenizer: Tokenizer, facts: dict, progress: ProgressCallback, workers: int) -> None:
    with with_cache_hint(folder.parent):
        writer = StoreWriter(folder, recipe.sides, max(tokenizer.vocab_size - 1, *tokenizer.control_ids.values()))
    with writer:
        last = time.monotonic()
        for block, done in encode_in_parallel(source, recipe, tokenizer.fingerprint, _chunks(source), workers):
            with with_cache_hint(folder.parent):
                writer.append(block)
            if time.monotonic() - last >= REPORT_EVERY:
                last = time.monotonic()
                progress(done, source.size, writer.tally.read)
        if file_sha256_cached(source.path, folder.parent) != facts["content"]:
            raise UserError("the file changed while it was read", str(source.path), "start again once it is no longer written to")
        with with_cache_hint(folder.parent):
            writer.finish(facts)
        progress(source.size, source.size, writer.tally.read)


def _chunks(source: Source) -> Iterator[tuple[Chunk, int]]:
    """(items, bytes of the file read by then). What depends on the rows alone: the number of workers changes no chunk."""
    done = 0

    def read(so_far: int) -> None:
        nonlocal done
        done = so_far

    chunk: Chunk = []
    size = 0
    items = iter(source.items(read))
    while True:
        try:
            item = next(items, None)
        except Exception:  # whatever it is, it is raised again, but in its turn: a bad row among these comes first
            yield chunk, done
            raise
        if item is None:
            break
        chunk.append(item)
        size += _size_of(item[1])
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk, done
            chunk, size = [], 0
    yield chunk, done


def _size_of(raw: object) -> int:
    """About the bytes of an item, whether parsed or not."""
    if isinstance(raw, (bytes, str)):
        return len(raw)
    parts = raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ()
    return 8 + sum(map(_size_of, parts))


def file_sha256_cached(path: Path, cache: Path) -> str:
    """sha256 of a file's bytes, in hex: read once, and known from then on while the file's size, times and inode stay the same."""
    real = path.resolve()
    known = cache / "contents" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()}.json"
    began, mark = time.time_ns(), _file_signature(real)
    try:
        told = json.loads(known.read_bytes())
        if told["mark"] == mark:
            return told["sha256"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        pass  # not known, or no longer readable
    with open(real, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    if _file_signature(real) != mark:
        raise UserError("the file changed while it was read", str(path), "start again once it is no longer written to")
    if began - max(mark[1:3]) > MTIME_GRANULARITY:  # else a change right now may leave the same time stamps
        known.parent.mkdir(exist_ok=True)
        temporary = known.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"path": str(real), "mark": mark, "sha256": content}), encoding="utf-8", errors="surrogateescape")
        os.replace(temporary, known)
    return content


def _file_signature(path: Path) -> list[int]:
    """What changes with a file's bytes, short of reading them."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


@contextmanager
def locked_build(path: Path) -> Iterator[None]:
    """POSIX locks: free at once when the owner dies, and no forked child keeps one. The file stays: deleting it would race."""
    with with_cache_hint(path.parent):
        file = open(path, "ab")
    with file:
        with with_cache_hint(path.parent):
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def remove_stale_builds(cache: Path, mine: Path) -> None:
    """What killed builders left of anything but `mine`: .NAME.tmp, while nobody holds NAME.lock."""
    for left in cache.glob(".*.tmp"):
        name = left.name.removeprefix(".").removesuffix(".tmp")
        if name == mine.name:
            continue  # whoever opened its lock a second time would lose it
        with suppress(OSError), open(cache / f"{name}.lock", "ab") as file:  # held, or gone by now, or not ours to remove
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_store(left)


@contextmanager
def with_cache_hint(cache: Path, what: str = "tokens") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"data.cache={cache}"
        raise UserError(f"{what} cannot be stored: {error.strerror or error}", where, "make room there, or name another folder: data.cache=FOLDER") from error
