"""Tables as rows: CSV, Parquet and Arrow, a few records at a time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from common.errors import UserError
from data.schemas.errors import BadRowError
from data.sources.byte_stream import MAX_LINE_BYTES, READ_BYTES, ItemPosition, Items, iter_lines


def read_csv(file: BinaryIO, where: ItemPosition) -> Items:
    """Records of a CSV file with a header, counted by the line they begin on; every value is a string."""
    csv.field_size_limit(MAX_LINE_BYTES)  # of the whole process; Python's own limit is 128 KB
    reader = csv.reader(_decode_lines(file, where), strict=True)
    try:
        header = next((cells for cells in reader if cells), [])
    except csv.Error as error:
        raise UserError(f"broken CSV: {error}", where(1), "the first line names the columns") from error
    if len({*header, ""}) <= len(header):
        raise UserError(f"the columns of the header are {', '.join(header)}", where(1), "give every column a name of its own in the first line")
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, BadRowError("broken CSV", f"broken CSV: {error}", where(line), "put quotes around a value with quotes in it, and double those")
            continue
        if cells:
            yield line, _csv_record(header, cells, where(line))


def _decode_lines(file: BinaryIO, where: ItemPosition) -> Iterator[str]:
    for _, line in iter_lines(file, where):
        if isinstance(line, BadRowError):
            raise ValueError(*line.args)  # where records begin is not known any more
        yield line.decode("utf-8", "surrogateescape")  # so that one wrong byte spoils one record, not the file


def _csv_record(header: list[str], cells: list[str], where: str) -> dict | BadRowError:
    if len(cells) != len(header):
        return BadRowError("broken CSV", f"{len(cells)} values under a header of {len(header)}", where, "is a comma outside of quotes, or missing?")
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return _not_utf8(where)
    return dict(zip(header, cells, strict=True))


def _not_utf8(where: str) -> BadRowError:
    return BadRowError("not UTF-8", "not UTF-8", where, "save the file as UTF-8, e.g. with: iconv -f LATIN1 -t UTF-8")


def read_parquet(file: BinaryIO, where: ItemPosition) -> Items:
    """Rows from 0, a batch at a time."""
    from pyarrow.parquet import ParquetFile

    def batches() -> Iterator[Any]:
        # Read part by part: reading ahead would hold a whole row group, and threads of its own do not survive a fork.
        stored = ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES)
        return stored.iter_batches(batch_size=256, use_threads=False)

    return _batch_rows(batches, where)


def read_arrow(file: BinaryIO, where: ItemPosition) -> Items:
    """Rows from 0 of an Arrow stream, which is how `datasets` keeps what it has loaded."""
    import pyarrow

    return _batch_rows(lambda: pyarrow.ipc.open_stream(file), where)


def _batch_rows(batches: Callable[[], Iterator[Any]], where: ItemPosition) -> Items:
    import pyarrow

    place = 0
    try:
        for batch in batches():
            for row in _unnest(batch):
                yield place, {name: _without_nulls(value) for name, value in row.items()} if row else _not_utf8(where(place))
                place += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"the table cannot be read: {str(error).strip()}", where(place), "is the file cut off? Copy or write it again") from error


def _unnest(batch: Any) -> Iterator[dict | None]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(len(batch)):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield None


def _without_nulls(value: Any) -> Any:
    """In Parquet every object of a list has the fields of all the others, filled with null."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
