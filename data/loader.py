"""Rows in, optimizer steps out: which rows a step holds is a function of (seed, epoch, step).

Shapes: R sequences of a micro-batch (2 a row for preference pairs), T positions.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data.order import shuffled
from data.rows import Row

IGNORE = -100  # the label of a position that carries no loss
ROUND_TO = 8  # widths vary less: fewer shapes for a compiler to meet


class RowSource(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...


@dataclass
class Batch:
    """One micro-batch, padded on the right. Preference pairs: all chosen sides, then all rejected sides."""

    input_ids: Tensor  # (R, T)
    labels: Tensor  # (R, T) the token that follows each position, IGNORE where it carries no loss
    lengths: Tensor  # (R,) positions that are not padding
    names: list[str]  # where each row comes from, for messages

    @property
    def supervised(self) -> int:
        """Tokens that carry loss."""
        return int((self.labels != IGNORE).sum())

    def to(self, device: torch.device) -> Batch:
        input_ids, labels, lengths = (tensor.to(device, non_blocking=True) for tensor in (self.input_ids, self.labels, self.lengths))
        return Batch(input_ids, labels, lengths, self.names)


def collate(rows: list[Row], pad_id: int) -> Batch:
    sequences = [row.sequences[side] for side in range(len(rows[0].sequences)) for row in rows]
    longest = max(len(sequence.ids) - 1 for sequence in sequences)
    width = -(-longest // ROUND_TO) * ROUND_TO
    input_ids = torch.full((len(sequences), width), pad_id)  # (R, T)
    labels = torch.full((len(sequences), width), IGNORE)
    lengths = torch.empty(len(sequences), dtype=torch.int64)
    for r, sequence in enumerate(sequences):
        length = len(sequence.ids) - 1
        ids = torch.from_numpy(sequence.ids.astype(np.int64))
        input_ids[r, :length] = ids[:-1]
        labels[r, :length] = torch.where(torch.from_numpy(sequence.learn[1:].copy()), ids[1:], IGNORE)
        lengths[r] = length
    return Batch(input_ids, labels, lengths, [row.name for row in rows])


class StepLoader:
    """`steps(epoch, skip)` yields each optimizer step as its list of micro-batches; the last, short step is used too.

    Step s of an epoch holds rows [s * global_batch, (s + 1) * global_batch) of the shuffled order, so the rows
    of a step do not depend on how the step is cut into micro-batches or ranks, nor on the number of workers.
    """

    def __init__(self, rows: RowSource, *, batch_size: int, accumulation_steps: int, seed: int, pad_id: int, num_workers: int = 0) -> None:
        self.rows, self.seed, self.pad_id, self.num_workers = rows, seed, pad_id, num_workers
        self.batch_size, self.global_batch = batch_size, batch_size * accumulation_steps

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.global_batch)

    def steps(self, epoch: int, skip: int = 0) -> Iterator[list[Batch]]:
        loader: DataLoader = DataLoader(
            self.rows,  # type: ignore[arg-type]  # anything with __len__ and __getitem__ serves, as torch documents
            batch_sampler=(batch for step in range(skip, self.steps_per_epoch) for batch in self._indices(epoch, step)),
            collate_fn=_Collate(self.pad_id),
            num_workers=self.num_workers,
            generator=torch.Generator(),  # its own: opening a loader must not draw from the run's random state
        )
        with _signals_held():
            batches = iter(loader)
        for step in range(skip, self.steps_per_epoch):
            yield [next(batches) for _ in self._indices(epoch, step)]

    def _indices(self, epoch: int, step: int) -> list[list[int]]:
        """The rows of each micro-batch of one step."""
        last = min((step + 1) * self.global_batch, len(self.rows))
        rows = shuffled(np.arange(step * self.global_batch, last), len(self.rows), self.seed, epoch).tolist()
        return [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]


@dataclass
class _Collate:
    """A class and not a lambda: workers that are spawned receive it by name."""

    pad_id: int

    def __call__(self, rows: list[Row]) -> Batch:
        return collate(rows, self.pad_id)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C reaches the whole group. Workers begin with what is held here and go on holding it: they outlive the signal from their
    first moment on, so that the training process can finish its step."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
