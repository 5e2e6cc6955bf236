"""Rows of an epoch: those of several token stores, each as often as its weight says, without the held-out ones.

Which row has which index is arithmetic, so every index costs about the same and memory does not grow with the data, but
for 8 bytes per row of those that are held out or left out, and of those with weights of their own.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError
from common.filesystem import sha256_of_json
from data.batching.sampler import hash64
from data.config import DataConfig
from data.types import EncodedRow

if TYPE_CHECKING:
    from data.sources.files import Source
    from data.store.reader import TokenStore

WHOLE_SOURCE = 1 << 20  # fixed-point denominator of row weights
MAX_REPEATS = 1000  # limit of the rows of an epoch, in multiples of the distinct rows
HASH_ROWS_PER_READ = 1 << 16
HOLDOUT_SEED = 0  # not the seed of the run: repetitions with other seeds are evaluated on the same rows


@dataclass(frozen=True)
class HoldoutSplit:
    """The held-out rows of a file, or the remaining ones: `held_out` of `size` rows are held out.

    The rows are cut into `held_out` strata, and one random row of each is held out: they are spread over the file.
    """

    size: int
    held_out: int
    is_held_out: bool = False

    def __len__(self) -> int:
        return self.held_out if self.is_held_out else self.size - self.held_out

    @cached_property
    def preceding(self) -> np.ndarray:
        """Number of remaining rows before each held-out row, int64 (held_out,): held-out row k is preceding[k] + k."""
        numbers = np.arange(self.held_out)
        first = numbers * self.size // self.held_out
        length = (numbers + 1) * self.size // self.held_out - first
        return first + (hash64(numbers, HOLDOUT_SEED) % length.astype(np.uint64)).astype(np.int64) - numbers

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the row at each position among these rows, in file order."""
        if self.is_held_out:
            return self.preceding[positions] + positions
        return positions + np.searchsorted(self.preceding, positions, side="right")


@dataclass(frozen=True, eq=False)
class WeightedSource:
    """Rows of one store: all of them, the held-out ones, or the others."""

    source: Source
    store: TokenStore
    split: HoldoutSplit | None = None
    # positions among these rows of rows that are left out, ascending
    excluded: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    rows_per_epoch: int = -1  # -1: each row once
    # with row weights: rows of an epoch up to and including each row
    cumulative: np.ndarray | None = field(default=None, repr=False)

    @cached_property
    def num_rows(self) -> int:
        """Number of distinct rows."""
        return len(self.store if self.split is None else self.split) - len(self.excluded)

    def __len__(self) -> int:
        return self.num_rows if self.rows_per_epoch < 0 else self.rows_per_epoch

    def hold_out(self, count: int) -> tuple[WeightedSource | None, WeightedSource | None]:
        """Return (remaining rows, `count` held-out rows); None for an empty part."""
        if not count or count == self.num_rows:
            return (self, None) if not count else (None, self)
        split = HoldoutSplit(len(self.store), count)
        return replace(self, split=split), replace(self, split=replace(split, is_held_out=True))

    @property
    def weights(self) -> np.ndarray:
        """Weight of each row, float64 (num_rows,), without memory if all are 1."""
        if not self.store.has_weights:
            return np.broadcast_to(1.0, self.num_rows)
        return self.store.column("weight", 0, len(self.store))[self._stored(np.arange(self.num_rows))].astype(
            np.float64
        )

    def upsampled(self, factor: float) -> WeightedSource:
        """Return the source with every row `factor` times its own weight times per epoch, rounded evenly and without
        randomness.
        """
        if not self.store.has_weights:
            return replace(self, rows_per_epoch=round(self.num_rows * factor))
        # Integers: a cumulative sum of floats could skip a row that is due once.
        cumulative = (
            np.cumsum(np.round(self.weights * factor * WHOLE_SOURCE).astype(np.int64)) + WHOLE_SOURCE // 2
        ) // WHOLE_SOURCE
        return replace(self, rows_per_epoch=int(cumulative[-1]), cumulative=cumulative)

    def locate(self, positions: np.ndarray) -> np.ndarray:
        """Return the row of the store at each position of an epoch; ascending for ascending positions."""
        if self.cumulative is not None:
            positions = np.searchsorted(self.cumulative, positions, side="right")
        elif len(self) != self.num_rows:
            positions = positions * self.num_rows // len(self)
        return self._stored(positions)

    def _stored(self, positions: np.ndarray) -> np.ndarray:
        if len(self.excluded):  # excluded[k] - k other rows precede the k-th excluded one
            before = self.excluded - np.arange(len(self.excluded))
            positions = positions + np.searchsorted(before, positions, side="right")
        return positions if self.split is None else self.split.rows(positions)

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Number of input tokens of each of the rows [start, stop), int64."""
        return self._read(self.store.lengths, start, stop)

    def contents(self, start: int, stop: int) -> np.ndarray:
        """Hash of the tokens of each of the rows [start, stop), uint64: equal for rows with the same tokens."""
        return self._read(partial(self.store.column, "content"), start, stop)

    def _read(self, column: Callable[[int, int], np.ndarray], start: int, stop: int) -> np.ndarray:
        rows = self.locate(np.arange(start, stop))
        return column(int(rows[0]), int(rows[-1]) + 1)[rows - rows[0]]

    @property
    def identity(self) -> list:
        """What the fingerprint of a mixture hashes."""
        excluded = [hashlib.sha256(self.excluded.astype(np.int64).tobytes()).hexdigest()] if len(self.excluded) else []
        return [
            self.store.digest,
            self.split and astuple(self.split),
            len(self),
            *excluded,
        ]


@dataclass(frozen=True)
class MixedRows:
    """Rows of an epoch before shuffling: those of the first source, of the second, ..."""

    sources: tuple[WeightedSource, ...]

    @cached_property
    def ends(self) -> np.ndarray:
        """The index behind the last row of each source."""
        return np.cumsum([len(source) for source in self.sources])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, i: int) -> EncodedRow:
        number = int(np.searchsorted(self.ends, i, side="right"))
        part = self.sources[number]
        row = int(part.locate(np.array([i - (int(self.ends[number]) - len(part))]))[0])
        sequences, position = part.store.read(row)
        return EncodedRow(tuple(sequences), part.source.where(position))

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Number of input tokens of each of the rows [start, stop), int64."""
        return np.concatenate([np.empty(0, np.int64), *(part.lengths(a, b) for part, a, b in self._spans(start, stop))])

    def distinct(self, start: int, stop: int) -> np.ndarray:
        """Number of the stored row at each of the rows [start, stop), int64: the same for its copies."""
        stores = {part.store.digest: len(part.store) for part in self.sources}  # several entries may have the same one
        first = dict(zip(stores, np.cumsum([0, *stores.values()]).tolist(), strict=False))
        parts = [first[part.store.digest] + part.locate(np.arange(a, b)) for part, a, b in self._spans(start, stop)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[WeightedSource, int, int]]:
        """Yield (source, first and last position in it) for the rows [start, stop)."""
        for part, end in zip(self.sources, self.ends.tolist(), strict=True):
            first = end - len(part)
            if max(start, first) < min(stop, end):
                yield part, max(start, first) - first, min(stop, end) - first

    @property
    def fingerprint(self) -> str:
        return sha256_of_json([part.identity for part in self.sources])


