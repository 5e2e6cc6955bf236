"""Rows that are both training and validation data: the validation loss on rows that were trained on does not measure
generalization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common.errors import UserError
from data.batching.mixture import WeightedSource
from data.config import DataConfig

HASH_ROWS_PER_READ = 1 << 16


def separate_validation(
    groups: list[list[WeightedSource]], validation: Sequence[WeightedSource], data: DataConfig, is_split: bool
) -> tuple[list[list[WeightedSource]], list[str]]:
    """Return (training rows, warnings).

    Training rows with the tokens of a validation row are left out, as data.val_duplicates says.

    The validation rows stay as they are, so that each kind of row keeps its share of them. `is_split`: they are held
    out of the files of data.path. Raises UserError if an entry of data.path has no other rows.
    """
    drop = is_split if data.val_duplicates == "auto" else data.val_duplicates == "drop"
    contents = np.unique(
        np.concatenate([np.empty(0, np.uint64), *(part.contents(0, len(part)) for part in validation)])
    )
    shared = {id(part): rows_with(part, contents) for group in groups for part in group}
    count, total = sum(map(len, shared.values())), sum(part.num_rows for group in groups for part in group)
    if not count:
        return groups, []
    part = next(part for group in groups for part in group if len(shared[id(part)]))
    first = part.source.where(part.store.read(int(part.locate(shared[id(part)][:1])[0]))[1])
    found = f"{count:,} of {total:,} training rows have the same tokens as a validation row (first: {first})"
    if not drop:
        return groups, [f"{found}: the validation loss is too low; data.val_duplicates=drop does not train on them"]
    groups = [
        [replace(part, excluded=shared[id(part)]) if len(shared[id(part)]) else part for part in group]
        for group in groups
    ]
    groups = [[part for part in group if part.num_rows] for group in groups]
    if not all(groups):
        fix = "data.val_fraction=0 trains without validation, data.val_duplicates=keep on all rows"
        raise UserError(
            f"{found}, which leaves an entry of data.path without rows to train on",
            f"data.val_duplicates={data.val_duplicates}",
            fix,
        )
    return groups, [f"{found} and are not trained on; data.val_duplicates=keep trains on them"]


def rows_with(part: WeightedSource, contents: np.ndarray) -> np.ndarray:
    """Return the positions of the rows of `part` whose hash is in `contents` (ascending uint64)."""
    found = [np.empty(0, np.int64)]
    for start in range(0, len(part) if len(contents) else 0, HASH_ROWS_PER_READ):
        hashes = part.contents(start, min(start + HASH_ROWS_PER_READ, len(part)))
        nearest = np.minimum(np.searchsorted(contents, hashes), len(contents) - 1)
        found.append(start + np.flatnonzero(contents[nearest] == hashes))
    return np.concatenate(found)
