"""Data files that expand: read in bounded memory, refused or skipped by name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import UserError
from common.limits import allocating_at_most
from data.sources import byte_stream, tables
from data.sources.files import Source
from data.types import BadRowError

MIB = 1 << 20


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb of 8 MiB in place of one of 40 GB."""
    monkeypatch.setattr(byte_stream, "MIN_EXPANDED_BYTES", MIB)


def read(path: Path) -> tuple[list[int], list[BadRowError]]:
    bad: list[BadRowError] = []
    return [position for position, _ in Source.open(path).rows(bad.append)], bad


def compress_zstd(content: bytes) -> bytes:
    sink = io.BytesIO()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
        out.flush()
        return sink.getvalue()


@pytest.mark.parametrize(
    ("extension", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", compress_zstd)],
)
@pytest.mark.parametrize(
    "content",
    [b'{"text": "' + b"a" * 8 * MIB, (b'{"text": "' + b"a" * 500 + b'"}\n') * (8 * MIB // 512)],
    ids=["one row", "many rows"],
)
def test_compressed_file_that_expands_is_refused(
    extension: str, compress: Callable[[bytes], bytes], content: bytes, tmp_path: Path, small_limits: None
) -> None:
    path = tmp_path / f"rows.jsonl{extension}"
    path.write_bytes(compress(content))
    with pytest.raises(UserError, match="expands to more than 200 times its size"):
        read(path)


def write_repeated(path: Path, text: str, rows: int) -> None:
    """A table that holds `text` once."""
    values = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    pq.write_table(
        pa.table({"text": values}), path, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30
    )


@pytest.mark.parametrize(("text", "rows"), [("a" * 1000, 100_000), ("a" * (MIB // 16), 2000)])
def test_parquet_file_that_expands_is_refused(text: str, rows: int, tmp_path: Path, small_limits: None) -> None:
    write_repeated(tmp_path / "rows.parquet", text, rows)
    assert (tmp_path / "rows.parquet").stat().st_size < 20_000
    with pytest.raises(UserError, match="expands to more than 200 times its size"):
        read(tmp_path / "rows.parquet")


@pytest.mark.slow
def test_parquet_batch_that_does_not_fit_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 rows of 12 MiB in one batch need more than the limit, one of them does not."""
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 60 * MIB)
    write_repeated(tmp_path / "rows.parquet", "a" * 12 * MIB, 3)
    assert read(tmp_path / "rows.parquet") == ([0, 1, 2], [])


def test_parquet_row_above_the_limit_is_skipped_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", MIB)
    pq.write_table(pa.table({"text": ["a", "b" * 2 * MIB, "c"]}), tmp_path / "rows.parquet")
    positions, bad = read(tmp_path / "rows.parquet")
    assert positions == [0, 2] and [error.reason for error in bad] == ["row too large"]
    monkeypatch.setattr(tables, "allocating_at_most", out_of_memory)
    with pytest.raises(UserError, match="cannot be read within 256 MB of memory"):
        read(tmp_path / "rows.parquet")


def out_of_memory(size: int) -> Any:
    raise MemoryError


def write_arrow(path: Path, batch: Any) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batch.schema) as out:
        out.write_batch(batch)


def test_arrow_file_whose_offsets_point_outside_has_bad_rows(tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 40, 2], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"ab")])
    write_arrow(tmp_path / "rows.arrow", pa.record_batch({"text": texts}))
    positions, bad = read(tmp_path / "rows.arrow")
    assert positions == [0] and len(bad) == 2


def test_arrow_dictionary_used_many_times_is_converted_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 64 * MIB)
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array(["a" * MIB]))
    write_arrow(tmp_path / "rows.arrow", pa.record_batch({"text": values}))
    assert read(tmp_path / "rows.arrow") == (list(range(200)), [])


def test_csv_record_over_many_lines_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", MIB)
    field = '"' + ("a" * 1000 + "\n") * 600 + '"'
    (tmp_path / "rows.csv").write_text(f"text,a,b\n{field},1,2\n{field},{field},{field}\n")
    with pytest.raises(UserError, match="the row is larger than"):
        read(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("deep.jsonl", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "JSON beyond limits"),
        ("deep_row.jsonl", b'{"text": "x", "a": ' + b"[" * 200 + b"]" * 200 + b"}", "JSON beyond limits"),
        ("many.jsonl", b'{"a": [' + b"{}," * 4_000_000 + b"{}]}", "JSON beyond limits"),
        ("numbers.json", b"[" + b"1," * 4_000_001 + b"1]", "invalid JSON"),
    ],
)
def test_row_beyond_the_limits_of_the_parser_is_a_bad_row(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content + b"\n" + (b'{"text": "x"}\n' if name.endswith("l") else b""))
    assert [error.reason for error in read(tmp_path / name)[1]] == [reason]


def test_file_of_brackets_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(b"[" * 20 * MIB)
    with pytest.raises(UserError, match="brackets are open at once"):
        read(tmp_path / "rows.json")


def test_memory_limit_ends_with_its_block() -> None:
    with pytest.raises(MemoryError), allocating_at_most(64 * MIB):
        bytearray(256 * MIB)
    assert len(bytearray(256 * MIB)) == 256 * MIB
