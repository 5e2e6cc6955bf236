"""Rows of an evaluation that the model was trained on: what is measured on them is memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from common.errors import UserError
from data.sources.files import Source, resolve_sources

MAX_BYTES = 64 << 20  # of the training files together, and of the evaluated ones: about two seconds; larger ones are not compared


class TrainingOverlap(NamedTuple):
    rows: int  # evaluated rows that are training rows, too
    total: int
    first: str  # file:line of the first of them


def training_overlap(evaluated: Iterable[Source], trained_on: Any) -> TrainingOverlap | None:
    """Return how many rows of `evaluated` are, field by field, rows of the files of `trained_on`: data.path of the run.

    None: there is no such file any more, or it is too large to be compared. Data sets of the hub are not fetched.
    """
    paths = [entry for entry in ([trained_on] if isinstance(trained_on, str) else trained_on or []) if isinstance(entry, str) and not entry.startswith("hub:")]
    evaluated, training = list(evaluated), list[Source]()
    with suppress(UserError, OSError):  # moved, deleted or of another machine
        training = [source for group in resolve_sources(paths) for source in group]
    try:
        if not training or max(sum(source.size for source in files) for files in (training, evaluated)) > MAX_BYTES:
            return None
        seen = {digest for source in training for _, digest in _digests(source)}
        rows = [(source.where(position), digest in seen) for source in evaluated for position, digest in _digests(source)]
    except (UserError, OSError):  # a file that only an evaluation or a training with other settings can read
        return None
    found = [where for where, is_known in rows if is_known]
    return TrainingOverlap(len(found), len(rows), found[0]) if found else None


def _digests(source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield (position, hash of the fields) of each row that can be read."""
    for position, row in source.rows(on_bad=lambda error: None):
        yield position, hashlib.blake2b(json.dumps(row, sort_keys=True, default=str).encode("utf-8", "surrogatepass"), digest_size=12).digest()
