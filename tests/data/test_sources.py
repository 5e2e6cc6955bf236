"""Data sources: rows of every file format, positions of bad rows, limits on memory, errors of paths."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from data.sources import byte_stream, json_text
from data.sources.files import ReadOptions, Source, open_entry
from data.sources.splits import EVALUATION_SPLITS
from data.sources.tables import read_arrow
from data.types import BadRowError

ROWS = [{"text": "one\u2028still one"}, {"text": 'tab\t, "quotes"\nand a line'}, {"text": "二"}]


def json_lines(rows):
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def as_csv(rows):
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def as_parquet(rows, **options):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out, **options)
    return out.getvalue()


def zstd(content):
    return pyarrow.compress(content, "zstd", asbytes=True)


CONTENT = {
    "rows.jsonl": json_lines(ROWS),
    "rows.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": json_lines(ROWS),
    "array.jsonl": json.dumps(ROWS).encode(),
    "rows.csv": as_csv(ROWS),
    "rows.parquet": as_parquet(ROWS, row_group_size=2),
    "rows": json_lines(ROWS),
    "array": json.dumps(ROWS).encode(),
    "table": as_parquet(ROWS),
}


def read(path):
    """Return [(position, row)] and [(reason, position)] of bad rows; positions without the path."""
    source, bad = Source.open(path), []
    rows = [(source.where(position).removeprefix(str(path)), row) for position, row in source.rows(bad.append)]
    return rows, [(error.reason, error.setting.removeprefix(str(path))) for error in bad]


@pytest.mark.parametrize(
    "compress, extension",
    [
        (bytes, ""),
        (gzip.compress, ".gz"),
        (zstd, ".zst"),
        (bz2.compress, ".bz2"),
        (lzma.compress, ".xz"),
        (gzip.compress, ""),
    ],
    ids=["plain", "gz", "zst", "bz2", "xz", "gz unnamed"],
)
@pytest.mark.parametrize("name", CONTENT)
def test_source_gives_the_same_rows_for_every_file_format(write, name, compress, extension):
    rows, bad = read(write(compress(CONTENT[name]), name + extension))
    assert [row for _, row in rows] == ROWS and bad == []


@pytest.mark.parametrize("cut", [1, 20])
@pytest.mark.parametrize("compress, extension", [(bz2.compress, ".bz2"), (lzma.compress, ".xz")])
def test_source_reports_a_truncated_compressed_file(write, compress, extension, cut):
    content = compress(json_lines([{"text": f"{number} goats"} for number in range(200)]))
    with pytest.raises((UserError, BadRowError)) as error:
        list(Source.open(write(content[:-cut], f"rows.jsonl{extension}")).rows())
    assert "copy" in error.value.fix


def as_table(delimiter, rows=ROWS, **options):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, **options)
    writer.writerows([list(rows[0]), *[list(row.values()) for row in rows]])
    return out.getvalue().encode()


QA = [{"prompt": f"a, b; {i}?", "completion": f"the answer is {i}"} for i in range(5)]


def test_source_refuses_the_line_of_excel_before_the_header(write):
    """Before: the columns of a CSV file need different names, got sep=, ."""
    with pytest.raises(UserError) as error:
        list(Source.open(write(b"sep=;\r\n" + as_table(";", QA), "rows.csv")).rows())
    assert "note for Excel" in error.value.message and error.value.fix == "delete the first line"


def test_source_says_how_to_convert_the_line_ends_of_old_macs(write):
    """Excel writes such files as CSV (Macintosh). Before: name the columns in the first line."""
    with pytest.raises(UserError) as error:
        list(Source.open(write(b"prompt,completion\rHi,Hello\r", "rows.csv")).rows())
    assert "tr '\\r' '\\n' < FILE > NEW" in error.value.fix


@pytest.mark.parametrize(
    "delimiter, message",
    [(",", ""), (";", "columns separated by ;"), ("\t", "columns separated by tabs"), ("|", "columns separated by |")],
)
def test_source_detects_the_delimiter_of_a_csv_file(write, delimiter, message):
    """Before: a file of Excel in a country with decimal commas had one column, and was refused for its name."""
    source = Source.open(write(as_table(delimiter, QA), "rows.csv"))
    assert [row for _, row in source.rows()] == QA and source.detected == message


def test_source_reads_tsv_with_and_without_quotes(write):
    assert [row for _, row in Source.open(write(as_table("\t"), "rows.tsv")).rows()] == ROWS
    source = Source.open(write(b'prompt\tcompletion\n"Hi" she said\tok\n5" disc\t"yes\n', "rows.tsv"))
    assert [row for _, row in source.rows()] == [
        {"prompt": '"Hi" she said', "completion": "ok"},
        {"prompt": '5" disc', "completion": '"yes'},
    ]
    assert source.detected == "columns separated by tabs, quotes are text"


def test_source_of_one_column_has_no_delimiter(write):
    rows = [row for _, row in Source.open(write(b"text\nfirst; line\nsecond | line\n", "rows.csv")).rows()]
    assert rows == [{"text": "first; line"}, {"text": "second | line"}]


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_source_reads_the_unnamed_index_of_pandas(write, delimiter):
    """Before: `the columns of a CSV file need different names`."""
    rows = [{"": i, **row} for i, row in enumerate(QA)]
    source = Source.open(write(as_table(delimiter, rows), "rows.csv"))
    assert [row for _, row in source.rows()] == [{"Unnamed: 0": str(i), **row} for i, row in enumerate(QA)]


def test_source_reads_text_by_line_or_by_file(write):
    for name in ("notes.md", "notes.txt", "notes.txt.xz"):
        path = write((lzma.compress if name.endswith("xz") else bytes)("# One\r\n\n  二 \nthree".encode()), name)
        assert read(path) == ([(":1", {"text": "# One\n\n  二 \nthree"})], [])
        source = Source.open(path, ReadOptions(text_unit="line"))
        assert [(position, row["text"]) for position, row in source.rows()] == [(1, "# One"), (3, "二"), (4, "three")]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd])
def test_source_reads_a_text_file_as_one_document(write, compress):
    rows, bad = read(write(compress("\ufeffone\r\ntwo\u2028\n三".encode()), "book.txt"))
    assert rows == [(":1", {"text": "one\ntwo\u2028\n三"})] and bad == []


JSON_TEXTS = {"jsonl": json_lines(QA), "json array": json.dumps(QA, indent=1).encode()}
MOSTLY = b"a heading\n" + json_lines(QA)


@pytest.mark.parametrize("file_format", JSON_TEXTS)
@pytest.mark.parametrize("name", ["rows.txt", "rows.jsonl.txt", "rows.TXT", "rows.md", "rows.txt.gz"])
@pytest.mark.parametrize("text_unit", ["file", "line"])
def test_source_of_json_rows_that_is_named_as_text_is_read_as_json(write, file_format, name, text_unit):
    """Before: one document of JSON source was trained on silently."""
    content = b"\xef\xbb\xbf\r\n" + JSON_TEXTS[file_format].replace(b"\n", b"\r\n")
    source = Source.open(
        write((gzip.compress if name.endswith("gz") else bytes)(content), name), ReadOptions(text_unit=text_unit)
    )
    assert [row for _, row in source.rows()] == QA and source.file_format == file_format
    assert (
        source.detected
        == {
            "jsonl": "read as JSON Lines, which its content is",
            "json array": "read as a JSON array, which its content is",
        }[file_format]
    )


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (MOSTLY, "invalid JSON"), (JSON_TEXTS["json array"][:-3], "the array is not closed"), (json.dumps(QA[0], indent=1).encode(), "the line ends within an object"),
        (b'{"text": "' + b"a" * (2 << 20) + b'"}, \n', "a comma after the row"), (json_lines(QA).replace(b"\n", b",\n"), "a comma after the row"),
        (b"\n".join(json.dumps(row, indent=1).encode() for row in QA), "the line ends within an object"),
    ], ids=["a heading", "truncated", "over several lines", "a line of 2 MB", "a comma after each line", "each row over several lines"],
)  # fmt: skip
def test_source_of_damaged_json_rows_that_is_named_as_text_is_refused(write, content, error):
    with pytest.raises(BadRowError, match=error):
        list(Source.open(write(content, "rows.txt")).rows())


@pytest.mark.parametrize(
    "content",
    [
        b"Rows look like this:\n" + json_lines(QA[:2]) + b"and are one\nobject a line.", b"{curly} braces\n" * 9, b"[1] A footnote.\n[2] {another}", b'{"a"} is a set\n',
        b"[" * 100_000, b'{"a":' * 100_000 + b"}", b"[[1, 2], [3, 4]]", b"1\n2\n3", b'{% if "a" %}\n{{ b }}\n{% endif %}', json_lines(QA[:3]) + b"x\n" * 3,
    ], ids=lambda content: content[:16].decode(),
)  # fmt: skip
def test_source_of_text_with_some_json_stays_text(write, content):
    source = Source.open(write(content, "notes.txt"))
    assert [row["text"] for _, row in source.rows()] == [content.decode()] and (
        source.file_format,
        source.detected,
    ) == ("text", "")


def test_source_splits_a_long_text_at_line_ends_without_loss(write, monkeypatch):
    monkeypatch.setattr(json_text, "READ_BYTES", 64)
    text = "\n".join(f"line {number} ends here" for number in range(40)) + "\n" + "字" * 100 + "\nend"
    rows, _ = read(write(text.encode(), "book.txt"))
    assert "".join(row["text"] for _, row in rows) == text and len(rows) > 10
    assert all(
        row["text"].endswith("\n") for _, row in rows if "字" not in row["text"] and "end" not in row["text"][-3:]
    )
    assert rows[1][0] == f":{rows[0][1]['text'].count(chr(10)) + 1}"


def test_source_positions_are_lines_from_1_or_indices_from_0(write):
    assert [
        position
        for position, _ in read(write(CONTENT["rows.jsonl"] + b"\n \n" + json_lines(ROWS[:1]), "rows.jsonl"))[0]
    ] == [":1", ":2", ":3", ":6"]
    assert [position for position, _ in read(write(CONTENT["rows.json"], "rows.json"))[0]] == ["[0]", "[1]", "[2]"]
    # the second row has two lines
    assert [position for position, _ in read(write(CONTENT["rows.csv"], "rows.csv"))[0]] == [":2", ":3", ":5"]
    assert [position for position, _ in read(write(CONTENT["rows.parquet"], "rows.parquet"))[0]] == [
        "[0]",
        "[1]",
        "[2]",
    ]


def test_source_drops_null_fields_of_objects_in_a_table(write):
    rows = [
        {
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": "Ada"}],
            "more": None,
        },
        {"messages": [], "more": 1},
    ]
    assert [row for _, row in read(write(as_parquet(rows), "rows.parquet"))[0]] == rows


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.slow
@given(
    st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_source_splits_an_array_into_rows_for_any_chunk_size(rows, chunk_size, indent, ascii_only):
    content = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "READ_BYTES", chunk_size)
        assert [json.loads(raw) for _, raw in json_text.read_json_array(io.BytesIO(content), str)] == rows


@pytest.mark.parametrize(
    "content, positions, bad",
    [
        (
            b'[{"a": 1}, 5, "x, {", null, {"a": 2}]',
            ["[0]", "[4]"],
            [("not an object", "[1]"), ("not an object", "[2]"), ("not an object", "[3]")],
        ),
        (b'[{"a": 1}, {"a": }, {"a": 2},]', ["[0]", "[2]"], [("invalid JSON", "[1]:7")]),
        (b'[{"a": 1} x {"a": 2}]', ["[0]", "[1]"], [("invalid JSON", "[1]")]),
        (b'[{"a": 1}, {"a": "cut', ["[0]"], [("truncated file", "[1]")]),
        (b'[{"a": 1},\n', ["[0]"], [("truncated file", "[1]")]),
        (b'[{"a": 1}, {"a": "\xe9"}, {"a": 2}]', ["[0]", "[2]"], [("not UTF-8", "[1], byte 8")]),
        (b'[{"a": 1}][{"a": 2}]', ["[0]", "[1]"], []),
        (b"[]", [], []),
    ],
    ids=["scalars", "no value", "text between", "truncated row", "truncated array", "latin-1", "two arrays", "empty"],
)
def test_source_bad_item_of_an_array_leaves_the_others_readable(write, content, positions, bad):
    good, reasons = read(write(content, "rows.json"))
    assert ([position for position, _ in good], reasons) == (positions, bad)


@pytest.mark.parametrize("content", [b'[{"a": 1}] trailing', b'[{"a": 1}]]'])
def test_source_refuses_content_after_an_array(write, content):
    with pytest.raises(UserError, match="outside of the array"):
        read(write(content, "rows.json"))


def test_source_list_on_the_first_of_several_lines_is_a_bad_row(write):
    good, bad = read(write(b'["a"]\n{"text": "b"}\n'))
    assert good == [(":2", {"text": "b"})] and bad == [("not an object", ":1")]


@pytest.mark.parametrize(
    "content, positions, reason, where",
    [
        (b'a,b\n1,2\n3\n"4,\n4",5\n', [":2", ":4"], "invalid CSV", ":3"),
        (b'a,b\n1,2\n"3"3,4\n5,6\n', [":2", ":4"], "invalid CSV", ":3"),
        (b'a,b\n1,2\n3,"4\n5,6\n', [":2"], "invalid CSV", ":3"),
        (b"a,b\r\n1,2\r\n\xe9,4\r\n\r\n5,6\r\n", [":2", ":5"], "not UTF-8", ":3"),
    ],
    ids=["missing value", "text after quote", "open quote", "latin-1"],
)
def test_source_bad_csv_row_is_reported_with_its_line(write, content, positions, reason, where):
    good, bad = read(write(content, "rows.csv"))
    assert [position for position, _ in good] == positions and bad == [(reason, where)]


@pytest.mark.parametrize("header", [b"a,a\n1,2\n", b"a,\n1,2\n", b'"a"a,b\n1,2\n'], ids=["twice", "unnamed", "invalid"])
def test_source_refuses_a_csv_header_without_distinct_names(write, header):
    with pytest.raises(UserError) as error:
        read(write(header, "rows.csv"))
    assert error.value.setting.endswith("rows.csv:1")


def test_source_reads_a_csv_field_above_the_limit_of_python(write):
    assert len(read(write(b"text\n" + b"x" * 300_000 + b"\n", "rows.csv"))[0][0][1]["text"]) == 300_000


def test_source_refuses_a_csv_file_with_a_line_above_the_limit(write, monkeypatch):
    monkeypatch.setattr(byte_stream, "MAX_ROW_BYTES", 20)
    with pytest.raises(UserError, match="the row is larger than") as error:
        read(write(b"a\n1\n" + b"x" * 30 + b"\n2\n", "rows.csv"))
    # the next row cannot be found
    assert error.value.setting.endswith("rows.csv:3") and not isinstance(error.value, BadRowError)


def test_source_row_of_a_table_that_is_not_utf8_leaves_the_others_readable():
    batch = pyarrow.record_batch({"text": pyarrow.array([b"a", b"\xe9", b"b"]).view(pyarrow.string())})
    out = io.BytesIO()
    with pyarrow.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    items = list(read_arrow(io.BytesIO(out.getvalue()), str))
    assert [raw.reason if isinstance(raw, BadRowError) else raw["text"] for _, raw in items] == ["a", "not UTF-8", "b"]


@pytest.mark.parametrize("name", ["rows.arrow", "rows.feather", "rows"])
def test_source_reads_an_arrow_file_like_a_stream(tmp_path: Path, name: str) -> None:
    table = pyarrow.table({"text": [f"text {i}" for i in range(600)]})
    with pyarrow.ipc.new_file(tmp_path / name, table.schema) as out:
        out.write_table(table, max_chunksize=7)
    assert [row for _, row in Source.open(tmp_path / name).rows()] == table.to_pylist()


def test_source_reads_a_table_where_there_is_no_proc(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.limits.STATM", Path("/nowhere"))
    assert [row for _, row in Source.open(write(as_parquet(ROWS), "rows.parquet")).rows()] == ROWS


@pytest.mark.parametrize(
    "content", [b"PAR1 is how it begins", as_parquet(ROWS)[:-20]], ids=["header only", "truncated"]
)
def test_source_refuses_a_truncated_parquet_file(write, content):
    with pytest.raises(UserError, match="the table cannot be read"):
        read(write(content, "rows.parquet"))


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_source_reports_a_truncated_compressed_file_after_its_rows(write, compress):
    # incompressible: half of the file has half of the rows
    noise = [{"text": os.urandom(200).hex()} for _ in range(8_000)]
    content = compress(json_lines(noise))
    good, bad = read(write(content[: len(content) // 2], "rows.jsonl.gz"))
    assert 0 < len(good) < len(noise) and [reason for reason, _ in bad] == ["truncated file"]


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_source_refuses_a_truncated_compressed_table(write, compress):
    with pytest.raises(UserError, match="Truncated compressed stream"):
        read(write(compress(as_parquet([{"text": os.urandom(20_000).hex()}]))[:20_000], "rows.parquet.gz"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.jsonl.gz"])
def test_source_reports_progress_in_bytes_of_the_file(write, name):
    rows = [{"text": f"{number} " + os.urandom(500).hex()} for number in range(6_000)]
    encode = {
        "jsonl": json_lines,
        "json": lambda rows: json.dumps(rows).encode(),
        "csv": as_csv,
        "parquet": lambda rows: as_parquet(rows, row_group_size=500),
    }
    path = write(gzip.compress(json_lines(rows)) if name.endswith("gz") else encode[name.split(".")[1]](rows), name)
    source, consumed = Source.open(path), []
    assert sum(1 for _ in source.items(consumed.append)) == len(rows)
    assert consumed == sorted(consumed) and consumed[-1] == source.size == path.stat().st_size
    assert any(0.3 * source.size < done < 0.7 * source.size for done in consumed)


def test_source_and_bad_row_can_be_pickled(write):
    source = Source.open(write(b"{}"))
    error = pickle.loads(pickle.dumps(BadRowError("reason", "message", "where", "fix")))
    assert pickle.loads(pickle.dumps(source)) == source
    assert (error.reason, error.message, error.setting, error.fix) == ("reason", "message", "where", "fix")


@pytest.mark.slow
def test_source_skips_a_row_of_200_megabytes_in_bounded_memory(tmp_path):
    program = """
