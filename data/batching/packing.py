"""Packed sequences: the rows of a plan (packing_plan.py), read from the cache. A plan is read with pread, so memory does not grow with the number of rows."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.filesystem import atomic_path, crc32_of, dump_sealed_json, fs, load_sealed_json, write_all, write_atomic_file
from data.batching.packing_plan import PLAN_VERSION, count_sequences, draw_plan, read_slices
from data.store.cache import ProgressCallback, no_progress, open_or_build
from data.types import EncodedRow, RowSource

PLAN_TAIL = 3 * 8  # bytes: number of rows, of sequences, crc32 of all bytes before the tail
OPEN_PLANS = 2  # batches are prepared in advance: for a while an epoch and the next one are both read


class EpochPlan:
    """Row indices of each packed sequence of an epoch: int64 values, those of `_plan_values`."""

    def __init__(self, read: Callable[[int, int], np.ndarray], num_rows: int) -> None:
        self._read, self._num_rows = read, num_rows

    def rows_of(self, i: int) -> list[int]:
        start, stop = self._read(self._num_rows + i, self._num_rows + i + 2).tolist()
        return self._read(start, stop).tolist()


class PackedSequences:
    """`packed[i]` is the list of rows of sequence i % len(packed) in epoch i // len(packed). Each epoch packs other rows together."""

    def __init__(self, rows: RowSource, capacity: int, cache: Path, seed: int = 0, progress: ProgressCallback = no_progress) -> None:
        """`progress` gets (rows done, all rows, rows done), as for a store. Raises UserError if `cache` cannot be written."""
        self.rows, self.capacity, self.seed = rows, capacity, seed
        self.fingerprint = hashlib.sha256(f"{rows.fingerprint} {capacity} {PLAN_VERSION}".encode()).hexdigest()
        self.path = cache / f"{self.fingerprint}.packing"
        self.progress: ProgressCallback = progress
        self._sizes = open_or_build(self.path, self._read_sizes, self._write_sizes, "the packing plan")
        self._num_sequences = sum(self._sizes)
        self._plans = {0: self._stored_plan(0)}
        self.progress = no_progress

    def __len__(self) -> int:
        return self._num_sequences

    @property
    def fill_ratio(self) -> float:
        """Share of the tokens that are no padding."""
        return self._num_tokens / (self._num_sequences * self.capacity)

    def __getitem__(self, i: int) -> list[EncodedRow]:
        epoch, number = divmod(i, len(self))
        if epoch not in self._plans:
            self._open_epoch(epoch)
        return [self.rows[row] for row in self._plans[epoch].rows_of(number)]

    def __getstate__(self) -> dict:
        return {**vars(self), "_plans": {}, "progress": no_progress}

    def _open_epoch(self, epoch: int) -> None:
        try:
            plan = self._stored_plan(epoch)
        except UserError:  # a full disk does not end a training: 8 bytes per row in memory do, too
            values = np.concatenate(list(self._plan_values(epoch)))
            plan = EpochPlan(lambda start, stop: values[start:stop], len(self.rows))
        while len(self._plans) >= OPEN_PLANS:
            oldest = next(iter(self._plans))
            del self._plans[oldest]
            if oldest:  # every run begins with the plan of epoch 0
                with suppress(OSError):
                    self._plan_path(oldest).unlink()
        self._plans[epoch] = plan

    def _stored_plan(self, epoch: int) -> EpochPlan:
        path = self._plan_path(epoch)
        return open_or_build(path, lambda: self._open_plan(path), lambda: _write_plan(path, self._plan_values(epoch)), "the packing plan")

    def _plan_path(self, epoch: int) -> Path:
        return self.path.with_name(f"{self.path.name}@{self.seed}-{epoch}")

    def _plan_values(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield int64 values: the row indices of all sequences, then the start of each sequence in them and the end of the last."""
        counts = [np.zeros(1, np.int64)]
        for part, size in zip(read_slices(self.rows, self.progress), self._sizes, strict=True):
            sequences = draw_plan(part, self.capacity, size, self.seed, epoch)
            counts.append(np.array([len(sequence) for sequence in sequences]))
            yield part.members[np.concatenate(sequences)]
        yield np.cumsum(np.concatenate(counts))

    def _open_plan(self, path: Path) -> EpochPlan | None:
        """Open a stored plan; None if there is no complete one."""
        try:
            file = _PlanFile(path)
        except FileNotFoundError:
            return None
        size = os.fstat(file.fd).st_size - PLAN_TAIL
        expected = [len(self.rows), len(self)]
        if size != 8 * (sum(expected) + 1) or np.frombuffer(os.pread(file.fd, PLAN_TAIL, size), np.int64).tolist() != [*expected, crc32_of(file.fd, size)]:
            return None
        return EpochPlan(file.read, len(self.rows))

    def _read_sizes(self) -> list[int] | None:
        """Return the number of sequences of each slice; None if the file is missing or damaged."""
        try:
            content = load_sealed_json(self.path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        self._num_tokens: int = content["tokens"]
        return content["sequences"]

    def _write_sizes(self) -> None:
        sizes, tokens = [], 0
        for part in read_slices(self.rows, self.progress):
            sizes.append(count_sequences(part, self.capacity))
            tokens += int(part.lengths.sum())
        write_atomic_file(self.path, dump_sealed_json({"sequences": sizes, "tokens": tokens}))


class _PlanFile:
    """Open plan, closed with its last reference."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.frombuffer(os.pread(self.fd, 8 * (stop - start), 8 * start), np.int64)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def _write_plan(path: Path, parts: Iterator[np.ndarray]) -> None:
    """Write the values and a tail."""
    with atomic_path(path) as temp:
        fd = fs.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            sizes, checksum = [], 0
            for part in parts:
                raw = part.astype(np.int64).tobytes()
                checksum = zlib.crc32(raw, checksum)
                write_all(fd, raw)
                sizes.append(len(part))
            write_all(fd, np.array([sum(sizes[:-1]), sizes[-1] - 1, checksum], np.int64).tobytes())
            fs.fsync(fd)
        finally:
            fs.close(fd)
