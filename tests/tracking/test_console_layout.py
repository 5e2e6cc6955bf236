"""Layout of header, tables and commands: nothing is wider than the line, wide characters counted, and what a person
copies is whole.
"""

from __future__ import annotations

import random
import shlex

import pytest

from runner.tracking.bar import (
    cell_width,
    command_lines,
    labelled_lines,
    shorten_middle,
    table_lines,
    wrap_text,
)
from runner.tracking.data_report import data_summary, data_table
from runner.tracking.lines import format_size, remaining_seconds


def test_cell_width_counts_wide_and_combining_characters() -> None:
    assert [cell_width(text) for text in ("abc", "你好", "ｆｕｌｌ", "e\u0301", "🙂", "")] == [3, 4, 8, 1, 2, 0]


def test_wrapped_text_fits_the_width_and_keeps_every_character() -> None:
    chance = random.Random(0)
    for _ in range(200):
        text = " ".join(
            "".join(chance.choices("ab你好é", k=chance.randint(1, 12))) for _ in range(chance.randint(1, 30))
        )
        width = chance.randint(40, 120)
        lines = wrap_text(text, "label  ", " " * 7, width)
        assert all(cell_width(line) <= width for line in lines) and all(line.startswith(" " * 7) for line in lines[1:])
        assert "".join("".join(lines).removeprefix("label").split()) == "".join(text.split())


def test_wrapped_text_does_not_break_a_path() -> None:
    path = "/data/" + "长" * 60
    assert wrap_text(f"rows of {path} here", "", "  ", 80) == ["rows of", f"  {path}", "  here"]


def test_labelled_lines_have_their_values_in_one_column() -> None:
    lines = labelled_lines({"run": "a", "名字": "b c", "long label": "one two\nthree"}.items(), 20)
    assert lines == ["run         a", "名字        b c", "long label  one two", "            three"]
    assert {
        cell_width(line[: len(line) - len(value)])
        for line, value in zip(lines, ("a", "b c", "one two", "three"), strict=True)
    } == {12}


@pytest.mark.parametrize("width", [40, 78, 158])
def test_commands_are_the_same_arguments_when_they_are_copied(width: int) -> None:
    arguments = [
        "python",
        "runner/train.py",
        "run=outputs/a run",
        "data.path=[a.jsonl,b.jsonl]",
        "run.note=it's $HOME",
        "optimizer.lr=1e-4",
        "x=你好",
    ]
    lines = command_lines(arguments, "train longer", width)
    assert lines[0] == "# train longer" and all(cell_width(line) <= width for line in lines)
    joined = "\n".join(lines[1:]).replace("\\\n", "")  # as a shell joins them
    assert "\n" not in joined and shlex.split(joined) == arguments


def test_shortened_name_keeps_its_end() -> None:
    assert shorten_middle("a" * 30 + "_val.jsonl", 20) == "aaaaa...aa_val.jsonl"
    for text in ("x" * 50 + ".jsonl", "数" * 50 + ".jsonl", "short"):
        assert cell_width(shorten_middle(text, 20)) <= 20 and shorten_middle(text, 20).endswith(text[-5:])


def test_table_aligns_wide_characters() -> None:
    lines = table_lines([["name", "rows"], ["数据.jsonl", "7"], ["b", "1,234"]], [False, True])
    assert lines == ["name         rows", "数据.jsonl      7", "b           1,234"] and {
        cell_width(line) for line in lines
    } == {17}


def file_counts(name: str, **counts: object) -> dict:
    zeros = dict.fromkeys(("read", "kept", "split", "truncated", "tokens", "loss_tokens", "lost_loss_tokens"), 0)
    return {
        "file": f"/data/{name}",
        "schema": "conversations",
        **zeros,
        "dropped": {},
        "bad": {},
        "first_seen": {},
        **counts,
    }


def test_data_table_leaves_out_columns_of_zeros_and_fits_the_line() -> None:
    simple = data_table([file_counts("a.jsonl", read=7, kept=7, tokens=900, loss_tokens=300)]).splitlines()
    assert simple[0].split() == ["rows", "of", "schema", "read", "kept", "tokens", "with", "loss"] and len(simple) == 2
    big = {
        name: 123_456_789
        for name in ("read", "kept", "split", "truncated", "tokens", "loss_tokens", "lost_loss_tokens")
    }
    long_name = data_table(
        [file_counts("数" * 60 + ".jsonl", **big | {"split": 0, "truncated": 0, "lost_loss_tokens": 0})]
    )
    everything = data_table(
        [file_counts("x" * 90 + ".jsonl", **big, dropped={"too long": 3}, first_seen={"too long": "a.jsonl:7"})]
    )
    for text in (long_name, everything):
        assert max(map(cell_width, text.splitlines())) <= 80
    assert "123,456,789 cut off" in " ".join(everything.split()) and everything.endswith(
        "dropped 3: too long (first: a.jsonl:7)"
    )


def test_data_summary_says_what_truncation_costs() -> None:
    files = [file_counts("a.jsonl", tokens=900, loss_tokens=300, lost_loss_tokens=100)]
    assert (
        data_summary(["a.jsonl"], files, 7, 2)
        == "a.jsonl\n7 rows, 2 more held out; 900 tokens in all files, 300 with loss, 25.0% cut off"
    )
    assert data_summary([f"{n}.jsonl" for n in range(9)], [file_counts("a", loss_tokens=1)], 7, 0).startswith(
        "0.jsonl, 1.jsonl, 2.jsonl and 6 more\n7 rows, none held out"
    )


def test_sizes_have_a_unit_that_fits() -> None:
    assert [format_size(size) for size in (512, 1 << 20, 612 << 20, 3 << 29, 1 << 52)] == [
        "512 B",
        "1 MiB",
        "612 MiB",
        "1.5 GiB",
        "4096 TiB",
    ]


def test_remaining_time_is_that_of_the_pace_of_this_attempt() -> None:
    assert remaining_seconds((104, 10.0), (108, 18.0), 120) == 24.0
    assert (
        remaining_seconds((120, 10.0), (121, 12.0), 120) == 0
        and remaining_seconds((104, 10.0), (104, 10.0), 120) is None
    )
