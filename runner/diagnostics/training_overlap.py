"""Rows of an evaluation that the model was trained on: what is measured on them is memory."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.filesystem import open_regular
from common.ownership import is_on_this_host
from data.sources.byte_stream import COMPRESSION_MAGIC
from data.sources.files import Source

# of the training files together, and of the evaluated ones: about two seconds; larger ones are not compared
MAX_BYTES = 64 << 20
# of the training data; beyond one of them nothing is compared
MAX_TRAINING_FILES, MAX_TRAINING_ROWS, MAX_READ_SECONDS = 100, 2_000_000, 20.0


class TrainingOverlap(NamedTuple):
    rows: int  # evaluated rows that are training rows, too
    total: int
    first: str  # file:line of the first of them


def training_overlap(evaluated: Iterable[Source], run: Mapping[str, Any]) -> TrainingOverlap | None:
    """Return how many rows of `evaluated` are, field by field, rows of the training files that `run`, a run.json,
    names.

    None: another machine made the run, a file is not there any more, or they are too large to be compared. A run folder
    may be that of another person: each file is read only if its name is literally that of a regular file, neither a
    link nor compressed.
    """
    evaluated = list(evaluated)
    try:
        training = _training_files(run)
        if not training or max(sum(source.size for source in files) for files in (training, evaluated)) > MAX_BYTES:
            return None
        if (seen := _training_digests(training)) is None:
            return None
        rows = [
            (source.where(position), digest in seen) for source in evaluated for position, digest in _digests(source)
        ]
    # a file that only an evaluation or a training with other settings can read
    except (UserError, OSError, ValueError):
        return None
    found = [where for where, is_known in rows if is_known]
    return TrainingOverlap(len(found), len(rows), found[0]) if found else None


def _training_files(run: Mapping[str, Any]) -> list[Source]:
    """Return the files that can be compared; none of a run of another machine."""
    files = run.get("data")
    if not is_on_this_host(run) or not isinstance(files, list) or len(files) > MAX_TRAINING_FILES:
        return []
    names = [entry.get("file") for entry in files if isinstance(entry, dict) and entry.get("use") == "training"]
    return [Source.open(name) for name in names if isinstance(name, str) and _is_plain_file(Path(name))]


def _is_plain_file(path: Path) -> bool:
    try:
        fd, size = open_regular(path)
    except (OSError, ValueError):  # ValueError: a name with a NUL
        return False
    with open(fd, "rb") as file:
        # files of /proc have no size, compressed ones any when they are read
        return size > 0 and not file.read(8).startswith(tuple(COMPRESSION_MAGIC))


def _training_digests(training: list[Source]) -> set[bytes] | None:
    """Return the hashes of the rows, None beyond MAX_TRAINING_ROWS or MAX_READ_SECONDS."""
    seen, end = set[bytes](), time.monotonic() + MAX_READ_SECONDS
    rows = (digest for source in training for _, digest in _digests(source))
    for number, digest in enumerate(islice(rows, MAX_TRAINING_ROWS + 1)):
        if number == MAX_TRAINING_ROWS or number % 1024 == 1023 and time.monotonic() > end:
            return None
        seen.add(digest)
    return seen


def _digests(source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield (position, hash of the fields) of each row that can be read."""
    for position, row in source.rows(on_bad=lambda error: None):
        yield (
            position,
            hashlib.blake2b(
                json.dumps(row, sort_keys=True, default=str).encode("utf-8", "surrogatepass"), digest_size=12
            ).digest(),
        )
