"""What an epoch shows: the rows of several stores, each as often as its weight says, some of them held out.

Nothing here grows with the data: which row stands where is arithmetic, so any position costs the same. The one exception
are rows with weights of their own, whose running sum is kept (8 bytes a row).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError
from data.batching.sampler import hash64
from data.types import EncodedRow
from data.types import TokenSequence as Tokens

if TYPE_CHECKING:
    from data.sources.files import Source
    from data.store.reader import TokenStore

WHOLE_SOURCE = 1 << 20  # parts of one showing: how finely weights are told apart
MAX_REPEATS = 1000  # times the rows there are that an epoch shows at most
HOLDOUT_SEED = 0  # not the run's: repeats over seeds are compared on the same rows


@dataclass(frozen=True)
class HoldoutSplit:
    """One row in every `size / held_out`, drawn within each such stretch: spread over the file, whatever its order."""

    size: int
    held_out: int

    def strata(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of stretch j: its first row, its length, and the row in it that is held out."""
        first = numbers * self.size // self.held_out
        length = (numbers + 1) * self.size // self.held_out - first
        return first, length, (hash64(numbers, HOLDOUT_SEED) % length.astype(np.uint64)).astype(np.int64)

    def held(self, positions: np.ndarray) -> np.ndarray:
        first, _, chosen = self.strata(positions)
        return first + chosen

    def kept(self, positions: np.ndarray) -> np.ndarray:
        """The rows that are not held out, in their order."""
        # Stretch j begins after first(j) - j kept rows; this is the last one that begins at or before each position.
        j = np.minimum(((positions + 1) * self.held_out - 1) // (self.size - self.held_out), self.held_out - 1)
        first, _, chosen = self.strata(j)
        offset = positions - (first - j)
        return first + offset + (offset >= chosen)


@dataclass(frozen=True)
class WeightedSource:
    """The rows of one store that belong to a set: all, those held out, or those that are not."""

    source: Source
    store: TokenStore
    split: HoldoutSplit | None = None
    is_held_out: bool = False
    shown: int = -1  # rows an epoch shows; those there are, where nothing is weighted
    reach: np.ndarray | None = field(default=None, repr=False)  # rows shown up to and with each row, where rows have weights

    @property
    def rows(self) -> int:
        """How many different rows there are."""
        if self.split is None:
            return len(self.store)
        return self.split.held_out if self.is_held_out else self.split.size - self.split.held_out

    def __len__(self) -> int:
        return self.rows if self.shown < 0 else self.shown

    def held_out(self, count: int) -> tuple[WeightedSource | None, WeightedSource | None]:
        """(the other rows, so many rows); None for no row at all."""
        if not count or count == self.rows:
            return (self, None) if not count else (None, self)
        split = HoldoutSplit(len(self.store), count)
        return replace(self, split=split), replace(self, split=split, is_held_out=True)

    @property
    def weights(self) -> np.ndarray | None:
        """Of each row, where they are not all 1."""
        return self.store.weights(0, len(self.store))[self._stored(np.arange(self.rows))].astype(np.float64) if self.store.has_weights else None

    def shown_more_often(self, times: float) -> WeightedSource:
        """Every row `times` as often, and as often as its own weight says: as evenly as whole numbers allow, no chance in it."""
        weights = self.weights
        if weights is None:
            return replace(self, shown=round(self.rows * times))
        # Whole numbers: a running sum of floats might pass a row by that is to be shown once.
        reach = (np.cumsum(np.round(weights * times * WHOLE_SOURCE).astype(np.int64)) + WHOLE_SOURCE // 2) // WHOLE_SOURCE
        return replace(self, shown=int(reach[-1]), reach=reach)

    def locate(self, positions: np.ndarray) -> np.ndarray:
        """The row of the store at each position; never falls where positions rise."""
        if self.reach is not None:
            positions = np.searchsorted(self.reach, positions, side="right")
        elif len(self) != self.rows:
            positions = positions * self.rows // len(self)
        return self._stored(positions)

    def _stored(self, positions: np.ndarray) -> np.ndarray:
        if self.split is None:
            return positions
        return self.split.held(positions) if self.is_held_out else self.split.kept(positions)

    def lengths(self, start: int, stop: int) -> np.ndarray:
        rows = self.locate(np.arange(start, stop))
        return self.store.lengths(int(rows[0]), int(rows[-1]) + 1)[rows - rows[0]]

    @property
    def print(self) -> list:
        return [self.store.digest, self.split and [self.split.size, self.split.held_out, self.is_held_out], len(self)]


@dataclass(frozen=True)
class MixedRows:
    """The rows of an epoch, unshuffled: those of the first part, of the second, ..."""

    parts: tuple[WeightedSource, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", np.cumsum([len(part) for part in self.parts]))

    ends: np.ndarray = field(init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, i: int) -> EncodedRow:
        number = int(np.searchsorted(self.ends, i, side="right"))
        part = self.parts[number]
        row = int(part.locate(np.array([i - (int(self.ends[number]) - len(part))]))[0])
        sequences, place = part.store.read(row)
        return EncodedRow(tuple(Tokens(ids, learn) for ids, learn in sequences), part.source.where(place))

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Positions that each of the rows [start, stop) feeds to the model, int64."""
        return np.concatenate([np.empty(0, np.int64), *self._lengths(start, stop)])

    def _lengths(self, start: int, stop: int) -> Iterator[np.ndarray]:
        for part, end in zip(self.parts, self.ends.tolist(), strict=True):
            begin = end - len(part)
            if max(start, begin) < min(stop, end):
                yield part.lengths(max(start, begin) - begin, min(stop, end) - begin)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([part.print for part in self.parts]).encode()).hexdigest()


def mix_sources(words: Sequence[list[WeightedSource]], weights: list[float] | None) -> MixedRows:
    """The parts of each word of data.path, which share an epoch as `weights` and their rows' own weights say: the smallest epoch in
    which no row is missing. Raises ValueError where the weights are so far apart that such an epoch would not end."""
    masses = [sum(part.rows if part.weights is None else part.weights.sum() for part in word) for word in words]
    lightest = [min(1.0 if part.weights is None else part.weights.min() for part in word) for word in words]
    times = [1.0] * len(words) if weights is None else [weight / mass for weight, mass in zip(weights, masses, strict=True)]
    least = min(light * often for light, often in zip(lightest, times, strict=True))
    scale = 1 / least if weights is not None or least < 1 else 1.0
    rows, shown = sum(part.rows for word in words for part in word), sum(mass * often * scale for mass, often in zip(masses, times, strict=True))
    if shown > MAX_REPEATS * rows:
        what = f"an epoch without a missing row would show {shown:.3g} rows of {rows:,}"
        raise UserError(what, "data.weights, or the field weight of rows", "choose weights that are less far apart")
    return MixedRows(tuple(part.shown_more_often(often * scale) for word, often in zip(words, times, strict=True) for part in word))
