import os

import pytest

from data.formats import SHAPES, STAGES, Source, check_chat, check_text, fields
from data.rows import build_rows

USER = '{"role": "user", "content": "hi"}'
ASSISTANT = '{"role": "assistant", "content": "ho"}'
GOOD = {
    "text": '{"text": "good"}',
    "chat": f'{{"conversations": [{USER}, {ASSISTANT}]}}',
    "preference": f'{{"chosen": [{USER}, {ASSISTANT}], "rejected": [{USER}, {{"role": "assistant", "content": "no"}}]}}',
}


def talk(message):
    return '{"conversations": [' + USER + ", " + message + "]}"


BAD_ROWS = [  # shape, the second line of the file, what the refusal says, what it points at
    ("text", '{"text": "a', "broken JSON", "rows.jsonl:2:12"),
    ("text", "{'text': 1}", "broken JSON", "rows.jsonl:2:2"),
    ("text", "5", "a row is a JSON object, found a number", "rows.jsonl:2"),
    ("text", "null", "found null", "rows.jsonl:2"),
    ("text", '["a"]', "found a list", "rows.jsonl:2"),
    ("text", "[" * 100_000, "JSON beyond reason", "rows.jsonl:2"),
    ("text", '{"text": ' + "1" * 5000 + "}", "JSON beyond reason", "rows.jsonl:2"),
    ("text", '{"text": "\\ud800"}', "surrogate", "rows.jsonl:2"),
    ("text", '{"text": 5}', "text must be a string, found a number", "rows.jsonl:2"),
    ("text", '{"text": null}', "found null", "rows.jsonl:2"),
    ("text", '{"text": "  "}', "the text is empty", "rows.jsonl:2"),
    ("text", '{"content": "a"}', "stage=pretrain reads text; found content", "rows.jsonl:2"),
    ("text", "{}", "found nothing", "rows.jsonl:2"),
    ("chat", GOOD["text"], "reads conversations; found text", "rows.jsonl:2"),
    ("chat", '{"conversations": "hi"}', "a list of messages, found a string", "rows.jsonl:2 conversations"),
    ("chat", '{"conversations": []}', "found an empty one", "rows.jsonl:2 conversations"),
    ("chat", talk('"ho"'), "a message is a JSON object, found a string", "conversations[1]"),
    ("chat", talk('{"role": "assistent", "content": "ho"}'), 'unknown role "assistent"', "conversations[1].role"),
    ("chat", talk('{"from": "gpt", "value": "ho"}'), "unknown role null", "conversations[1].role"),
    ("chat", talk('{"role": "assistant", "content": 5}'), "content must be a string, found a number", "conversations[1].content"),
    ("chat", talk('{"role": "user", "value": "ho"}'), "content must be a string, found null", "conversations[1].content"),
    ("chat", talk('{"role": "assistant", "content": ""}'), "the assistant says nothing", "conversations[1].content"),
    ("chat", talk('{"role": "assistant", "tool_calls": "[{"}'), "broken JSON", "conversations[1].tool_calls"),
    ("chat", talk('{"role": "assistant", "tool_calls": 5}'), "expected a list of objects, found a number", "conversations[1].tool_calls"),
    ("chat", talk('{"role": "assistant", "tool_calls": [{"name": "f"}]}'), "a name and arguments", "conversations[1].tool_calls"),
    ("preference", '{"chosen": "a", "rejected": "b"}', "a list of messages, found a string", "rows.jsonl:2 chosen"),
    ("preference", '{"chosen": []}', "reads chosen and rejected; found chosen", "rows.jsonl:2"),
]


@pytest.mark.parametrize("shape, line, what, where", BAD_ROWS)
def test_a_row_that_cannot_be_used_is_refused_by_line_and_field(tokenizer, write, shape, line, what, where):
    path = write(f"{GOOD[shape]}\n{line}\n{GOOD[shape]}\n".encode())
    with pytest.raises(ValueError) as refusal:
        build_rows(shape, path, tokenizer, 64)
    assert what in refusal.value.args[0] and where in refusal.value.args[1] and refusal.value.args[2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("other", SHAPES)
def test_a_file_of_another_stage_is_told_apart(tokenizer, write, shape, other):
    path = write(GOOD[other].encode())
    if shape == other:
        assert len(build_rows(shape, path, tokenizer, 64)) == 1
        return
    with pytest.raises(ValueError) as refusal:
        build_rows(shape, path, tokenizer, 64)
    assert refusal.value.args[2] == f"the file looks made for {STAGES[other]}"


@pytest.mark.parametrize(
    "content, what",
    [
        (b"", "the file is empty"),
        (b"\n  \n\r\n", "the file is empty"),
        (b"\xef\xbb\xbf\n", "the file is empty"),
        (b"[]", "holds no row"),
        ('{"text": "é"}\n'.encode("latin-1"), "not UTF-8"),
        (b'{"text": "a"}\n{"text": "cut o', "at the end of the file"),
        (b'[{"text": "a"}', "broken JSON"),
        ('{"text": "a"}\n'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tokenizer, write, content, what):
    with pytest.raises(ValueError) as refusal:
        build_rows("text", write(content), tokenizer, 64)
    assert what in refusal.value.args[0] and "rows.jsonl" in refusal.value.args[1]


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"text": "a\\u2028b"}\r\n\r\n{"text": "c"}',
        '{"text": "a\u2028b"}\n{"text": "c"}\n'.encode(),
        '\ufeff\n [{"text": "a\\u2028b"},\n {"text": "c"}]\n'.encode(),
    ],
)
def test_marks_and_line_ends_of_other_systems_are_read_through(write, content):
    assert [row["text"] for _, row in Source.open(write(content)).rows()] == ["a\u2028b", "c"]


def test_a_missing_file_names_its_neighbour(write, tmp_path):
    write(b"{}", "pretrain.jsonl")
    with pytest.raises(ValueError) as refusal:
        Source.open(tmp_path / "pretrian.jsonl")
    assert refusal.value.args[0] == "there is no such file" and "pretrain.jsonl" in refusal.value.args[2]


def test_a_folder_or_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="not a file"):
            Source.open(path)


def test_reading_may_go_on_after_a_bad_row(write):
    bad = []
    source = Source.open(write(b'{"text": "a"}\n{\n5\n{"text": "b"}\n'))
    assert [(source.where(place)[-2:], row["text"]) for place, row in source.rows(bad.append)] == [(":1", "a"), (":4", "b")]
    assert len(bad) == 2


def test_good_values_pass_unchanged():
    messages = [{"role": "user", "content": "hi", "name": "Ada"}, {"role": "tool", "content": ""}]
    turns, tools = check_chat(messages, "", "here")
    assert [{key: turn[key] for key in ("role", "content")} for turn in turns] == [{"role": "user", "content": "hi"}, {"role": "tool", "content": ""}]
    assert turns[0]["name"] == "Ada" and tools is None
    assert check_text(" a ", "here") == " a " and fields({"text": 1, "more": 2}, "text", "here") == [1]
