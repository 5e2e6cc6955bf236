"""Encodes texts piece by piece: a piece that occurs again is looked up, which takes a tenth of the time of encoding it.

No Python runs per token: pieces are looked up by `map`, and their ids are joined by numpy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import numpy as np

MAX_PIECES = 1 << 17  # that are remembered, about 30 MB; then all are forgotten
MAX_PIECE_CHARACTERS = 32  # of a piece that is remembered
CHARACTERS_PER_SPACE = 12  # of a text that is cut, at most. Chinese has fewer spaces: its pieces are phrases, which hardly occur again
FIRST_UNSPACED = "\u2e80"  # scripts without spaces begin here: pieces with one of their characters are not remembered
MAX_CUT_CHARACTERS = 1 << 20  # of the texts that are cut at once, because pieces take 10 times the memory of their text
UNKNOWN = -1
EncodeBatch = Callable[[list[str]], list[list[int]]]
FlatEncoder = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]  # texts -> (all ids, concatenated: int32; the number of ids of each: int64)


class PieceCache:
    """Piece number n has the ids from ends[n] to ends[n + 1]."""

    def __init__(self, cuts: re.Pattern[str], encode_batch: EncodeBatch) -> None:
        """`cuts`: from `cut_pattern`; `encode_batch`: encodes texts without this cache."""
        self._cuts, self._encode_batch = cuts, encode_batch
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids, self._ends = np.empty(0, np.int32), np.zeros(1, np.int64)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return (the ids of all texts, concatenated: int32; the number of ids of each: int64)."""
        parts = [self._encode(part) for part in _limited_parts(texts)]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if len(texts) == 1 and len(texts[0]) > MAX_CUT_CHARACTERS:
            return flat_ids(self._encode_batch(texts))
        found = [self._cuts.findall(text) if text.count(" ") * CHARACTERS_PER_SPACE > len(text) else [text] for text in texts]
        pieces = list(chain.from_iterable(found))
        numbers = np.fromiter(map(self._numbers.get, pieces, repeat(UNKNOWN)), np.int64, len(pieces))
        ids, ends = self._ids, self._ends
        if len(missing := np.flatnonzero(numbers == UNKNOWN)):
            missing_pieces = [pieces[index] for index in missing.tolist()]
            new, ids, ends = self._encode_new(missing_pieces)
            numbers[missing] = np.fromiter(map(new.__getitem__, missing_pieces), np.int64, len(missing))
        lengths = np.diff(ends)
        num_ids = np.concatenate([[0], np.cumsum(lengths[numbers])])  # of all pieces before each
        last_pieces = np.cumsum(np.fromiter(map(len, found), np.int64, len(found)))
        return gather(ids, ends[:-1], lengths, numbers), np.diff(num_ids[last_pieces], prepend=0)

    def _encode_new(self, missing: list[str]) -> tuple[dict[str, int], np.ndarray, np.ndarray]:
        """Return the numbers of new pieces, and ids and ends with them at the end; remember those that may occur again."""
        new = dict.fromkeys(missing)
        kept = [piece for piece in new if len(piece) <= MAX_PIECE_CHARACTERS and (piece.isascii() or max(piece) < FIRST_UNSPACED)]
        for piece in kept:
            del new[piece]
        count = len(self._numbers)
        numbers = {piece: number for number, piece in enumerate([*kept, *new], count)}
        added, lengths = flat_ids(self._encode_batch(list(numbers)))
        ids, ends = np.concatenate([self._ids, added]), np.concatenate([self._ends, self._ends[-1] + np.cumsum(lengths)])
        if count + len(kept) > MAX_PIECES:
            self._forget()
        else:
            self._numbers.update(zip(kept, range(count, count + len(kept)), strict=True))
            self._ends = ends[: count + len(kept) + 1]
            self._ids = ids[: self._ends[-1]]
        return numbers, ids, ends


def gather(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the ids of texts, concatenated. `starts`, `lengths`: where in `ids` those of each text are; `numbers`: the texts, in any order."""
    counts = lengths[numbers]
    ends = np.cumsum(counts)
    return ids[np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts[numbers] - ends + counts, counts)]


def flat_ids(encoded: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (all ids, concatenated: int32; the number of ids of each: int64)."""
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths


def _limited_parts(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of at most MAX_CUT_CHARACTERS, a longer text by itself."""
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > MAX_CUT_CHARACTERS:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    yield part
