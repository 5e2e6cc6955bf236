"""FIXME data.types."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from data.schemas.schemas import ChatExample, PreferencePair, TextExample

SourceItem = TextExample | ChatExample | PreferencePair


def sequences_per_row(rows: str) -> int:
    """Sequences of a row: (chosen, rejected) for a preference."""
    return 2 if rows == "preference" else 1


@dataclass(frozen=True)
class EncodingConfig:
    """Everything beside a file's bytes that decides which ids its rows become."""

    rows: str  # text | chat | preference
    shape: str  # a name of data.shapes.SHAPES
    tokenizer: Path
    max_length: int
    too_long: str  # truncate | drop | split
    train_on: str
    on_bad_row: str
    system_prompts: tuple[str, ...] = ()
    system_prob: float = 0.0
    empty_think_prob: float = 0.0
    seed: int = 0  # of these two; without them it changes nothing, and stays 0

    @property
    def sides(self) -> int:
        return sequences_per_row(self.rows)

    def key(self, tokenizer_fingerprint: str) -> str:
        parts = dataclasses.asdict(self) | {"tokenizer": tokenizer_fingerprint}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class TokenSequence(NamedTuple):
    ids: np.ndarray  # int32 (n,), n <= max_length + 1: the model reads all but the last and predicts all but the first
    learn: np.ndarray  # bool (n,): learn[t] where predicting token t is a lesson; learn[0] is False, nothing predicts it


class EncodedRow(NamedTuple):
    sequences: tuple[TokenSequence, ...]  # one; (chosen, rejected) for a preference pair
    name: str  # file:line


class RowSource(Protocol):
    """Rows by their number: what is packed, and what batches are made of."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> EncodedRow: ...
    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Positions that each of the rows [start, stop) feeds to the model."""

    @property
    def fingerprint(self) -> str: ...
