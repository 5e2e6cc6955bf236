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

from data.formats import PACKED, Source
from data.pool import Chunk, encoded
from data.rows import Recipe
from data.store import Store
from data.store_files import FORMAT
from data.store_writer import Writer, remove
from data.tokenizer import Tokenizer

CHUNK_ROWS, CHUNK_BYTES = 512, 1 << 20  # whichever is reached first
WORTH_A_WORKER = 2 << 20  # bytes of a file: it encodes them in the time it takes to start
UNPACKED = 4  # times the size on disk, about
# What decides which ids a row becomes: a change in these files, or another version of these libraries, and it is tokenised again.
CODE = "augment badrow block chat formats messages readers rows sandbox shapes stream tables tokenizer".split()
LIBRARIES = ("jinja2", "tokenizers")
SETTLED = 2_000_000_000  # ns after a file's last change from which on its time stamps would show another one
REPORT_EVERY = 0.1  # seconds
Progress = Callable[[int, int, int], None]  # bytes of the file done, bytes in all, rows read


def silent(done: int, total: int, rows: int) -> None:
    pass


def prepare(source: Source, recipe: Recipe, tokenizer: Tokenizer, cache: Path, progress: Progress = silent, workers: int | None = None) -> Store:
    """The store of what `recipe` makes of `source`, in `cache`; built in `workers` processes (None: as many as are worth it) where it is missing.

    `tokenizer` is that of the recipe, already loaded. `progress` may raise, to stop building. Raises BadRow for the first bad row
    where the recipe says so, and ValueError where the file changes meanwhile or the cache cannot be written.
    """
    with explained(cache):
        cache.mkdir(parents=True, exist_ok=True)
        content = content_of(source.path, cache)
    recipe_key = recipe.key(tokenizer.fingerprint)
    key = hashlib.sha256(json.dumps([content, source.kind, recipe_key, FORMAT, code()]).encode()).hexdigest()
    store = _there(cache / key)
    if store is None:
        with locked(cache / f"{key}.lock"):
            store = _there(cache / key)  # somebody else's, while we waited
            if store is None:
                remove_litter(cache, cache / key)
                facts = {
                    "name": source.name,
                    "content": content,
                    "kind": source.kind,
                    "recipe": {**dataclasses.asdict(recipe), "tokenizer": str(recipe.tokenizer)},
                    "tokenizer": tokenizer.fingerprint,
                }
                _build(cache / key, source, recipe, tokenizer, facts, progress, _workers(source) if workers is None else workers)
                store = _there(cache / key)
                assert store is not None, f"{cache / key} was written a moment ago"
    # The same bytes may have stood in another file when the store was built.
    store.tally.first = {why: where.replace(store.facts["name"], source.name, 1) for why, where in store.tally.first.items()}
    return store


def _there(folder: Path) -> Store | None:
    with explained(folder.parent):
        return Store.open(folder)


def _workers(source: Source) -> int:
    packed = source.kind == "parquet" or source.path.suffix.lower() in PACKED
    return max(1, min(len(os.sched_getaffinity(0)), source.size * (UNPACKED if packed else 1) // WORTH_A_WORKER))


@lru_cache(1)
def code() -> str:
    """sha256 over CODE and LIBRARIES, in hex."""
    digest = hashlib.sha256(json.dumps([[name, version(name)] for name in LIBRARIES]).encode())
    for name in CODE:
        digest.update(hashlib.sha256(Path(__file__).with_name(f"{name}.py").read_bytes()).digest())
    return digest.hexdigest()


def _build(folder: Path, source: Source, recipe: Recipe, tokenizer: Tokenizer, facts: dict, progress: Progress, workers: int) -> None:
    with explained(folder.parent):
        writer = Writer(folder, recipe.sides, max(tokenizer.vocab_size - 1, *tokenizer.control_ids.values()))
    with writer:
        last = time.monotonic()
        for block, done in encoded(source, recipe, tokenizer.fingerprint, _chunks(source), workers):
            with explained(folder.parent):
                writer.append(block)
            if time.monotonic() - last >= REPORT_EVERY:
                last = time.monotonic()
                progress(done, source.size, writer.tally.read)
        if content_of(source.path, folder.parent) != facts["content"]:
            raise ValueError("the file changed while it was read", str(source.path), "start again once it is no longer written to")
        with explained(folder.parent):
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
        size += _size(item[1])
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk, done
            chunk, size = [], 0
    yield chunk, done


def _size(raw: object) -> int:
    """About the bytes of an item, whether parsed or not."""
    if isinstance(raw, (bytes, str)):
        return len(raw)
    parts = raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ()
    return 8 + sum(map(_size, parts))


def content_of(path: Path, cache: Path) -> str:
    """sha256 of a file's bytes, in hex: read once, and known from then on while the file's size, times and inode stay the same."""
    real = path.resolve()
    known = cache / "contents" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()}.json"
    began, mark = time.time_ns(), _mark(real)
    try:
        told = json.loads(known.read_bytes())
        if told["mark"] == mark:
            return told["sha256"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        pass  # not known, or no longer readable
    with open(real, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    if _mark(real) != mark:
        raise ValueError("the file changed while it was read", str(path), "start again once it is no longer written to")
    if began - max(mark[1:3]) > SETTLED:  # else a change right now may leave the same time stamps
        known.parent.mkdir(exist_ok=True)
        temporary = known.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"path": str(real), "mark": mark, "sha256": content}), encoding="utf-8", errors="surrogateescape")
        os.replace(temporary, known)
    return content


def _mark(path: Path) -> list[int]:
    """What changes with a file's bytes, short of reading them."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """POSIX locks: free at once when the owner dies, and no forked child keeps one. The file stays: deleting it would race."""
    with explained(path.parent):
        file = open(path, "ab")
    with file:
        with explained(path.parent):
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def remove_litter(cache: Path, mine: Path) -> None:
    """What killed builders left of anything but `mine`: .NAME.tmp, while nobody holds NAME.lock."""
    for left in cache.glob(".*.tmp"):
        name = left.name.removeprefix(".").removesuffix(".tmp")
        if name == mine.name:
            continue  # whoever opened its lock a second time would lose it
        with suppress(OSError), open(cache / f"{name}.lock", "ab") as file:  # held, or gone by now, or not ours to remove
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(left)


@contextmanager
def explained(cache: Path, what: str = "tokens") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"data.cache={cache}"
        raise ValueError(f"{what} cannot be stored: {error.strerror or error}", where, "make room there, or name another folder: data.cache=FOLDER") from error
