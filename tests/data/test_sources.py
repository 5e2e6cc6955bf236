"""Every kind of file gives its rows as a stream, and says by place what it cannot give."""

import csv
import gzip
import io
import json
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

from data.schemas.errors import BadRowError
from data.sources import byte_stream, json_text
from data.sources.files import Source, resolve_sources
from data.sources.tables import read_arrow

ROWS = [{"text": "one\u2028still one"}, {"text": 'tab\t, "quotes"\nand a line'}, {"text": "二"}]
ZSTD = "zstd"


def lines(rows):
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


def zst(content):
    return pyarrow.compress(content, ZSTD, asbytes=True)


CONTENT = {
    "rows.jsonl": lines(ROWS),
    "rows.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": lines(ROWS),
    "array.jsonl": json.dumps(ROWS).encode(),
    "rows.csv": as_csv(ROWS),
    "rows.parquet": as_parquet(ROWS, row_group_size=2),
    "rows": lines(ROWS),
    "array": json.dumps(ROWS).encode(),
    "table": as_parquet(ROWS),
}


def read(path):
    """(place as people count, row) or the reason of a bad row."""
    source, bad = Source.open(path), []
    rows = [(source.where(place).removeprefix(str(path)), row) for place, row in source.rows(bad.append)]
    return rows, [(error.reason, error.args[1].removeprefix(str(path))) for error in bad]


@pytest.mark.parametrize("pack, ending", [(bytes, ""), (gzip.compress, ".gz"), (zst, ".zst"), (gzip.compress, "")])
@pytest.mark.parametrize("name", CONTENT)
def test_the_same_rows_come_out_of_every_kind_of_file(write, name, pack, ending):
    rows, bad = read(write(pack(CONTENT[name]), name + ending))
    assert [row for _, row in rows] == ROWS and bad == []


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zst])
def test_a_text_file_is_one_document(write, pack):
    rows, bad = read(write(pack("\ufeffone\r\ntwo\u2028\n三".encode()), "book.txt"))
    assert rows == [(":1", {"text": "one\ntwo\u2028\n三"})] and bad == []


def test_a_long_text_is_cut_at_line_ends_and_nothing_is_lost(write, monkeypatch):
    monkeypatch.setattr(json_text, "READ_BYTES", 64)
    words = "\n".join(f"line {number} ends here" for number in range(40)) + "\n" + "字" * 100 + "\nend"
    rows, _ = read(write(words.encode(), "book.txt"))
    assert "".join(row["text"] for _, row in rows) == words and len(rows) > 10
    assert all(row["text"].endswith("\n") for _, row in rows if "字" not in row["text"] and "end" not in row["text"][-3:])
    assert rows[1][0] == f":{rows[0][1]['text'].count(chr(10)) + 1}"


def test_places_are_named_as_people_count_them(write):
    assert [place for place, _ in read(write(CONTENT["rows.jsonl"] + b"\n \n" + lines(ROWS[:1]), "rows.jsonl"))[0]] == [":1", ":2", ":3", ":6"]
    assert [place for place, _ in read(write(CONTENT["rows.json"], "rows.json"))[0]] == ["[0]", "[1]", "[2]"]
    assert [place for place, _ in read(write(CONTENT["rows.csv"], "rows.csv"))[0]] == [":2", ":3", ":5"]  # the second record has two lines
    assert [place for place, _ in read(write(CONTENT["rows.parquet"], "rows.parquet"))[0]] == ["[0]", "[1]", "[2]"]


def test_objects_in_a_table_lose_the_fields_that_only_others_have(write):
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": "Ada"}], "more": None}, {"messages": [], "more": 1}]
    assert [row for _, row in read(write(as_parquet(rows), "rows.parquet"))[0]] == rows


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=6), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_an_array_is_cut_into_its_rows_wherever_the_pieces_end(rows, piece, indent, ascii_only):
    content = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    before, json_text.READ_BYTES = json_text.READ_BYTES, piece
    try:
        assert [json.loads(raw) for _, raw in json_text.read_array(io.BytesIO(content), str)] == rows
    finally:
        json_text.READ_BYTES = before


@pytest.mark.parametrize(
    "content, rows, bad",
    [
        (b'[{"a": 1}, 5, "x, {", null, {"a": 2}]', ["[0]", "[4]"], [("not an object", "[1]"), ("not an object", "[2]"), ("not an object", "[3]")]),
        (b'[{"a": 1}, {"a": }, {"a": 2},]', ["[0]", "[2]"], [("broken JSON", "[1]:7")]),
        (b'[{"a": 1} x {"a": 2}]', ["[0]", "[1]"], [("broken JSON", "[1]")]),
        (b'[{"a": 1}, {"a": "cut', ["[0]"], [("file cut off", "[1]")]),
        (b'[{"a": 1},\n', ["[0]"], [("file cut off", "[1]")]),
        (b'[{"a": 1}, {"a": "\xe9"}, {"a": 2}]', ["[0]", "[2]"], [("not UTF-8", "[1], byte 8")]),
        (b'[{"a": 1}][{"a": 2}]', ["[0]", "[1]"], []),
        (b"[]", [], []),
    ],
)
def test_one_bad_item_of_an_array_leaves_the_others_readable(write, content, rows, bad):
    good, reasons = read(write(content, "rows.json"))
    assert ([place for place, _ in good], reasons) == (rows, bad)


