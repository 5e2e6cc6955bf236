"""Readers of tables: CSV, Parquet and Arrow, a few rows at a time. What a reader is: data/sources/json_text.py."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from common.errors import UserError
from data.errors import BadRowError, not_utf8
from data.sources.byte_stream import MAX_ROW_BYTES, READ_BYTES, Items, Locate, iter_lines

UNNAMED = "Unnamed: 0"  # what pandas calls the column without a name that it writes the index of a table to


def read_csv(file: BinaryIO, locate: Locate, arguments: Mapping[str, Any]) -> Items:
    """Yield (line number, row) of a CSV file with a header; every value is a string. `arguments` are those of csv.reader."""
    csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process; Python's default is 128 KB
    reader = csv.reader(_decode_lines(file, locate), strict=True, **arguments)
    try:
        header = next((cells for cells in reader if cells), [])
    except csv.Error as error:
        raise UserError(f"invalid CSV: {error}", locate(1), "name the columns in the first line") from error
    if header and header[0].lower() == "sep=":
        raise UserError("the first line is a note for Excel, not the names of the columns", locate(1), "delete the first line")
    if header and not header[0]:
        header[0] = UNNAMED
    if len({*header, ""}) <= len(header):
        raise UserError(f"the columns of a CSV file need different names, got {', '.join(header)}", locate(1), "name each column in the first line")
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, BadRowError("invalid CSV", f"invalid CSV: {error}", locate(line), 'quote values that contain quotes, and double these: "a ""b"" c"')
            continue
        if cells:
            yield line, _csv_row(header, cells, locate(line))


def _decode_lines(file: BinaryIO, locate: Locate) -> Iterator[str]:
    for _, line in iter_lines(file, locate):
        if isinstance(line, BadRowError):
            raise UserError(line.message, line.setting, line.fix)  # of the file: where the next row begins is unknown
        yield line.decode("utf-8", "surrogateescape")  # an invalid byte makes one row invalid, not the file


def _csv_row(header: list[str], cells: list[str], where: str) -> dict | BadRowError:
    if len(cells) != len(header):
        return BadRowError("invalid CSV", f"the row has {len(cells)} values, the header {len(header)}", where, "quote values that contain the delimiter")
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return not_utf8(where)
    return dict(zip(header, cells, strict=True))


def read_parquet(file: BinaryIO, locate: Locate) -> Items:
    """Yield (index from 0, row), a batch of rows at a time."""
    from pyarrow.parquet import ParquetFile

    def batches() -> Iterator[Any]:
        # pre_buffer would hold a whole row group in memory, and threads do not survive a fork.
        table = ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES)
        return table.iter_batches(batch_size=256, use_threads=False)

    return _iter_table(batches, locate)


def read_arrow(file: BinaryIO, locate: Locate) -> Items:
    """Yield (index from 0, row) of an Arrow stream, the format in which `datasets` caches data sets."""
    import pyarrow

    return _iter_table(lambda: pyarrow.ipc.open_stream(file), locate)


def _iter_table(batches: Callable[[], Iterator[Any]], locate: Locate) -> Items:
    import pyarrow

    index = 0
    try:
        for batch in batches():
            for row in _batch_rows(batch):
                yield index, {name: _without_nulls(value) for name, value in row.items()} if row else not_utf8(locate(index))
                index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"the table cannot be read: {str(error).strip()}", locate(index), "copy or write the file again; it may be truncated") from error


def _batch_rows(batch: Any) -> Iterator[dict | None]:
    """Yield the rows of a batch, None for a row that is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(len(batch)):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield None


def _without_nulls(value: Any) -> Any:
    """Drop null fields: in Parquet every object of a list has the fields of all the others, filled with null."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
