"""rows.py: what is printed is what the model will read, and nothing in a row can hide its loss."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenize.tokenizer import Tokenizer
from runner.config.compose import compose_config
from runner.engine.data_pipeline import build_data_pipeline
from runner.inference.inspect_rows import RowsConfig, histogram, inspect_rows
from runner.inference.token_view import RichTokenView, token_spans

ROOT = Path(__file__).parents[2]
TOKENIZER = Tokenizer.load(ROOT / "data" / "samples" / "tokenizer")
CHAT = '{"conversations": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]}\n'


@pytest.fixture
def rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """rows(lines, *words): what the command prints for a file of these lines."""

    def rows(lines: str, *words: str, stage: str = "sft", **show_words: object) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text(lines, encoding="utf-8")
        data = [f"data.path={path}", f"data.cache={tmp_path}/cache", "data.val_path=null", "data.val_fraction=0"]
        cfg = {"n": 3, "row": None, "ids": False, "packed": None, "plain": True, **show_words}
        capsys.readouterr()
        inspect_rows(RowsConfig(**cfg), compose_config([f"stage={stage}", *data, *words]))
        return capsys.readouterr().out

    return rows


def shown(printed: str) -> str:
    """The rows alone."""
    return printed.partition("\\n is a line end\n")[2]


def test_exactly_what_carries_loss_stands_in_brackets(rows) -> None:
    printed = rows(CHAT, packed=False)
    blank, where, *text = shown(printed).splitlines()
    assert blank == "" and where.endswith("rows.jsonl:1: 20 tokens, 3 with loss")
    assert text == [
        r"    <|im_start|>user\n",
        r"    2 + 2?<|im_end|>\n",
        r"    <|im_start|>assistant\n",
        r"    [four<|im_end|>]\n",
    ]


def test_of_a_pair_only_the_difference_stands_in_brackets(rows) -> None:
    sides = [f'[{{"role": "user", "content": "2 + 2?"}}, {{"role": "assistant", "content": "It is {answer}."}}]' for answer in ("4", "5")]
    printed = shown(rows(f'{{"chosen": {sides[0]}, "rejected": {sides[1]}}}\n', stage="dpo"))
    assert "rows.jsonl:1 chosen: " in printed and "rows.jsonl:1 rejected: " in printed
    assert r"    It is [4.<|im_end|>]\n" in printed and r"    It is [5.<|im_end|>]\n" in printed


def test_every_token_of_a_text_but_its_first_stands_in_brackets(rows) -> None:
    assert "    <|im_start|>[Once upon a time.<|im_end|>]" in shown(rows('{"text": "Once upon a time."}\n', stage="pretrain"))


def test_brackets_and_control_characters_of_a_text_are_escaped(rows) -> None:
    printed = shown(rows('{"text": "a[0]\\u001b[2Jb\\tc\\rd\\u202ee"}\n', stage="pretrain"))
    assert r"[a\[0\]\x1b\[2Jb\tc\rd\u202ee<|im_end|>]" in printed


def test_ids_are_shown_on_request_with_the_same_brackets(rows) -> None:
    ids = TOKENIZER.encode("Once upon a time.")
    printed = rows('{"text": "Once upon a time."}\n', stage="pretrain", ids=True)
    assert f"    ids: 1 [{' '.join(map(str, ids))} 2]" in printed


def test_a_row_is_found_by_its_number_and_by_its_line(rows) -> None:
    lines = "".join(f'{{"text": "This is row {i}."}}\n' for i in range(50))
    by_number, by_line = (shown(rows(lines, stage="pretrain", row=row)) for row in ("29", "rows.jsonl:30"))
    assert by_number == by_line and "This is row 29." in by_number and by_number.count("with loss") == 1


@pytest.mark.parametrize("row", ["50", "rows.jsonl:51", "other.jsonl:1", "nonsense"])
def test_a_row_that_is_not_there_is_refused(rows, row: str) -> None:
    with pytest.raises(ValueError) as refusal:
        rows('{"text": "Hello."}\n' * 50, stage="pretrain", row=row)
    assert refusal.value.args[1] == f"row={row}" and len(refusal.value.args) == 3


def test_all_parts_of_a_text_that_was_split_are_shown_for_its_line(rows) -> None:
    printed = shown(rows('{"text": "' + "word " * 300 + '"}\n', "data.max_length=64", stage="pretrain", row="rows.jsonl:1"))
    assert printed.count("rows.jsonl:1: ") > 4


def test_a_row_that_is_held_out_is_found_too(rows) -> None:
    lines = "".join(f'{{"text": "This is row {i}."}}\n' for i in range(20))
    for line in range(1, 21):
        assert f"This is row {line - 1}." in rows(lines, "data.val_fraction=0.3", stage="pretrain", row=f"rows.jsonl:{line}")


def test_the_positions_of_a_window_are_told_without_a_gap(rows) -> None:
    lines = "".join(f'{{"text": "{"word " * (i % 13 + 1)}"}}\n' for i in range(60))
    printed = rows(lines, "data.max_length=32", stage="pretrain", packed=True, n=5)
    for window in shown(printed).split("\nwindow ")[1:]:
        spans = [(int(start), int(stop)) for start, stop in re.findall(r"^  positions (\d+)-(\d+):", window, re.MULTILINE)]
        assert spans[0][0] == 0 and spans[-1][1] == 31
        assert all(before[1] + 1 == after[0] for before, after in zip(spans[:-1], spans[1:], strict=True))


def test_bad_rows_are_counted_by_reason_with_the_first_place(rows) -> None:
    printed = rows(CHAT * 3 + "not json\n", "data.on_bad_row=skip", "data.max_bad_fraction=0.5")
    assert re.search(r"bad 1: invalid JSON \(first: \S+rows\.jsonl:4", printed)


def test_the_histogram_counts_every_row_once(tmp_path: Path) -> None:
    cfg = compose_config(["stage=sft", f"data.cache={tmp_path}"])
    rows = build_data_pipeline(cfg, TOKENIZER).train.rows
    assert sum(int(line.split()[1].replace(",", "")) for line in histogram(rows)[1:]) == len(rows)


@pytest.mark.parametrize("stage", ["pretrain", "sft", "lora", "dpo"])
def test_the_shipped_samples_of_every_stage_are_shown(stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_rows(RowsConfig(n=2, row=None, ids=True, packed=None, plain=True), compose_config([f"stage={stage}", f"data.cache={tmp_path}"]))
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("with loss", "positions hold a token", "[", "ids: 1 ", ".jsonl:")) and "\x1b" not in printed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_every_role_has_its_colour_and_loss_is_bold(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    line = CHAT.replace('{"role": "user"', '{"role": "system", "content": "Be brief."}, {"role": "user"').replace(
        "]}", ', {"role": "tool", "content": "wet"}, {"role": "assistant", "content": "dry"}]}'
    )
    rows(line, plain=False)
    painted = re.findall(r"\x1b\[([\d;]+)m([^\x1b]+)", terminal.getvalue())
    for code, word in (("2;35", "brief"), ("2;36", "2"), ("1;32", "four"), ("2;33", "wet"), ("1;32", "dry")):
        assert any(style == code and word in text for style, text in painted), (code, word)
    assert {style for style, text in painted if style.startswith("1;")} == {"1;32"}  # nobody but the assistant is learned from


def test_a_system_message_that_was_drawn_is_shown_as_one(rows) -> None:
    printed = rows(CHAT, "data.system_prob=1", "data.system_prompts=[Be brief.]")
    assert r"<|im_start|>system\n" in printed and "Be brief." in printed


@settings(max_examples=50)
@given(st.text(max_size=20), st.integers(0, 20))
def test_stretches_hold_every_token_once_and_all_the_text(text: str, first: int) -> None:
    ids = np.array(TOKENIZER.encode(text), np.int32)
    learn = np.arange(len(ids)) >= first
    parts = list(token_spans(TOKENIZER, ids, learn, []))
    assert [number for part in parts for number in part.ids] == ids.tolist()
    assert [part.learn for part in parts for _ in part.ids] == learn.tolist()
    if first == 0:
        assert "".join(part.text for part in parts) == text


def test_nothing_of_a_screen_is_read_as_markup() -> None:
    terminal = Terminal()
    RichTokenView(terminal).say("[red]no[/red]")
    assert terminal.getvalue() == "[red]no[/red]\n"


def test_the_command_leaves_no_folder_and_stops_quietly_when_the_reader_does(tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT}/runner/rows.py stage=dpo n=100 data.cache={tmp_path}/cache hydra.run.dir={tmp_path}/run"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -n 1"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("rows of")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stage=sft", "nn=3"], "no such word"),
        (["n=many"], "give it as int"),
        (["n=-1"], "cannot be negative"),
        (["--n", "3"], "write n=<value>"),
        (["--multirun"], "no such flag"),
        (["resume=last"], "continues no run"),
        (["data.path=nowhere.jsonl"], "no such file"),
    ],
)
def test_wrong_words_are_three_lines_and_exit_2(words: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, f"{ROOT}/runner/rows.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and said in done.stderr
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()] == ["error", "where", "fix"]
    assert list(tmp_path.iterdir()) == []
