"""Micro-batches: encoded rows as tensors, padded to one width.

Shapes: R batch rows, T tokens of a batch row, S documents. A document is one token sequence of an encoded row: a row
has one, a preference pair two. Without packing each document is a batch row (R = S); a packed sequence holds several (R
< S).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from data.batching.sampler import ORDER_VERSION
from data.types import EncodedRow, RowSource

IGNORE_INDEX = -100  # label of a token without loss
ROUND_TO = 8  # T is a multiple of it: fewer distinct shapes for a compiler
PADDING = -1  # document id of a padding token


class SequenceSource(Protocol):
    """What the loader batches: sequences, each a list of encoded rows (one, or several packed rows).

    `sequences[i]` is sequence i % len(sequences) of epoch i // len(sequences): packing differs between epochs.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> list[EncodedRow]: ...
    @property
    def rows(self) -> RowSource: ...
    @property
    def fingerprint(self) -> str: ...  # of the rows, and of what decides their order besides the seed


@dataclass
class UnpackedSequences:
    """Each encoded row is a sequence of its own."""

    rows: RowSource

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[EncodedRow]:
        return [self.rows[index % len(self.rows)]]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.rows.fingerprint} {ORDER_VERSION}".encode()).hexdigest()


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

    @property
    def _tensors(self) -> dict[str, Tensor | None]:
        return {**self.inputs, "loss_weights": self.loss_weights}

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
        moved = {
            name: None if tensor is None else tensor.to(device, non_blocking=is_cuda)
            for name, tensor in self._tensors.items()
        }
        return Batch(names=self.names, **moved)  # type: ignore[arg-type]  # the fields of a batch, by name

    def pin_memory(self) -> Batch:
        """Copy to pinned memory, for asynchronous copies to a GPU."""
        return Batch(
            names=self.names,
            **{name: None if tensor is None else tensor.pin_memory() for name, tensor in self._tensors.items()},  # type: ignore[arg-type]  # as in `to`
        )

    def to_bytes(self) -> bytes:
        """Return the batch as bytes, for a pipe."""
        arrays = {name: tensor.numpy() for name, tensor in self._tensors.items() if tensor is not None}
        header = json.dumps([self.names, {name: array.shape for name, array in arrays.items()}]).encode()
        return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays.values())])

    @classmethod
    def from_bytes(cls, content: bytes) -> Batch:
        """Return the batch of `to_bytes`."""
        start = 8 + int.from_bytes(content[:8], "little")
        names, shapes = json.loads(content[8:start])
        tensors = {}
        for name, shape in shapes.items():
            dtype = np.float32 if name == "loss_weights" else np.int64
            array = np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)
            tensors[name] = torch.from_numpy(array.copy())  # writable, and aligned
            start += array.nbytes
        return cls(names=names, **tensors)

    def sum_per_document(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each document: (R, T) -> (S,)."""
        if self.document_ids is None:
            return values.sum(-1)
        count = len(self.lengths)
        slots = torch.where(self.document_ids == PADDING, count, self.document_ids).flatten()
        return values.new_zeros(count + 1).index_add(0, slots, values.flatten())[:count]


def collate(sequences: list[list[EncodedRow]], pad_id: int, packed: bool) -> Batch:
    """Return the batch of `sequences`: packed, one batch row per sequence; else one per document."""
    rows = [row for sequence in sequences for row in sequence]
    per_row = len(rows[0].sequences)
    # (id, tokens)
    documents = [[(part * len(rows) + i, row.sequences[part]) for part in range(per_row)] for i, row in enumerate(rows)]
    if packed:
        ends = np.cumsum([len(sequence) for sequence in sequences]).tolist()
        batch_rows = [
            [document for row in documents[end - len(sequence) : end] for document in row]
            for end, sequence in zip(ends, sequences, strict=True)
        ]
    else:
        batch_rows = [[row[part]] for part in range(per_row) for row in documents]
    width = max(sum(len(tokens.ids) - 1 for _, tokens in batch_row) for batch_row in batch_rows)
    shape = (len(batch_rows), -(-width // ROUND_TO) * ROUND_TO)
    input_ids, labels = np.full(shape, pad_id), np.full(shape, IGNORE_INDEX)
    document_ids, position_ids = np.full(shape, PADDING), np.zeros(shape, np.int64)
    lengths = np.empty(per_row * len(rows), np.int64)
    is_weighted = any(sequence.loss_mask.dtype != bool for row in rows for sequence in row.sequences)
    loss_weights = np.zeros(shape, np.float32) if is_weighted else None
    for r, batch_row in enumerate(batch_rows):
        start = 0
        for document_id, (ids, loss_mask) in batch_row:
            length = len(ids) - 1
            span = slice(start, start + length)
            input_ids[r, span] = ids[:-1]
            labels[r, span] = np.where(loss_mask[1:], ids[1:], IGNORE_INDEX)
            if loss_weights is not None:
                loss_weights[r, span] = loss_mask[1:]
            document_ids[r, span] = document_id
            position_ids[r, span] = np.arange(length)
            lengths[document_id] = length
            start += length
    layout = (torch.from_numpy(document_ids), torch.from_numpy(position_ids)) if packed else (None, None)
    batch = Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(labels),
        torch.from_numpy(lengths),
        [row.name for row in rows],
        *layout,
    )
    return batch if loss_weights is None else dataclasses.replace(batch, loss_weights=torch.from_numpy(loss_weights))
