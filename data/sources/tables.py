"""Rows of CSV, Parquet and Arrow files, a few at a time, and data sets of the Hugging Face hub.

What a reader is: data/sources/json_text.py. Data sets of the hub need the optional library `datasets`.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError
from common.limits import MAX_JSON_VALUES, allocating_at_most
from data.sources.byte_stream import (
    MAX_ROW_BYTES,
    READ_BYTES,
    Items,
    Locate,
    check_expansion,
    iter_lines,
    row_too_large,
)
from data.types import BadRowError, not_utf8

BATCH_ROWS = (256, 16, 1)  # read at a time; fewer where they do not fit into memory
MAX_BATCH_BYTES = 256 << 20  # of memory that reading or converting a batch may need
ROW_BYTES = 256  # that a row counts at least: of its dict
UNNAMED = "Unnamed: 0"  # what pandas calls the column without a name that it writes the index of a table to


def read_csv(file: BinaryIO, locate: Locate, arguments: Mapping[str, Any]) -> Items:
    """Yield (line number, row) of a CSV file with a header; every value is a string.

    `arguments` are those of csv.reader.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process; Python's default is 128 KB
    record_bytes = 0  # quotes can join any number of lines

    def decoded_lines() -> Iterator[str]:
        nonlocal record_bytes
        for number, line in iter_lines(file, locate):
            record_bytes += len(line) if isinstance(line, bytes) else 0
            if isinstance(line, bytes) and (
                record_bytes > MAX_ROW_BYTES
                or line.count(b"\t") + line.count(b";") + line.count(b",") > MAX_JSON_VALUES
            ):
                line = row_too_large(locate(number))
            if isinstance(line, BadRowError):
                # of the file: where the next row begins is unknown
                raise UserError(line.message, line.setting, line.fix)
            yield line.decode("utf-8", "surrogateescape")  # an invalid byte makes one row invalid, not the file

    reader = csv.reader(decoded_lines(), strict=True, **arguments)
    try:
        header = next((cells for cells in reader if cells), [])
    except csv.Error as error:
        fix = "name the columns in the first line; of a file for old Macs: tr '\\r' '\\n' < FILE > NEW"
        raise UserError(f"invalid CSV: {error}", locate(1), fix) from error
    if header and header[0].lower() == "sep=":
        raise UserError(
            "the first line is a note for Excel, not the names of the columns", locate(1), "delete the first line"
        )
    if header and not header[0]:
        header[0] = UNNAMED
    if len({*header, ""}) <= len(header):
        raise UserError(
            f"the columns of a CSV file need different names, got {', '.join(header)}",
            locate(1),
            "name each column in the first line",
        )
    while True:
        line, record_bytes = reader.line_num + 1, 0
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield (
                line,
                BadRowError(
                    "invalid CSV",
                    f"invalid CSV: {error}",
                    locate(line),
                    'quote values that contain quotes, and double these: "a ""b"" c"',
                ),
            )
            continue
        if cells:
            yield line, _csv_row(header, cells, locate(line))


def _csv_row(header: list[str], cells: list[str], where: str) -> dict | BadRowError:
    if len(cells) != len(header):
        return BadRowError(
            "invalid CSV",
            f"the row has {len(cells)} values, the header {len(header)}",
            where,
            "quote values that contain the delimiter",
        )
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return not_utf8(where)
    return dict(zip(header, cells, strict=True))


def read_parquet(file: BinaryIO, locate: Locate) -> Items:
    """Yield (index from 0, row), a batch of rows at a time."""
    from pyarrow.parquet import ParquetFile

    def batches(rows: int) -> Iterator[Any]:
        # pre_buffer would hold a whole row group in memory, and threads do not survive a fork.
        table = ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES)
        return table.iter_batches(batch_size=rows, use_threads=False)

    return _iter_table(batches, file, locate)


def read_arrow(file: BinaryIO, locate: Locate) -> Items:
    """Yield (index from 0, row) of an Arrow stream, the format in which `datasets` caches data sets, or of an Arrow file
    (Feather), which is a stream after its first 8 bytes.
    """
    import pyarrow

    def batches(rows: int) -> Iterator[Any]:
        file.seek(0)
        file.seek(8 if file.read(6) == b"ARROW1" else 0)
        for batch in pyarrow.ipc.open_stream(file):
            batch.validate()  # that its buffers are as long as they say
            yield from (batch.slice(start, rows) for start in range(0, len(batch), rows))

    return _iter_table(batches, file, locate)