import resource, sys
from data.sources.files import Source
for begin, end in (("{}\\n", '"}\\n{}\\n'), ("[{},", '"},{}]')):
    with open(sys.argv[1], "wb") as file:
        file.write(begin.encode() + b'{"text": "')
        for _ in range(200):
            file.write(b"x" * (1 << 20))
        file.write(end.encode())
    source = Source.open(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print([raw.reason if isinstance(raw, Exception) else raw.strip() for _, raw in source.items()])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(json_text.__file__).parents[2])
    results = done.stdout.splitlines()
    assert results[::2] == [str([b"{}", "row too large", b"{}"])] * 2, done.stderr
    assert all(int(kilobytes) < 150_000 for kilobytes in results[1::2])


def test_source_limit_of_a_row_is_exact(write, monkeypatch):
    for module in (json_text, byte_stream):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 20)
    for content in (b'{"text": "1234567"}\n{"text": "12345678"}\n', b'[{"text": "12345678"},{"text": "123456789"}]'):
        good, bad = read(write(content, "rows.json"))
        assert len(good) == 1 and [reason for reason, _ in bad] == ["row too large"]


def names(entry):
    return [source.path.name for source in open_entry(entry)]


def test_hub_name_of_a_folder_that_save_to_disk_wrote_names_the_folder(tmp_path):
    """Before: use `load_from_disk` instead, and check the name."""
    datasets = pytest.importorskip("datasets", reason="the optional extra [hub] is not installed")
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path)
    with pytest.raises(UserError) as error:
        open_entry(f"hub:{tmp_path}")
    assert error.value.fix.startswith(f"data.path={tmp_path} ")
    assert names(str(tmp_path)) == ["data-00000-of-00001.arrow"]


