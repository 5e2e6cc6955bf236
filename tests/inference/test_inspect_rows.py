"""rows.py prints what the model will read, and no text of a row can hide which tokens have loss."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.tokenize.tokenizer import Tokenizer
from runner.config.compose import compose_config
from runner.engine.data_pipeline import build_data_pipeline
from runner.inference.inspect_rows import RowsConfig, TokenSpan, TokenView, inspect_rows, length_histogram, token_spans

ROOT = Path(__file__).parents[2]
TOKENIZER = Tokenizer.load(ROOT / "data" / "samples" / "tokenizer")
CHAT = '{"conversations": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]}\n'


@pytest.fixture
def rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """rows(lines, *overrides, **settings of rows.py): what the command prints for a file of these lines."""

    def rows(lines: str, *overrides: str, stage: str = "sft", **changes: object) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text(lines, encoding="utf-8")
        data = [f"data.path={path}", f"data.cache={tmp_path}/cache", "data.val_path=null", "data.val_fraction=0"]
        cfg = {"n": 3, "row": None, "ids": False, "packed": None, "plain": True, **changes}
        capsys.readouterr()
        inspect_rows(RowsConfig(**cfg), compose_config([f"stage={stage}", *data, *overrides]))
        return capsys.readouterr().out

    return rows


def rows_of(printed: str) -> str:
    """The output without the tables before the rows."""
    return printed.partition("\\n is a line break\n")[2]


def test_rows_prints_exactly_the_tokens_with_loss_in_brackets(rows) -> None:
    printed = rows(CHAT, packed=False)
    blank, where, *text = rows_of(printed).splitlines()
    assert blank == "" and where.endswith("rows.jsonl:1: 20 tokens, 3 with loss")
    assert text == [
        r"    <|im_start|>user\n",
        r"    2 + 2?<|im_end|>\n",
        r"    <|im_start|>assistant\n",
        r"    [four<|im_end|>]\n",
    ]


WEIGHTED = CHAT.replace('"four"', '"four", "weight": 0.5')


def test_rows_prints_the_weight_of_tokens_where_it_is_not_1(rows) -> None:
    printed = rows(WEIGHTED, packed=False, ids=True)
    assert (
        r"    [four<|im_end|>]x0.5\n" in printed
        and "20 tokens, 3 with loss" in printed
        and re.search(r"ids: .*\]x0\.5 \d+", printed)
    )
    assert "]x0.5" not in rows_of(rows(CHAT, packed=False))
    terminal = Terminal()
    TokenView(plain=False, stream=terminal).print_spans(
        [
            TokenSpan("fo", [5], 0.5, "assistant"),
            TokenSpan("ur", [6], 0.5, "assistant"),
            TokenSpan("!", [7], 1, "assistant"),
        ]
    )
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()) == "    fourx0.5!\n"


def test_rows_prints_the_whole_answers_of_a_pair_in_brackets(rows) -> None:
    chats = [
        f'[{{"role": "user", "content": "2 + 2?"}}, {{"role": "assistant", "content": "It is {answer}."}}]'
        for answer in ("4", "5")
    ]
    printed = rows_of(rows(f'{{"chosen": {chats[0]}, "rejected": {chats[1]}}}\n', stage="dpo"))
    assert "rows.jsonl:1 chosen: " in printed and "rows.jsonl:1 rejected: " in printed
    assert r"    [It is 4.<|im_end|>]\n" in printed and r"    [It is 5.<|im_end|>]\n" in printed


def test_rows_prints_all_tokens_of_a_text_but_the_first_in_brackets(rows) -> None:
    assert "    <|im_start|>[Once upon a time.<|im_end|>]" in rows_of(
        rows('{"text": "Once upon a time."}\n', stage="pretrain")
    )


def test_rows_escapes_brackets_and_control_characters(rows) -> None:
    printed = rows_of(rows('{"text": "a[0]\\u001b[2Jb\\tc\\rd\\u202ee"}\n', stage="pretrain"))
    assert r"[a\[0\]\x1b\[2Jb\tc\rd\u202ee<|im_end|>]" in printed


def test_rows_prints_ids_with_the_same_brackets(rows) -> None:
    ids = TOKENIZER.encode("Once upon a time.")
    printed = rows('{"text": "Once upon a time."}\n', stage="pretrain", ids=True)
    assert f"    ids: 1 [{' '.join(map(str, ids))} 2]" in printed


def test_rows_finds_a_row_by_its_number_and_by_its_line(rows) -> None:
    lines = "".join(f'{{"text": "This is row {i}."}}\n' for i in range(50))
    by_number, by_line = (rows_of(rows(lines, stage="pretrain", row=row)) for row in ("29", "rows.jsonl:30"))
    assert by_number == by_line and "This is row 29." in by_number and by_number.count("with loss") == 1


@pytest.mark.parametrize("row", ["50", "rows.jsonl:51", "other.jsonl:1", "nonsense"])
def test_rows_refuses_a_row_that_does_not_exist(rows, row: str) -> None:
    with pytest.raises(UserError) as error:
        rows('{"text": "Hello."}\n' * 50, stage="pretrain", row=row)
    assert error.value.setting == f"row={row}"


def test_rows_prints_all_parts_of_a_split_text(rows) -> None:
    printed = rows_of(
        rows('{"text": "' + "go " * 300 + '"}\n', "data.max_length=64", stage="pretrain", row="rows.jsonl:1")
    )
    assert printed.count("rows.jsonl:1: ") > 4


@pytest.mark.slow
def test_rows_finds_held_out_rows(rows) -> None:
    lines = "".join(f'{{"text": "This is row {i}."}}\n' for i in range(7))
    for line in range(1, 8):
        assert f"This is row {line - 1}." in rows(
            lines, "data.val_fraction=0.3", stage="pretrain", row=f"rows.jsonl:{line}"
        )


def test_rows_prints_all_positions_of_a_packed_sequence(rows) -> None:
    lines = "".join(f'{{"text": "{"go " * (i % 13 + 1)}"}}\n' for i in range(60))
    printed = rows(lines, "data.max_length=32", stage="pretrain", packed=True, n=5)
    for sequence in rows_of(printed).split("\nsequence ")[1:]:
        spans = [
            (int(start), int(stop)) for start, stop in re.findall(r"^  positions (\d+)-(\d+):", sequence, re.MULTILINE)
        ]
        assert spans[0][0] == 0 and spans[-1][1] == 31
        assert all(before[1] + 1 == after[0] for before, after in zip(spans[:-1], spans[1:], strict=True))


def test_rows_counts_bad_rows_by_reason_with_the_first_line(rows) -> None:
    printed = rows(CHAT * 3 + "not json\n", "data.on_bad_row=skip", "data.max_bad_fraction=0.5")
    assert re.search(r"bad 1: invalid JSON \(first:\s+\S+rows\.jsonl:4", printed)


@pytest.mark.slow
def test_length_histogram_counts_every_row_once(tmp_path: Path) -> None:
    cfg = compose_config(["stage=sft", f"data.cache={tmp_path}"])
    rows = build_data_pipeline(cfg, TOKENIZER).train.rows
    assert sum(int(line.split()[1].replace(",", "")) for line in length_histogram(rows)[1:]) == len(rows)


@pytest.mark.parametrize(
    "stage", ["pretrain", "dpo", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("sft", "lora"))]
)
def test_rows_prints_the_shipped_samples_of_every_stage(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect_rows(
        RowsConfig(n=2, row=None, ids=True, packed=None, plain=True),
        compose_config([f"stage={stage}", f"data.cache={tmp_path}"]),
    )
    printed = capsys.readouterr().out
    assert (
        all(text in printed for text in ("with loss", "filled with tokens", "[", "ids: 1 ", ".jsonl:"))
        and "\x1b" not in printed
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_on_a_terminal_has_role_colours_and_bold_loss(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    line = CHAT.replace('{"role": "user"', '{"role": "system", "content": "Be brief."}, {"role": "user"').replace(
        "]}", ', {"role": "tool", "content": "wet"}, {"role": "assistant", "content": "dry"}]}'
    )
    rows(line, plain=False)
    styled = re.findall(r"\x1b\[([\d;]+)m([^\x1b]+)", terminal.getvalue())
    for code, text in (("2;35", "brief"), ("2;36", "2"), ("1;32", "four"), ("2;33", "wet"), ("1;32", "dry")):
        assert any(style == code and text in part for style, part in styled), (code, text)
    assert {style for style, _ in styled if style.startswith("1;")} == {"1;32"}  # only the assistant's tokens have loss


def test_rows_prints_a_random_system_message(rows) -> None:
    printed = rows(CHAT, "data.system_prob=1", "data.system_prompts=[Be brief.]")
    assert r"<|im_start|>system\n" in printed and "Be brief." in printed


@pytest.mark.slow
@settings(max_examples=10)
@given(st.text(max_size=20), st.integers(0, 20))
def test_token_spans_have_every_token_once_and_the_whole_text(text: str, first: int) -> None:
    ids = TOKENIZER.encode(text)
    loss_mask = [number >= first for number in range(len(ids))]
    spans = list(token_spans(TOKENIZER, ids, loss_mask, []))
    assert [token for span in spans for token in span.ids] == ids
    assert [span.has_loss for span in spans for _ in span.ids] == loss_mask
    if first == 0:
        assert "".join(span.text for span in spans) == text


def test_token_spans_have_the_spaces_of_a_tokenizer_like_sentencepiece(tmp_path: Path) -> None:
    """Before: "InPell" for "In Pell", because the first of some tokens is decoded without its space."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers

    engine = Engine(models.WordLevel({"<unk>": 0, "</s>": 1, "\u2581In": 2, "\u2581Pell": 3}, unk_token="<unk>"))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    engine.add_special_tokens(["<unk>", "</s>"])
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    spans = token_spans(Tokenizer.load(tmp_path), [2, 3, 1], [False, True, True], [])
    assert [span.text for span in spans] == ["In", " Pell", "</s>"]


