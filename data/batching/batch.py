"""Micro-batches: encoded rows as tensors, padded to one width.

Shapes: R batch rows, T tokens of a batch row, S documents. A document is one token sequence of an encoded row: a row
has one, a preference pair two. Without packing each document is a batch row (R = S); a packed sequence holds several (R
< S).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from data.types import EncodedRow

IGNORE_INDEX = -100  # label of a token without loss
ROUND_TO = 8  # T is a multiple of it: fewer distinct shapes for a compiler
T = TypeVar("T")
PADDING = -1  # document id of a padding token


@dataclass
class Batch:
    """One micro-batch, padded on the right.

    Preference pairs: document p is the chosen sequence of pair p, document S / 2 + p its rejected one.
    """

    input_ids: Tensor  # (R, T)
    labels: Tensor  # (R, T) the next token, IGNORE_INDEX for a token without loss
    lengths: Tensor  # (S,) tokens of each document
    names: list[str]  # file:line of each encoded row; empty for a dummy batch
    # (R, T) packed: the document of each token, PADDING for none; None: batch row r is document r
    document_ids: Tensor | None = None
    position_ids: Tensor | None = None  # (R, T) packed: position of each token in its document
    loss_weights: Tensor | None = None  # (R, T) fp32: weight of each label in the loss, 0 without one; None: all are 1

    @property
    def num_supervised_tokens(self) -> int:
        """Number of tokens with a label."""
        return int(np.count_nonzero(self.labels.numpy() != IGNORE_INDEX))

    @classmethod
    def from_arrays(cls, names: list[str], arrays: dict[str, np.ndarray]) -> Batch:
        """Return the batch with these names and tensors, by field."""
        return cls(names=names, **{name: torch.from_numpy(array) for name, array in arrays.items()})

    def __reduce__(self) -> tuple:
        """Pickle arrays: torch would send tensors through shared memory and file descriptors."""
        return Batch.from_arrays, (self.names, self._each_tensor(Tensor.numpy))

    def _each_tensor(self, change: Callable[[Tensor], T]) -> dict[str, T]:
        return {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """Keyword arguments of the model, for nll."""
        return {"labels": self.labels, **self.inputs_without_labels}

    @property
    def inputs_without_labels(self) -> dict[str, Tensor | None]:
        """Keyword arguments of the model, for logits."""
        return {name: getattr(self, name) for name in ("input_ids", "lengths", "document_ids", "position_ids")}

    @property
    def num_tokens(self) -> int:
        """Number of input tokens without padding."""
        return int(self.lengths.numpy().sum()) if self.names else 0

    def as_dummy(self) -> Batch:
        """Return a batch of the same shape without labels: for a rank that has no more rows while other ranks still
        have some.
        """
        return dataclasses.replace(self, labels=torch.full_like(self.labels, IGNORE_INDEX), loss_weights=None, names=[])

    def to(self, device: torch.device) -> Batch:
        # from pinned memory; mps reads a tensor later, when its memory may be another's
        is_cuda = device.type == "cuda"
        return Batch(names=self.names, **self._each_tensor(lambda tensor: tensor.to(device, non_blocking=is_cuda)))

    def pin_memory(self) -> Batch:
        """Copy to pinned memory, for asynchronous copies to a GPU."""
        return Batch(names=self.names, **self._each_tensor(Tensor.pin_memory))

    def sum_per_document(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each document: (R, T) -> (S,)."""
        if self.document_ids is None:
            return values.sum(-1)
        count = len(self.lengths)
        slots = torch.where(self.document_ids == PADDING, count, self.document_ids).flatten()
        return values.new_zeros(count + 1).index_add(0, slots, values.flatten())[:count]


def collate(
    sequences: list[list[EncodedRow]], pad_id: int, packed: bool, shape: tuple[int, int] | None = None
) -> Batch:
    """Return the batch of `sequences`: packed, one batch row per sequence; else one per document.

    shape: (R, T) of the batch, padded, for packed sequences of at most T tokens; None: as large as they need.
    """
    rows = [row for sequence in sequences for row in sequence]
    per_row = len(rows[0].sequences)
    # (id, tokens)
    documents = [[(part * len(rows) + i, row.sequences[part]) for part in range(per_row)] for i, row in enumerate(rows)]
    if packed:
        remaining = iter(documents)
        batch_rows = [
            [document for row in itertools.islice(remaining, len(sequence)) for document in row]
            for sequence in sequences
        ]
    else:
        batch_rows = [[row[part]] for part in range(per_row) for row in documents]
    width = max(sum(len(tokens.ids) - 1 for _, tokens in batch_row) for batch_row in batch_rows)
    R, T = shape or (len(batch_rows), width)
    T = -(-T // ROUND_TO) * ROUND_TO
    input_ids, labels = np.full((R, T), pad_id), np.full((R, T), IGNORE_INDEX)
    document_ids, position_ids = np.full((R, T), PADDING), np.zeros((R, T), np.int64)
    loss_weights = np.zeros((R, T), np.float32)
    lengths = np.empty(per_row * len(rows), np.int64)
    if shape:  # rows of padding only are one document each, also for models that find documents by positions
        position_ids[len(batch_rows) :] = np.arange(T)
    for r, batch_row in enumerate(batch_rows):
        start = 0
        for document_id, (ids, loss_mask) in batch_row:
            length = len(ids) - 1
            span = slice(start, start + length)
            input_ids[r, span] = ids[:-1]
            labels[r, span] = np.where(loss_mask[1:], ids[1:], IGNORE_INDEX)
            loss_weights[r, span] = loss_mask[1:]
            document_ids[r, span] = document_id
            position_ids[r, span] = np.arange(length)
            lengths[document_id] = length
            start += length
    arrays = {"input_ids": input_ids, "labels": labels, "lengths": lengths}
    if packed:
        arrays |= {"document_ids": document_ids, "position_ids": position_ids}
    if any(sequence.loss_mask.dtype != bool for row in rows for sequence in row.sequences):
        arrays["loss_weights"] = loss_weights
    return Batch.from_arrays([row.name for row in rows], arrays)