def test_open_entry_accepts_a_file_a_glob_and_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "b.jsonl",
        "a.json.gz",
        "deep/c.csv",
        "deep/notes.rst",
        "README.md",
        "README_zh.md",
        "requirements-dev.txt",
        ".hidden/d.jsonl",
        "deep/[x].txt",
        "dataset_info.json",
        "state.json",
        "cache-1facb23ae60f3cf7.arrow",  # of Dataset.map, beside the files that save_to_disk wrote
        "cache-1facb23ae60f3cf7_00000_of_00002.arrow",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(b"{}") if name.endswith("gz") else b"{}")
    assert names(".") == ["a.json.gz", "b.jsonl", "[x].txt", "c.csv"]
    for name in ("license_corpus.txt", "requirements-engineering.txt"):  # are data
        Path("texts").mkdir(exist_ok=True)
        Path("texts", name).write_text("text")
    assert names("texts") == ["license_corpus.txt", "requirements-engineering.txt"]
    Path("corpus").write_text("ARROGANCE is a vice")  # no Arrow file
    with pytest.raises(UserError, match="format cannot be detected"):
        names("corpus")
    assert names("deep/[x].txt") == ["[x].txt"]  # an existing file is not a pattern
    assert (names("[ab].json*"), names("**/*.csv")) == (["a.json.gz", "b.jsonl"], ["c.csv"])