@pytest.mark.parametrize("content", [b'[{"a": 1}] trailing', b'[{"a": 1}]]'])
def test_what_stands_behind_an_array_is_refused(write, content):
    with pytest.raises(ValueError, match="outside of the array"):
        read(write(content, "rows.json"))


def test_a_list_on_a_first_line_of_lines_is_a_bad_row_and_no_array(write):
    good, bad = read(write(b'["a"]\n{"text": "b"}\n'))
    assert good == [(":2", {"text": "b"})] and bad == [("not an object", ":1")]


@pytest.mark.parametrize(
    "content, places, reason, where",
    [
        (b'a,b\n1,2\n3\n"4,\n4",5\n', [":2", ":4"], "broken CSV", ":3"),
        (b'a,b\n1,2\n"3"3,4\n5,6\n', [":2", ":4"], "broken CSV", ":3"),
        (b'a,b\n1,2\n3,"4\n5,6\n', [":2"], "broken CSV", ":3"),
        (b"a,b\r\n1,2\r\n\xe9,4\r\n\r\n5,6\r\n", [":2", ":5"], "not UTF-8", ":3"),
    ],
)
def test_a_bad_record_of_a_csv_file_is_named_by_its_line(write, content, places, reason, where):
    good, bad = read(write(content, "rows.csv"))
    assert [place for place, _ in good] == places and bad == [(reason, where)]


@pytest.mark.parametrize("header", [b"a,a\n1,2\n", b"a,\n1,2\n", b'"a"a,b\n1,2\n'])
def test_a_csv_file_needs_a_name_for_every_column(write, header):
    with pytest.raises(ValueError) as refusal:
        read(write(header, "rows.csv"))
    assert refusal.value.args[1].endswith("rows.csv:1") and len(refusal.value.args) == 3


def test_a_long_field_of_a_csv_file_is_read(write):
    assert len(read(write(b"text\n" + b"x" * 300_000 + b"\n", "rows.csv"))[0][0][1]["text"]) == 300_000


def test_a_table_with_a_string_that_is_no_utf8_loses_that_row_only(tmp_path):
    batch = pyarrow.record_batch({"text": pyarrow.array([b"a", b"\xe9", b"b"]).view(pyarrow.string())})
    out = io.BytesIO()
    with pyarrow.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    found = list(read_arrow(io.BytesIO(out.getvalue()), str))
    assert [raw.reason if isinstance(raw, BadRowError) else raw["text"] for _, raw in found] == ["a", "not UTF-8", "b"]


@pytest.mark.parametrize("content", [b"PAR1 is how it begins", as_parquet(ROWS)[:-20]])
def test_a_table_that_is_cut_off_is_refused(write, content):
    with pytest.raises(ValueError, match="the table cannot be read"):
        read(write(content, "rows.parquet"))


