"""FIXME data.batching.batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from data.types import EncodedRow, RowSource

IGNORE_INDEX = -100  # the label of a position that carries no loss
ROUND_TO = 8  # widths vary less: fewer shapes for a compiler to meet
PADDING = -1  # the sequence of a position that belongs to none


class Windows(Protocol):
    """What a line of a batch is made of: one row, or several that are packed."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> list[EncodedRow]: ...
    @property
    def rows(self) -> RowSource: ...


@dataclass
class UnpackedWindows:
    """Every row a window of its own."""

    rows: RowSource

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[EncodedRow]:
        return [self.rows[index]]


@dataclass
class Batch:
    """One micro-batch, padded on the right. Of preference pairs sequence p is the chosen side of pair p, sequence S / 2 + p its rejected side."""

    input_ids: Tensor  # (R, T)
    labels: Tensor  # (R, T) the token that follows each position, IGNORE where it carries no loss
    lengths: Tensor  # (S,) positions of each sequence
    names: list[str]  # where each row comes from, for messages; none: a stand-in that counts as nothing
    sequences: Tensor | None = None  # (R, T) packed: which sequence a position belongs to, PADDING for none; None: line r is sequence r
    position_ids: Tensor | None = None  # (R, T) packed: they begin anew with each sequence

    @property
    def supervised(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.labels.numpy() != IGNORE_INDEX))

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """What the model is called with."""
        return {name: getattr(self, name) for name in ("input_ids", "labels", "lengths", "sequences", "position_ids")}

    @property
    def positions(self) -> int:
        """Of the input, without padding."""
        return int(self.lengths.numpy().sum()) if self.names else 0

    def idle(self) -> Batch:
        """A batch of the same form without rows: for a rank that has none left while others still have some."""
        return dataclasses.replace(self, labels=torch.full_like(self.labels, IGNORE_INDEX), names=[])

    def to(self, device: torch.device) -> Batch:
        moved = {name: None if tensor is None else tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return Batch(names=self.names, **moved)  # type: ignore[arg-type]  # the fields of a batch, by their names

    def pin_memory(self) -> Batch:
        """In memory that a GPU reads while we go on; torch's DataLoader asks for it by this name."""
        return Batch(names=self.names, **{name: None if tensor is None else tensor.pin_memory() for name, tensor in self.inputs.items()})  # type: ignore[arg-type]  # as in `to`

    def of_sequences(self, values: Tensor) -> Tensor:
        """Sums over the positions of each sequence: (R, T) -> (S,)."""
        if self.sequences is None:
            return values.sum(-1)
        count = len(self.lengths)
        slots = torch.where(self.sequences == PADDING, count, self.sequences).flatten()
        return values.new_zeros(count + 1).index_add(0, slots, values.flatten())[:count]


def collate(windows: list[list[EncodedRow]], pad_id: int, packed: bool) -> Batch:
    rows = [row for window in windows for row in window]
    sides = len(rows[0].sequences)
    numbered = [[(side * len(rows) + p, row.sequences[side]) for side in range(sides)] for p, row in enumerate(rows)]
    if packed:
        ends = np.cumsum([len(window) for window in windows]).tolist()
        lines = [[sequence for row in numbered[end - len(window) : end] for sequence in row] for end, window in zip(ends, windows, strict=True)]
    else:
        lines = [[row[side]] for side in range(sides) for row in numbered]
    width = max(sum(len(sequence.ids) - 1 for _, sequence in line) for line in lines)
    shape = (len(lines), -(-width // ROUND_TO) * ROUND_TO)
    input_ids, labels = np.full(shape, pad_id), np.full(shape, IGNORE_INDEX)
    belongs, position_ids = np.full(shape, PADDING), np.zeros(shape, np.int64)
    lengths = np.empty(sides * len(rows), np.int64)
    for r, line in enumerate(lines):
        start = 0
        for number, (ids, learn) in line:
            length = len(ids) - 1
            span = slice(start, start + length)
            input_ids[r, span] = ids[:-1]
            labels[r, span] = np.where(learn[1:], ids[1:], IGNORE_INDEX)
            belongs[r, span] = number
            position_ids[r, span] = np.arange(length)
            lengths[number] = length
            start += length
    layout = (torch.from_numpy(belongs), torch.from_numpy(position_ids)) if packed else (None, None)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), torch.from_numpy(lengths), [row.name for row in rows], *layout)