@pytest.mark.parametrize(
    "path, message, fix",
    [
        ("x" * 300, "no such file", "check the path"),
        ("other/file", "no such file", "check the path"),
        ("rowz.jsonl", "no such file", "rows.jsonl?"),
        ("*.parquet", "no file matches", "ls *.parquet"),
        ("empty", "the folder has no data files", ".parquet"),
        ("pipe", "a regular file is needed", "to a file first"),
        ("/dev/null", "a regular file is needed", "to a file first"),
        ("https://example.org/rows.jsonl", "URLs are not supported", "download the file"),
        ("model.bin", "the file format cannot be detected", ".jsonl"),
        ("table.xlsx", "spreadsheets and archives are not read", "save the sheet as CSV"),
        ("blank.jsonl", "the file is empty", "one JSON object per line"),
        ("blank.txt", "the file is empty", "one JSON object per line"),
        ("torn.jsonl.gz", "cannot be read", "copy it again"),
        ("page.jsonl", "an HTML page, not data", "/resolve/ in place of /blob/"),
        ("page.arrow", "an HTML page, not data", "/resolve/ in place of /blob/"),
        ("pointer.txt", "a pointer of Git LFS is in place of the file", "lfs pull"),
    ],
    ids=lambda value: value[:30],
)
def test_open_entry_refuses_a_path_without_rows(tmp_path, monkeypatch, path, message, fix):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("empty")
    for name, content in (
        ("rows.jsonl", b"{}"),
        ("model.bin", b"\x80\x02"),
        ("table.xlsx", b"PK\x03\x04"),
        ("blank.jsonl", b"\xef\xbb\xbf\n \r\n"),
        ("blank.txt", b""),
        ("torn.jsonl.gz", gzip.compress(b"{}")[:12]),
        ("page.jsonl", b"\n<!DOCTYPE html>\n<html>"),
        ("page.arrow", b"<html>"),
        ("pointer.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0"),
    ):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        open_entry(path)
    assert message in error.value.message and path in error.value.setting and fix in error.value.fix