def test_token_spans_have_characters_of_which_each_byte_is_a_token(tmp_path: Path) -> None:
    """Before: three replacement characters for each but the first, because its bytes were decoded with one before it."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models

    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: number for number, token in enumerate(tokens)}
    engine = Engine(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    engine.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    engine.add_special_tokens(["<unk>", "</s>"])
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = Tokenizer.load(tmp_path)
    ids = [*tokenizer.encode("\u4e2d\u6587"), 1]
    spans = token_spans(tokenizer, ids, [False] * 3 + [True] * 4, [])
    assert [span.text for span in spans] == ["\u4e2d", "\u6587", "</s>"]


def test_token_spans_end_a_character_where_its_bytes_do_not_continue() -> None:
    part, text = TOKENIZER.encode("\U0001f984")[:1], TOKENIZER.encode("goats")
    assert [span.ids for span in token_spans(TOKENIZER, part + text, [0] * 9, [])] == [part, *([each] for each in text)]


def test_rich_token_view_does_not_interpret_markup() -> None:
    terminal = Terminal()
    TokenView(plain=False, stream=terminal).print("[red]no[/red]")
    assert terminal.getvalue() == "[red]no[/red]\n"


@pytest.mark.slow
def test_rows_command_writes_no_folder_and_ignores_a_closed_pipe(tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT}/runner/rows.py stage=dpo n=100 data.cache={tmp_path}/cache hydra.run.dir={tmp_path}/run"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0 and "Error" not in done.stderr  # a slow machine prints the progress of tokenising there
    assert done.stdout.startswith("rows of")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["stage=sft", "nn=3"],
        ["n=many"],
        ["n=-1"],
        ["--n", "3"],
        ["--multirun"],
        ["resume=last"],
        ["data.path=missing.jsonl"],
    ],
    ids=" ".join,
)
def test_rows_command_refuses_invalid_overrides_with_exit_code_2(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["rows.py", *overrides])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(f"{ROOT}/runner/rows.py", run_name="__main__")
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == ""
    assert [line.split(":")[0].strip() for line in err.splitlines()] == ["error", "where", "fix"]
    assert list(tmp_path.iterdir()) == []
