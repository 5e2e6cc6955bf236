"""What some rows of a source became, as flat arrays, and the count of what became of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

SpanPair = tuple[int, int]  # [start, stop) within a sequence


@dataclass
class RowStats:
    """What became of the rows of a source. Tallies of parts add up."""

    read: int = 0
    kept: int = 0
    split: int = 0  # texts that became several rows
    cut: int = 0  # conversations that lost their end
    tokens: int = 0
    supervised: int = 0  # of them, those that carry loss
    lost: int = 0  # those that would have, had nothing been cut or left out for its length
    dropped: Counter[str] = field(default_factory=Counter)  # by reason: the options' doing ...
    bad: Counter[str] = field(default_factory=Counter)  # ... and rows that cannot be used
    first: dict[str, str] = field(default_factory=dict)  # where each reason was met first

    def __iadd__(self, other: RowStats) -> RowStats:
        for part in dataclasses.fields(self):
            mine, theirs = getattr(self, part.name), getattr(other, part.name)
            setattr(self, part.name, {**theirs, **mine} if part.name == "first" else mine + theirs)
        return self

    def leave_out(self, kind: str, reason: str, where: str) -> None:
        getattr(self, kind)[reason] += 1
        self.first.setdefault(reason, where)


@dataclass
class EncodedBlock:
    """What some rows of one source became: S sequences, N rows of `sides` sequences each."""

    tokens: np.ndarray  # int32, all sequences one after the other
    lengths: np.ndarray  # int64 (S,)
    spans: np.ndarray  # int32 (P, 2): [start, stop) within its sequence of tokens that carry loss
    span_counts: np.ndarray  # int64 (S,)
    places: np.ndarray  # int64 (N,) where each row stands in the source
    weights: np.ndarray  # float32 (N,)
    tally: RowStats


class BlockBuilder:
    """The lists behind a block."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.lengths: list[int] = []
        self.spans: list[SpanPair] = []
        self.span_counts: list[int] = []
        self.places: list[int] = []
        self.weights: list[float] = []

    def add(self, place: int, weight: float, sequences: list[tuple[list[int], list[SpanPair]]]) -> None:
        self.places.append(place)
        self.weights.append(weight)
        for ids, spans in sequences:
            self.tokens += ids
            self.lengths.append(len(ids))
            self.spans += spans
            self.span_counts.append(len(spans))

    def block(self, tally: RowStats) -> EncodedBlock:
        spans = np.array(self.spans, np.int32).reshape(-1, 2)
        tally.tokens += len(self.tokens)
        tally.supervised += int((spans[:, 1] - spans[:, 0]).sum())
        return EncodedBlock(
            tokens=np.array(self.tokens, np.int32),
            lengths=np.array(self.lengths, np.int64),
            spans=spans,
            span_counts=np.array(self.span_counts, np.int64),
            places=np.array(self.places, np.int64),
            weights=np.array(self.weights, np.float32),
            tally=tally,
        )