@pytest.mark.slow
def test_open_entry_reads_a_hub_data_set_from_the_cache(tmp_path, monkeypatch, write):
    pytest.importorskip("datasets", reason="the optional extra [hub] is not installed")
    folder = tmp_path / "set"
    folder.mkdir()
    write(json_lines(ROWS)).rename(folder / "train.jsonl")
    write(json_lines(ROWS[:1])).rename(folder / "test.jsonl")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, split, rows in (
        (f"hub:{folder}", "train", ROWS),
        (f"hub:{folder}:train", "train", ROWS),
        (f"hub:{folder}:test", "test", ROWS[:1]),
    ):
        (source,) = open_entry(name)
        assert [row for _, row in source.rows()] == rows and source.size > 0
        assert source.where(2) == f"hub:{folder}:{split}[2]"
    assert open_entry(f"hub:{folder}", splits=EVALUATION_SPLITS)[0].name == f"hub:{folder}:test"
    for name, message in (
        (f"hub:{folder}:dev", "the split must be one of train, test, got dev"),
        ("hub:unknown/unknown", "cannot be loaded"),
    ):
        with pytest.raises(UserError, match=message):
            open_entry(name)


def test_open_entry_without_datasets_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as error:
        open_entry("hub:owner/name")
    assert (error.value.setting, error.value.fix) == ("hub:owner/name", "pip install '.[hub]'")
