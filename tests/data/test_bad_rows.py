"""Bad rows: the reason, message and position of each kind of invalid input."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.schemas.registry import SCHEMAS, detect_schema
from data.schemas.text import example_weight
from data.sources.files import Source
from data.types import BadRowError

ASK = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}
WORSE = {"role": "assistant", "content": "no"}
GOOD = {
    "text": {"text": "good"},
    "minimind chat": {"conversations": [ASK, ANSWER]},
    "openai messages": {"messages": [ASK, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    "alpaca": {"instruction": "hi", "output": "ho"},
    "prompt completion": {"prompt": "hi", "completion": "ho"},
    "minimind preference": {"chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]},
    "trl preference": {"prompt": "hi", "chosen": "ho", "rejected": "no"},
}


def chat(*messages):
    return {"conversations": list(messages)}


def message(role, content="x", **more):
    return {"role": role, "content": content, **more}


BAD_ROWS = [  # schema of the file, its second line, reason, message, position
    # bytes and JSON
    ("text", b'{"text": "a', "invalid JSON", "control character", ":2:12"),
    ("text", b"{'text': 1}", "invalid JSON", "double quotes", ":2:2"),
    ("text", b'{"text": "a\0"}', "invalid JSON", "control character", ":2:12"),
    ("text", b'{"text": "a"},', "invalid JSON", "a comma after the row", ":2:14"),
    ("text", b'{"text": "a"} {"text": "b"}', "invalid JSON", "several rows on one line", ":2:15"),
    ("text", b'{"text": "a"},{"text": "b"}', "invalid JSON", "several rows on one line", ":2:14"),
    ("text", b'{"text": "a"} b', "invalid JSON", "invalid JSON: Extra data", ":2:15"),
    (
        "prompt completion",
        {"prompt": "2+2?", "completion": 4},
        "wrong type",
        "completion must be a string, found a number",
        ":2 completion",
    ),
    (
        "prompt completion",
        {"prompt": 4, "completion": "2+2"},
        "wrong type",
        "prompt must be a string, found a number",
        ":2 prompt",
    ),
    ("text", b"{", "invalid JSON", "the line ends within an object", ":2"),
    ("text", b'{"data": [', "invalid JSON", "the line ends within an object", ":2"),
    ("text", b"[" * 100_000, "JSON beyond limits", "recursion", ":2"),
    ("text", b'{"text": "a", "text": "b"}', "JSON beyond limits", "the name 'text' is given twice in one object", ":2"),
    ("text", b'{"text": ' + b"1" * 5000 + b"}", "JSON beyond limits", "4300 digits", ":2"),
    ("text", b'{"text": "\\ud800"}', "lone surrogate", "surrogate", ":2"),
    ("text", b'{"text": "\\uDC00 \\ud83d\\ude00"}', "lone surrogate", "surrogate", ":2"),
    ("text", '{"text": "é"}'.encode("latin-1"), "not UTF-8", "not UTF-8", ":2, byte 11"),
    # types and keys
    ("text", b"5", "not an object", "found a number", ":2"),
    ("text", b"null", "not an object", "found null", ":2"),
    ("text", b'["a"]', "not an object", "found a list", ":2"),
    ("text", {"text": 5}, "wrong type", "text must be a string, found a number", ":2"),
    ("text", b'{"text": NaN}', "wrong type", "found a number", ":2"),
    ("text", {"text": None}, "wrong type", "found null", ":2"),
    ("text", {"text": ["a"]}, "wrong type", "found a list", ":2"),
    ("text", {}, "wrong keys", "found no keys", ":2"),
    ("text", {"content": "a", "id": 1}, "wrong keys", "have text; found content, id", ":2"),
    ("minimind chat", {"text": "a"}, "wrong keys", "have conversations; found text", ":2"),
    ("trl preference", {"prompt": "hi", "chosen": "ho"}, "wrong keys", "found prompt, chosen", ":2"),
    # nothing in it
    ("text", {"text": ""}, "empty text", "the text is empty", ":2"),
    ("text", {"text": " \n\u3000"}, "empty text", "the text is empty", ":2"),
    ("alpaca", {"instruction": "", "input": " ", "output": "a"}, "empty text", "instruction and input are empty", ":2"),
    ("alpaca", {"instruction": "a", "output": ""}, "empty assistant turn", "output is empty", ":2 output"),
    ("alpaca", {"instruction": "a", "output": None}, "wrong type", "output must be a string, found null", ":2 output"),
    ("prompt completion", {"prompt": " ", "completion": "a"}, "empty text", "the prompt is empty", ":2 prompt"),
    (
        "prompt completion",
        {"prompt": "a", "completion": "\n"},
        "empty assistant turn",
        "completion is empty",
        ":2 completion",
    ),
    (
        "minimind chat",
        chat(ASK, message("assistant", "")),
        "empty assistant turn",
        "the assistant message is empty",
        ":2 conversations[1].content",
    ),
    (
        "minimind chat",
        chat(ASK, message("assistant", None)),
        "empty assistant turn",
        "the assistant message is empty",
        ":2 conversations[1].content",
    ),
    (
        "trl preference",
        {"prompt": "hi", "chosen": "ho", "rejected": ""},
        "empty assistant turn",
        "rejected is empty",
        ":2 rejected",
    ),
    # conversations
    ("minimind chat", {"conversations": "hi"}, "wrong type", "a list of messages, found a string", ":2 conversations"),
    ("minimind chat", {"conversations": []}, "wrong type", "found an empty list", ":2 conversations"),
    ("minimind chat", {"conversations": "[{"}, "invalid JSON", "invalid JSON", ":2 conversations:3"),
    (
        "minimind chat",
        chat(ASK, "ho"),
        "wrong type",
        "a message must be a JSON object, found a string",
        ":2 conversations[1]",
    ),
    ("minimind chat", chat(ASK, message("assistent")), "unknown role", 'got "assistent"', ":2 conversations[1].role"),
    ("minimind chat", chat(ASK, {"content": "ho"}), "unknown role", "got null", ":2 conversations[1].role"),
    (
        "minimind chat",
        chat(ASK, message(["assistant"])),
        "unknown role",
        'got ["assistant"]',
        ":2 conversations[1].role",
    ),
    ("sharegpt", chat({"from": "humam", "value": "hi"}), "unknown role", 'got "humam"', ":2 conversations[0].from"),
    (
        "minimind chat",
        chat(ASK, message("assistant", 5)),
        "wrong type",
        "content must be a string, found a number",
        ":2 conversations[1].content",
    ),
    (
        "minimind chat",
        chat({"role": "user", "text": "ho"}, ANSWER),
        "wrong type",
        "content must be a string, found null",
        ":2 conversations[0].content",
    ),
    (
        "openai messages",
        {"messages": [message("user", [{"type": "image_url"}]), ANSWER]},
        "wrong type",
        "text parts are supported, found image_url",
        ":2 messages[0].content",
    ),
    (
        "minimind chat",
        chat(ASK, message("assistant", tool_calls="[{")),
        "invalid JSON",
        "invalid JSON",
        ":2 conversations[1].tool_calls:3",
    ),
    (
        "minimind chat",
        chat(ASK, message("assistant", tool_calls=5)),
        "wrong type",
        "a list of objects, found a number",
        ":2 conversations[1].tool_calls",
    ),
    (
        "minimind chat",
        chat(ASK, message("assistant", tool_calls=[{"name": "f"}])),
        "wrong type",
        "needs a name and arguments",
        ":2 conversations[1].tool_calls",
    ),
    (
        "minimind chat",
        {**chat(ASK, ANSWER), "tools": "weather"},
        "wrong type",
        "a list of objects, found a string",
        ":2 conversations tools",
    ),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "history": [["a"]]},
        "wrong type",
        "history must be a list of [question, answer]",
        ":2 history",
    ),
    ("minimind chat", chat(ASK, ASK, ANSWER), "roles out of order", "user after user", ":2 conversations[1].role"),
    (
        "minimind chat",
        chat(ASK, ANSWER, ANSWER),
        "roles out of order",
        "assistant after assistant",
        ":2 conversations[2].role",
    ),
    ("minimind chat", chat(ANSWER, ASK), "roles out of order", "assistant comes first", ":2 conversations[0].role"),
    (
        "minimind chat",
        chat(ASK, message("system"), ANSWER),
        "roles out of order",
        "system after user",
        ":2 conversations[1].role",
    ),
    (
        "minimind chat",
        chat(ASK, message("tool"), ANSWER),
        "roles out of order",
        "tool after user",
        ":2 conversations[1].role",
    ),
    ("minimind chat", chat(ASK), "no assistant turn", "no assistant message", ":2 conversations"),
    ("minimind chat", chat(message("system"), ASK), "no assistant turn", "no assistant message", ":2 conversations"),
    # preferences
    (
        "minimind preference",
        {"chosen": "a", "rejected": "b"},
        "wrong type",
        "a list of messages, found a string",
        ":2 chosen",
    ),
    (
        "minimind preference",
        {"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]},
        "chosen equals rejected",
        "are the same",
        ":2",
    ),
    (
        "minimind preference",
        {"chosen": [ASK, ANSWER], "rejected": [message("user", "another"), ANSWER]},
        "different prompts",
        "first questions of chosen and rejected differ",
        ":2",
    ),
    (
        "minimind preference",
        {
            "chosen": [message("system", "Be kind."), ASK, ANSWER],
            "rejected": [message("system", "Be rude."), ASK, message("assistant", "no")],
        },
        "different prompts",
        "the system messages or first questions of chosen and rejected differ",
        ":2",
    ),
    (
        "minimind preference",
        {"chosen": [ASK, ANSWER], "rejected": [ASK]},
        "no assistant turn",
        "no assistant message",
        ":2 rejected",
    ),
    (
        "trl preference",
        {"prompt": "hi", "chosen": "ho", "rejected": "ho"},
        "chosen equals rejected",
        "are the same",
        ":2",
    ),
    (
        "trl preference",
        {"prompt": "hi", "chosen": [message("user", "another"), ANSWER], "rejected": "no"},
        "roles out of order",
        "user after user",
        ":2 chosen[1].role",
    ),
    ("trl preference", {"prompt": "hi", "chosen": 5, "rejected": "no"}, "wrong type", "found a number", ":2 chosen"),
]


def read(path, schema):
    """Return the example of each row, or its BadRowError."""
    source, examples = Source.open(path), []
    for position, raw in source.items():
        try:
            examples.append(SCHEMAS[schema].read(source.parse(position, raw), source.where(position)))
        except BadRowError as error:
            examples.append(error)
    return examples


def write_lines(write, *lines):
    return write(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))


@pytest.mark.parametrize(
    "schema, line, reason, message, where", BAD_ROWS, ids=[f"{index} {row[2]}" for index, row in enumerate(BAD_ROWS)]
)
def test_bad_row_is_reported_and_the_rows_around_it_are_read(write, schema, line, reason, message, where):
    path = write_lines(write, GOOD[schema], line, GOOD[schema])
    before, error, after = read(path, schema)
    assert before == after and not isinstance(before, BadRowError)
    assert (error.reason, error.setting) == (reason, f"{path}{where}")
    assert message in error.message and error.fix


@pytest.mark.parametrize("schema", GOOD)
def test_bad_row_at_the_end_is_reported_as_a_truncated_file(write, schema):
    content = json.dumps(GOOD[schema]).encode()
    for part in (content[:-5], content[:1]):
        good, error = read(write(content + b"\n" + part), schema)
        assert not isinstance(good, BadRowError) and error.reason == "truncated file" and "truncated" in error.fix
    # complete, without a line end
    assert not any(isinstance(row, BadRowError) for row in read(write(content + b"\n" + content), schema))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n \n"])
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b"\n\n"])
def test_bad_row_is_not_reported_for_byte_order_marks_and_line_ends(write, begin, end):
    content = begin + b"".join(
        line + end for line in ('{"text": "a\u2028b\x85c"}'.encode(), b'{"text": "\\u2028\\u0000"}')
    )
    assert [row.text for row in read(write(content), "text")] == ["a\u2028b\x85c", "\u2028\0"]


def test_bad_row_of_frequent_mistakes_has_a_specific_fix(write):
    for content in (b'{"text": "a"},\n{"text": "b"}\n', b'{"text": "a"}\n{"text": "b"},'):
        (error,) = [row for row in read(write(content), "text") if isinstance(row, BadRowError)]
        assert error.fix.startswith("remove the comma")
    indented = json.dumps(GOOD["minimind chat"], indent=2).encode()
    assert "jq -c . FILE" in read(write(indented, "rows.json"), "minimind chat")[0].fix


@pytest.mark.parametrize("content", ["\0\0binary", "h\0i\0"])
def test_bad_row_is_a_text_file_with_nul_bytes(write, content):
    (error,) = read(write(content.encode(), "book.txt"), "text")
    assert error.reason == "binary data"


def test_bad_row_is_not_reported_for_control_tokens_in_a_message(write):
    text = "x<|im_end|>\n<|im_start|>assistant\n\u0085\u200b\ufeff"
    (row,) = read(write_lines(write, {"conversations": [{"role": "user", "content": text}, ANSWER]}), "minimind chat")
    assert row.messages[0]["content"] == text


NAMES = [*{key for schema in SCHEMAS.values() for key in schema.keys}, "input", "history", "system", "tools", "weight"]
TEXTS = st.sampled_from(
    ["", " ", "hi", "[", "[{", "[]", "null", '[{"role": "user"}]', '{"name": "f", "arguments": "{"}']
)
ROLES = st.sampled_from(
    ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", 5, None]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": ROLES,
            "from": ROLES,
            **dict.fromkeys(["content", "value", "tool_calls", "reasoning_content", "tools"], JSON),
        },
    ),
    max_size=4,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(NAMES), JSON | MESSAGES, max_size=6), st.sampled_from([*SCHEMAS]))
def test_bad_row_error_is_the_only_exception_for_any_row(row, schema):
    for read_row in (
        SCHEMAS[schema].read,
        example_weight,
        lambda row, where: detect_schema(row, SCHEMAS[schema].data_format, where),
    ):
        try:
            read_row(row, "file:1")
        except BadRowError as error:
            assert error.reason and error.message and error.fix and error.setting.startswith("file:1")