@pytest.mark.parametrize("pack", [gzip.compress, zst])
def test_a_packed_file_that_is_cut_off_is_noticed(write, pack):
    noise = [{"text": os.urandom(200).hex()} for _ in range(20_000)]  # nothing to pack: half the file holds half the rows
    whole = pack(lines(noise))
    good, bad = read(write(whole[: len(whole) // 2], "rows.jsonl.gz"))
    assert 0 < len(good) < len(noise) and [reason for reason, _ in bad] == ["file cut off"]


@pytest.mark.parametrize("pack", [gzip.compress, zst])
def test_a_packed_table_that_is_cut_off_is_refused(write, pack):
    with pytest.raises(ValueError, match="Truncated compressed stream"):
        read(write(pack(as_parquet([{"text": os.urandom(20_000).hex()}]))[:20_000], "rows.parquet.gz"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.jsonl.gz"])
def test_it_is_told_how_far_reading_has_come(write, name):
    rows = [{"text": f"{number} " + os.urandom(100).hex()} for number in range(20_000)]
    made = {"jsonl": lines, "json": lambda rows: json.dumps(rows).encode(), "csv": as_csv, "parquet": lambda rows: as_parquet(rows, row_group_size=2000)}
    path, told = write(gzip.compress(lines(rows)) if name.endswith("gz") else made[name.split(".")[1]](rows), name), []
    source = Source.open(path)
    assert sum(1 for _ in source.items(told.append)) == len(rows)
    assert told == sorted(told) and told[-1] == source.size == path.stat().st_size
    assert any(0.3 * source.size < consumed < 0.7 * source.size for consumed in told)


def test_a_source_and_a_bad_row_travel_between_processes(write):
    source = Source.open(write(b"{}"))
    error = pickle.loads(pickle.dumps(BadRowError("reason", "what", "where", "fix")))
    assert pickle.loads(pickle.dumps(source)) == source
    assert error.reason == "reason" and error.args == ("what", "where", "fix")


def test_a_row_of_a_hundred_megabytes_is_passed_over_in_little_memory(tmp_path):
    program = """
import resource, sys
from data.formats import Source
with open(sys.argv[1], "wb") as file:
    file.write(sys.argv[2].encode() + b'{"text": "')
    for _ in range(200):
        file.write(b"x" * (1 << 20))
    file.write(sys.argv[3].encode())
source = Source.open(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print([raw.reason if isinstance(raw, Exception) else raw.strip() for _, raw in source.items()])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    for begin, end in (("{}\n", '"}\n{}\n'), ("[{},", '"},{}]')):
        words = [sys.executable, "-c", program, str(tmp_path / "rows.json"), begin, end]
        done = subprocess.run(words, capture_output=True, text=True, cwd=Path(json_text.__file__).parents[2])
        rows, kilobytes = done.stdout.splitlines()
        assert rows == str([b"{}", "line too long", b"{}"]) and int(kilobytes) < 150_000, done.stdout + done.stderr


def test_the_longest_row_is_exactly_as_long_as_is_said(write, monkeypatch):
    for module in (json_text, byte_stream):
        monkeypatch.setattr(module, "LONGEST", 20)
    for content in (b'{"text": "1234567"}\n{"text": "12345678"}\n', b'[{"text": "12345678"},{"text": "123456789"}]'):
        good, bad = read(write(content, "rows.json"))
        assert len(good) == 1 and [reason for reason, _ in bad] == ["line too long"]


def names(word):
    return [[source.path.name for source in found] for found in resolve_sources(word)]


def test_a_word_names_a_file_a_glob_or_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.json.gz", "deep/c.csv", "deep/notes.md", ".hidden/d.jsonl", "deep/[x].txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(b"{}") if name.endswith("gz") else b"{}")
    assert names(".") == [["a.json.gz", "b.jsonl", "[x].txt", "c.csv"]]
    assert names("deep/[x].txt") == [["[x].txt"]]  # a file that is there is no pattern
    assert names(["*.json*", "**/*.csv", "b.jsonl"]) == [["a.json.gz", "b.jsonl"], ["c.csv"], ["b.jsonl"]]


@pytest.mark.parametrize(
    "word, what, fix",
    [
        ("x" * 300, "there is no such file", "check the path"),
        ("other/place", "there is no such file", "check the path"),
        ("rowz.jsonl", "there is no such file", "did you mean rows.jsonl"),
        ("*.parquet", "no file matches", "ls *.parquet"),
        ("empty", "no file of rows in this folder", ".parquet"),
        ("pipe", "not a file", "into a file first"),
        ("/dev/null", "not a file", "into a file first"),
        ("https://example.org/rows.jsonl", "nothing is read over the network", "download it"),
        ("model.bin", "what kind of file", ".jsonl"),
        ("blank.jsonl", "the file is empty", "one JSON object a line"),
        ("blank.txt", "the file is empty", "one JSON object a line"),
        ("torn.jsonl.gz", "cannot be read", "copy it again"),
    ],
)
def test_a_word_that_names_no_rows_is_refused(tmp_path, monkeypatch, word, what, fix):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkdir("empty")
    for name, content in (
        ("rows.jsonl", b"{}"),
        ("model.bin", b"\x80\x02"),
        ("blank.jsonl", b"\xef\xbb\xbf\n \r\n"),
        ("blank.txt", b""),
        ("torn.jsonl.gz", gzip.compress(b"{}")[:12]),
    ):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as refusal:
        resolve_sources(word)
    assert what in refusal.value.args[0] and word in refusal.value.args[1] and fix in refusal.value.args[2]


def test_a_data_set_of_the_hub_is_read_from_the_cache_of_its_library(tmp_path, monkeypatch, write):
    pytest.importorskip("datasets", reason="the optional extra [hub] is not installed")
    folder = tmp_path / "set"
    folder.mkdir()
    write(lines(ROWS)).rename(folder / "train.jsonl")
    write(lines(ROWS[:1])).rename(folder / "test.jsonl")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for word, rows in ((f"hub:{folder}", ROWS), (f"hub:{folder}:train", ROWS), (f"hub:{folder}:test", ROWS[:1])):
        ((source,),) = resolve_sources(word)
        assert [row for _, row in source.rows()] == rows and source.size > 0
        assert source.where(2) == f"hub:{folder}:{word.removeprefix(f'hub:{folder}')[1:] or 'train'}[2]"
    for word, what in ((f"hub:{folder}:dev", "the splits are train, test"), ("hub:nobody/nothing", "cannot be loaded")):
        with pytest.raises(ValueError, match=what):
            resolve_sources(word)


def test_without_the_library_a_data_set_of_the_hub_is_refused_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError) as refusal:
        resolve_sources("hub:owner/name")
    assert refusal.value.args[1:] == ("hub:owner/name", "pip install '.[hub]'")