def _iter_table(batches: Callable[[int], Iterator[Any]], file: BinaryIO, locate: Locate) -> Items:
    """Yield the rows of a table. `batches(n)` reads it from its first row on, at most n rows at a time."""
    import pyarrow

    stored, expanded, index = file.seek(0, os.SEEK_END), 0, 0
    try:
        for rows_per_batch in BATCH_ROWS:
            try:
                for batch in _bounded_batches(partial(batches, rows_per_batch), index):
                    expanded += batch.nbytes + ROW_BYTES * len(batch)
                    check_expansion(expanded, stored, locate(index))
                    for row in _batch_rows(batch, locate, index):
                        yield index, row
                        index += 1
                return
            except MemoryError:  # of a batch; read again from its first row on, fewer rows at a time
                continue
        fix = "write the table again with shorter rows"
        raise UserError(f"the row cannot be read within {MAX_BATCH_BYTES >> 20} MB of memory", locate(index), fix)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"the table cannot be read: {str(error).strip()}",
            locate(index),
            "copy or write the file again; it may be truncated",
        ) from error


def _bounded_batches(open_table: Callable[[], Iterator[Any]], skip: int) -> Iterator[Any]:
    """Yield the batches of a table without its first `skip` rows.

    Raises MemoryError if one needs more than MAX_BATCH_BYTES.
    """
    with allocating_at_most(MAX_BATCH_BYTES):
        table = open_table()
    while True:
        with allocating_at_most(MAX_BATCH_BYTES):
            batch = next(table, None)
        if batch is None:
            return
        if skip < len(batch):
            yield batch.slice(skip)
        skip = max(0, skip - len(batch))


def _batch_rows(batch: Any, locate: Locate, first: int) -> Iterator[dict | BadRowError]:
    """Yield the rows of a batch, the first of which has the index `first`; of one that is large, or has a row that is
    not UTF-8, row by row.
    """
    if batch.nbytes <= MAX_ROW_BYTES and not isinstance(rows := _to_rows(batch), BadRowError):
        yield from rows
        return
    for i in range(len(batch)):
        row = batch.slice(i, 1)
        where = locate(first + i)
        rows = _to_rows(row, where) if row.nbytes <= MAX_ROW_BYTES else row_too_large(where)
        yield rows if isinstance(rows, BadRowError) else rows[0]


def _to_rows(batch: Any, where: str = "") -> list[dict] | BadRowError:
    import pyarrow

    try:
        with allocating_at_most(MAX_BATCH_BYTES):
            batch.validate(full=True)  # offsets of a damaged file would read other memory
            return [{name: _without_nulls(value) for name, value in row.items()} for row in batch.to_pylist()]
    except pyarrow.ArrowInvalid as error:
        return not_utf8(where, str(error))
    except MemoryError:  # a dictionary whose values are used many times
        return row_too_large(where)


def _without_nulls(value: Any) -> Any:
    """Drop null fields: in Parquet every object of a list has the fields of all the others, filled with null."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


HUB_NAME = "hub:owner/name[@config][:split]"


def load_hub_dataset(name: str, preferred: Sequence[str] = ("train",)) -> Iterator[tuple[Path, str]]:
    """Yield (Arrow file in the cache of `datasets`, name for messages) of each part of the data set `name`
    (hub:owner/name or hub:FOLDER).

    Without a split in the name it is the first of `preferred` that the data set has, or the only one. Uses the network
    if the data set is not in the cache.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data sets of the Hugging Face Hub need the library datasets", name, "pip install '.[hub]'"
        ) from error

    path, config, split = _parse_hub_name(name)
    try:
        splits: Any = datasets.load_dataset(path, config)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # no such data set, or no network
        reason = " ".join(str(error).split())
        fix = f"check the name ({HUB_NAME}); without network, only data sets in the cache can be read"
        if Path(path).is_dir():
            fix = f"data.path={path} reads the files of a folder"
        raise UserError(f"the data set cannot be loaded: {reason}", name, fix) from error
    split = split or next(
        (choice for choice in preferred if choice in splits), next(iter(splits)) if len(splits) == 1 else None
    )
    if split not in splits:
        raise UserError(
            f"the split must be one of {', '.join(map(str, splits))}, got {split or 'no name of a split'}",
            name,
            f"e.g. hub:{path}:{next(iter(splits))}",
        )
    for number, shard in enumerate(splits[split].cache_files):
        yield Path(shard["filename"]), f"hub:{path}:{split}" + (f"#{number}" if number else "")


def _parse_hub_name(name: str) -> tuple[str, str | None, str | None]:
    """Return (path, config, split) of hub:path[@config][:split]; the path of a folder may contain `:` and `@`."""
    path, split, config = name.removeprefix("hub:"), "", ""
    if not Path(path).is_dir():
        head, _, tail = path.rpartition(":")
        path, split = (head, tail) if head else (path, "")
    if not Path(path).is_dir():
        path, _, config = path.partition("@")
    return path, config or None, split or None