def mix_sources(entries: Sequence[list[WeightedSource]], weights: list[float] | None) -> MixedRows:
    """Mix the sources of each entry of data.path in the shares `weights`, and each row by its own weight.

    The result is the shortest epoch in which every row occurs. Raises UserError if the weights differ so much that it
    is longer than MAX_REPEATS times the rows.
    """
    if weights is None and not any(part.store.has_weights for entry in entries for part in entry):
        return MixedRows(tuple(part for entry in entries for part in entry))
    masses = [float(sum(part.weights.sum() for part in entry)) for entry in entries]
    lightest = [float(min(part.weights.min() for part in entry)) for entry in entries]
    factors = (
        [1.0] * len(entries)
        if weights is None
        else [weight / mass for weight, mass in zip(weights, masses, strict=True)]
    )
    least = min(light * factor for light, factor in zip(lightest, factors, strict=True))
    scale = 1 / least if weights is not None or least < 1 else 1.0
    num_rows = sum(part.num_rows for entry in entries for part in entry)
    epoch_rows = sum(mass * factor * scale for mass, factor in zip(masses, factors, strict=True))
    if epoch_rows > MAX_REPEATS * num_rows:
        message = f"the weights differ too much: an epoch with every row at least once has {epoch_rows:.3g} rows, at most {MAX_REPEATS:,} x {num_rows:,} are allowed"
        raise UserError(message, "data.weights, or the field weight of the rows", "choose weights that differ less")
    return MixedRows(
        tuple(part.upsampled(factor * scale) for entry, factor in zip(entries, factors, strict=True) for part in entry)
    )


# --- rows that are both training and validation data: the loss on rows that were trained on measures no generalization


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
    separated = [[replace(part, excluded=rows_with(part, contents)) for part in group] for group in groups]
    count = sum(len(part.excluded) for group in separated for part in group)
    if not count:
        return groups, []
    pairs = zip(itertools.chain(*groups), itertools.chain(*separated), strict=True)
    part, excluded = next((part, without.excluded) for part, without in pairs if len(without.excluded))
    first = part.source.where(part.store.read(int(part.locate(excluded[:1])[0]))[1])
    total = sum(part.num_rows for group in groups for part in group)
    found = f"{count:,} of {total:,} training rows have the same tokens as a validation row (first: {first})"
    if not drop:
        return groups, [f"{found}: the validation loss is too low; data.val_duplicates=drop does not train on them"]
    groups = [[part for part in group if part.num_rows] for group in separated]
    if not all(groups):
        fix = "data.val_path=null data.val_fraction=0 trains without validation, data.val_duplicates=keep on all rows"
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
