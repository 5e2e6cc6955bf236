"""The catalogue of bad input, file by file: what each row is called when it is left out, and where it is said to stand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.schemas.errors import BadRowError
from data.schemas.schemas import SCHEMAS, detect_schema, example_weight
from data.sources.files import Source

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


def talk(*messages):
    return {"conversations": list(messages)}


def says(role, content="x", **more):
    return {"role": role, "content": content, **more}


CATALOGUE = [  # the shape of the file, its second line, reason, what is said, where
    # bytes and JSON
    ("text", b'{"text": "a', "broken JSON", "control character", ":2:12"),
    ("text", b"{'text': 1}", "broken JSON", "double quotes", ":2:2"),
    ("text", b'{"text": "a\0"}', "broken JSON", "control character", ":2:12"),
    ("text", b'{"text": "a"},', "broken JSON", "a comma stands behind the row", ":2:14"),
    ("text", b"{", "broken JSON", "the line ends where an object begins", ":2"),
    ("text", b'{"data": [', "broken JSON", "the line ends where an object begins", ":2"),
    ("text", b"[" * 100_000, "JSON beyond reason", "recursion", ":2"),
    ("text", b'{"text": ' + b"1" * 5000 + b"}", "JSON beyond reason", "4300 digits", ":2"),
    ("text", b'{"text": "\\ud800"}', "half a surrogate pair", "surrogate", ":2"),
    ("text", b'{"text": "\\uDC00 \\ud83d\\ude00"}', "half a surrogate pair", "surrogate", ":2"),
    ("text", '{"text": "é"}'.encode("latin-1"), "not UTF-8", "not UTF-8", ":2, byte 11"),
    # types and keys
    ("text", b"5", "not an object", "found a number", ":2"),
    ("text", b"null", "not an object", "found null", ":2"),
    ("text", b'["a"]', "not an object", "found a list", ":2"),
    ("text", {"text": 5}, "wrong type", "text must be a string, found a number", ":2"),
    ("text", b'{"text": NaN}', "wrong type", "found a number", ":2"),
    ("text", {"text": None}, "wrong type", "found null", ":2"),
    ("text", {"text": ["a"]}, "wrong type", "found a list", ":2"),
    ("text", {}, "wrong keys", "found nothing", ":2"),
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
    ("prompt completion", {"prompt": "a", "completion": "\n"}, "empty assistant turn", "completion is empty", ":2 completion"),
    ("minimind chat", talk(ASK, says("assistant", "")), "empty assistant turn", "the assistant says nothing", ":2 conversations[1].content"),
    ("minimind chat", talk(ASK, says("assistant", None)), "empty assistant turn", "the assistant says nothing", ":2 conversations[1].content"),
    ("trl preference", {"prompt": "hi", "chosen": "ho", "rejected": ""}, "empty assistant turn", "rejected is empty", ":2 rejected"),
    # conversations
    ("minimind chat", {"conversations": "hi"}, "wrong type", "a list of messages, found a string", ":2 conversations"),
    ("minimind chat", {"conversations": []}, "wrong type", "found an empty one", ":2 conversations"),
    ("minimind chat", {"conversations": "[{"}, "broken JSON", "broken JSON", ":2 conversations:3"),
    ("minimind chat", talk(ASK, "ho"), "wrong type", "a message is a JSON object, found a string", ":2 conversations[1]"),
    ("minimind chat", talk(ASK, says("assistent")), "unknown role", 'unknown role "assistent"', ":2 conversations[1].role"),
    ("minimind chat", talk(ASK, {"content": "ho"}), "unknown role", "unknown role null", ":2 conversations[1].role"),
    ("minimind chat", talk(ASK, says(["assistant"])), "unknown role", 'unknown role ["assistant"]', ":2 conversations[1].role"),
    ("sharegpt", talk({"from": "humam", "value": "hi"}), "unknown role", 'unknown role "humam"', ":2 conversations[0].from"),
    ("minimind chat", talk(ASK, says("assistant", 5)), "wrong type", "content must be a string, found a number", ":2 conversations[1].content"),
    ("minimind chat", talk({"role": "user", "value": "ho"}, ANSWER), "wrong type", "content must be a string, found null", ":2 conversations[0].content"),
    ("openai messages", {"messages": [says("user", [{"type": "image_url"}]), ANSWER]}, "wrong type", "found a part image_url", ":2 messages[0].content"),
    ("minimind chat", talk(ASK, says("assistant", tool_calls="[{")), "broken JSON", "broken JSON", ":2 conversations[1].tool_calls:3"),
    ("minimind chat", talk(ASK, says("assistant", tool_calls=5)), "wrong type", "a list of objects, found a number", ":2 conversations[1].tool_calls"),
    ("minimind chat", talk(ASK, says("assistant", tool_calls=[{"name": "f"}])), "wrong type", "a name and arguments", ":2 conversations[1].tool_calls"),
    ("minimind chat", {**talk(ASK, ANSWER), "tools": "weather"}, "wrong type", "a list of objects, found a string", ":2 conversations tools"),
    ("alpaca", {"instruction": "a", "output": "b", "history": [["a"]]}, "wrong type", "history is a list of [question, answer]", ":2 history"),
    ("minimind chat", talk(ASK, ASK, ANSWER), "roles out of order", "user after user", ":2 conversations[1].role"),
    ("minimind chat", talk(ASK, ANSWER, ANSWER), "roles out of order", "assistant after assistant", ":2 conversations[2].role"),
    ("minimind chat", talk(ANSWER, ASK), "roles out of order", "assistant comes first", ":2 conversations[0].role"),
    ("minimind chat", talk(ASK, says("system"), ANSWER), "roles out of order", "system after user", ":2 conversations[1].role"),
    ("minimind chat", talk(ASK, says("tool"), ANSWER), "roles out of order", "tool after user", ":2 conversations[1].role"),
    ("minimind chat", talk(ASK), "no assistant turn", "no assistant turn", ":2 conversations"),
    ("minimind chat", talk(says("system"), ASK), "no assistant turn", "no assistant turn", ":2 conversations"),
    # preferences
    ("minimind preference", {"chosen": "a", "rejected": "b"}, "wrong type", "a list of messages, found a string", ":2 chosen"),
    ("minimind preference", {"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]}, "chosen equals rejected", "are the same", ":2"),
    ("minimind preference", {"chosen": [ASK, ANSWER], "rejected": [ASK]}, "no assistant turn", "no assistant turn", ":2 rejected"),
    ("trl preference", {"prompt": "hi", "chosen": "ho", "rejected": "ho"}, "chosen equals rejected", "are the same", ":2"),
    (
        "trl preference",
        {"prompt": "hi", "chosen": [says("user", "another"), ANSWER], "rejected": "no"},
        "roles out of order",
        "user after user",
        ":2 chosen[1].role",
    ),
    ("trl preference", {"prompt": "hi", "chosen": 5, "rejected": "no"}, "wrong type", "found a number", ":2 chosen"),
]


def read(path, shape):
    """What each row became, or its BadRow."""
    source = Source.open(path)
    for place, raw in source.items():
        try:
            yield SCHEMAS[shape].read(source.row(place, raw), source.where(place))
        except BadRowError as error:
            yield error


def write_lines(write, *lines):
    return write(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))


@pytest.mark.parametrize("shape, line, reason, what, where", CATALOGUE)
def test_a_bad_row_is_named_and_the_rows_around_it_are_read(write, shape, line, reason, what, where):
    path = write_lines(write, GOOD[shape], line, GOOD[shape])
    before, error, after = read(path, shape)
    assert before == after and not isinstance(before, BadRowError)
    assert (error.reason, error.args[1]) == (reason, f"{path}{where}")
    assert what in error.args[0] and len(error.args) == 3 and error.args[2]


@pytest.mark.parametrize("shape", GOOD)
def test_a_file_that_is_cut_off_says_so_of_its_last_line(write, shape):
    content = json.dumps(GOOD[shape]).encode()
    for part in (content[:-5], content[:1]):
        good, cut = read(write(content + b"\n" + part), shape)
        assert not isinstance(good, BadRowError) and cut.reason == "file cut off" and "cut off" in cut.args[2]
    assert not any(isinstance(row, BadRowError) for row in read(write(content + b"\n" + content), shape))  # no line end behind the last row is fine


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n \n"])
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b"\n\n"])
def test_marks_and_line_ends_of_other_systems_are_read_through(write, begin, end):
    content = begin + b"".join(line + end for line in ('{"text": "a\u2028b\x85c"}'.encode(), b'{"text": "\\u2028\\u0000"}'))
    assert [row.text for row in read(write(content), "text")] == ["a\u2028b\x85c", "\u2028\0"]


def test_a_mistake_in_every_line_is_told_with_its_remedy(write):
    for content in (b'{"text": "a"},\n{"text": "b"}\n', b'{"text": "a"}\n{"text": "b"},'):
        (error,) = [row for row in read(write(content), "text") if isinstance(row, BadRowError)]
        assert error.args[2].startswith("take the comma away")
    pretty = json.dumps(GOOD["minimind chat"], indent=2).encode()
    assert "jq -c . FILE" in next(read(write(pretty, "rows.json"), "minimind chat")).args[2]


@pytest.mark.parametrize(
    "file, content", [("rows.jsonl", '{"text": "é"}\n'), ("rows.json", '\n[{"text": "a"}]'), ("rows", "[]"), ("book.txt", "a"), ("rows.csv", "text\n1")]
)
@pytest.mark.parametrize(
    "encoding, name", [("utf-16", "UTF-16"), ("utf-32", "UTF-32"), ("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE"), ("utf-32-le", "UTF-32LE")]
)
def test_a_file_of_another_encoding_is_told_how_to_become_utf_8(write, file, content, encoding, name):
    if name[-2:] in ("LE", "BE") and file in ("book.txt", "rows.csv"):
        return  # where no mark says so, only JSON is known by its first bytes
    with pytest.raises(ValueError) as refusal:
        Source.open(write(content.encode(encoding), file))
    assert name in refusal.value.args[0] and refusal.value.args[2].endswith(f"iconv -f {name} -t UTF-8")


@pytest.mark.parametrize("content", ["\0\0binary", "h\0i\0"])
def test_a_text_file_with_nul_bytes_is_no_text(write, content):
    (row,) = read(write(content.encode(), "book.txt"), "text")
    assert row.reason == "not a text"


def test_control_tokens_in_a_text_are_text(write):
    text = "x<|im_end|>\n<|im_start|>assistant\n\u0085\u200b\ufeff"
    (row,) = read(write_lines(write, {"conversations": [{"role": "user", "content": text}, ANSWER]}), "minimind chat")
    assert row.messages[0]["content"] == text


NAMES = [*{key for shape in SCHEMAS.values() for key in shape.keys}, "input", "history", "system", "tools", "weight"]
WORDS = st.sampled_from(["", " ", "hi", "[", "[{", "[]", "null", '[{"role": "user"}]', '{"name": "f", "arguments": "{"}'])
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", 5, None])
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | WORDS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": ROLES, "from": ROLES, **dict.fromkeys(["content", "value", "tool_calls", "reasoning_content", "tools"], JSON)}),
    max_size=4,
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON | MESSAGES, max_size=6), st.sampled_from([*SCHEMAS]))
def test_whatever_a_row_holds_it_is_read_or_bad(row, shape):
    for read_it in (SCHEMAS[shape].read, example_weight, lambda row, where: detect_schema(row, SCHEMAS[shape].rows, where)):
        try:
            read_it(row, "file:1")
        except BadRowError as error:
            assert all(isinstance(part, str) and part for part in (error.reason, *error.args)) and error.args[1].startswith("file:1")
