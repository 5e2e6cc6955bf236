"""Columns of a user's file: mapped by data.columns, guessed where they are not, refused where ignoring them would train
on the wrong thing, listed otherwise.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.schemas.columns import columns_override, columns_setting
from data.schemas.registry import SCHEMAS, detect_schema, schema_of_source
from data.sources.files import ReadOptions, Source
from data.types import BadRowError
from runner.config.literals import parse_value, quote_columns

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def open_with(path, **columns):
    return Source.open(path, ReadOptions(columns=tuple(columns.items())))


@pytest.mark.parametrize(
    "row, data_format, guess",
    [
        ({"question": "a", "answer": "b", "id": 1}, "chat", "{prompt: question, completion: answer}"),
        ({"input": "a", "output": "b"}, "chat", "{prompt: input, completion: output}"),
        ({"instruction": "a", "response": "b"}, "chat", "{output: response}"),
        ({"Prompt": "a", "Target": "b"}, "chat", "{prompt: Prompt, completion: Target}"),
        ({"问题": "a", "答案": "b"}, "chat", '{prompt: "问题", completion: "答案"}'),
        ({"dialog": CHAT, "id": 1}, "chat", "{messages: dialog}"),
        ({"question": "a", "chosen": "b", "bad": "c"}, "preference", "{prompt: question, rejected: bad}"),
        (
            {"chosen_messages": CHAT, "rejected_messages": [CHAT[0], {**CHAT[1], "content": "no"}]},
            "preference",
            "{chosen: chosen_messages, rejected: rejected_messages}",
        ),
        ({"content": "a", "url": "b"}, "text", "{text: content}"),
        ({"raw text, cleaned": "a", "n": 1}, "text", '{text: "raw text, cleaned"}'),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_columns_that_can_be_guessed_are_refused_with_their_override(row, data_format, guess, write):
    """Before: only the names that a stage reads.

    The override is typed as it is shown, and then the file is read.
    """
    with pytest.raises(BadRowError) as error:
        detect_schema(row, data_format, "file:1")
    assert error.value.fix == f"name your columns, a guess is 'data.columns={guess}'"
    columns = parse_value(f"data.columns={guess}")
    source = open_with(write([row]), **columns)
    schema = SCHEMAS[schema_of_source(source, data_format)]
    ((_, mapped),) = source.rows()
    assert schema.data_format == data_format and all(key in mapped for key in schema.keys)


def test_columns_of_another_stage_are_guessed_with_that_stage():
    with pytest.raises(BadRowError) as error:
        detect_schema({"question": "a", "answer": "b"}, "text", "file:1")
    assert "stage=sft 'data.columns={prompt: question, completion: answer}'" in error.value.fix


def test_columns_with_numbers_in_place_of_answers_are_guessed():
    assert (
        columns_override({"question": "a", "answer": 4}, "chat")
        == "'data.columns={prompt: question, completion: answer}'"
    )


def test_columns_of_a_csv_file_without_a_header_are_not_guessed(write):
    with pytest.raises(BadRowError) as error:
        schema_of_source(Source.open(write(b"What is up\nIt is fine\n", "rows.csv")), "text")
    assert "write a line with the names of the columns before it" in error.value.fix and "guess" not in error.value.fix


def test_column_of_the_prompt_of_a_preference_is_guessed():
    row = {"question": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(BadRowError) as error:
        detect_schema(row, "preference", "file:1").read(row, "file:1")
    assert error.value.fix.endswith("a guess is 'data.columns={prompt: question}'")


def test_columns_without_a_guess_have_none():
    assert columns_override({"license": "MIT", "n": 1}, "text") == ""
    assert columns_override({"x": "a", "y": "b"}, "chat") == columns_override({"x": "a", "y": "b"}, "text") == ""


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.text(min_size=1).filter(
        lambda name: "\\" not in name and "$" not in name and "'" not in name and name.isprintable()
    )
)
def test_columns_setting_can_be_typed_for_any_name(name):
    assert parse_value(columns_setting({"prompt": name}).strip("'")) == {"prompt": name}


def test_columns_with_names_that_hydra_refuses_are_quoted():
    assert parse_value(quote_columns("data.columns={prompt: 问题, completion: my answer (1), label: null}")) == {
        "prompt": "问题", "completion": "my answer (1)", "label": None,
    }  # fmt: skip


def test_columns_replace_a_field_of_the_same_name(write):
    """The column `completion` of the file is not what is learned any more, and is listed as unused."""
    source = open_with(write([{"prompt": "a", "completion": "old", "answer": "new"}]), completion="answer")
    ((_, row),) = source.rows()
    assert row == {"prompt": "a", "completion": "new", "completion (hidden by data.columns)": "old"}


def test_columns_that_the_file_does_not_have_are_refused_with_those_it_has(write):
    with pytest.raises(ValueError) as error:
        schema_of_source(
            open_with(write([{"question": "a", "answer": "b"}]), prompt="question", completion="anwser"), "chat"
        )
    assert (
        "the file has no column anwser" in error.value.args[0]
        and "its columns are" in error.value.args[0]
        and error.value.args[2] == "did you mean answer?"
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b", "label": False}, {"prompt": "a", "completion": "b", "label": 1}, {"prompt": "a", "response": "b", "label": "False"},
        {"messages": CHAT, "label": True}, {"conversations": CHAT, "kto_tag": False}, {"instruction": "a", "output": "b", "kto_tag": True},
    ],
    ids=repr,
)  # fmt: skip
def test_label_of_kto_rows_is_refused_with_the_way_out(write, row, build):
    """Before: good and bad answers were learned alike, without a message."""
    name = "kto_tag" if "kto_tag" in row else "label"
    good = {bool: "true", int: "1", str: "True"}[type(row[name])]
    with pytest.raises(BadRowError) as error:
        build("chat", write([row]))
    assert f"the field {name} tells good answers from bad ones" in error.value.message
    keep = (
        f"leave out rows whose {name} is not True"
        if good == "True"
        else f"jq -c 'select(.{name} == {good}) | del(.{name})' FILE"
    )  # not select(.label): 0 passes
    assert keep in error.value.fix and f"'data.columns={{{name}: null}}'" in error.value.fix
    assert schema_of_source(open_with(write([row]), **{name: None}), "chat")


def test_label_that_is_no_verdict_is_an_unused_column(write, build):
    rows = build(
        "chat",
        write([{"prompt": "a", "completion": "b", "label": "maths"}, {"prompt": "a", "completion": "b", "label": 7}]),
    )
    assert rows.sources[0].store.stats.unused == {"label": 2}


def test_label_of_a_row_that_is_no_answer_names_the_stage_that_fits(write, build):
    """Before: refused as a row of KTO."""
    with pytest.raises(BadRowError) as error:
        build("chat", write([{"text": "a", "label": 1}]))
    assert error.value.fix == "the row matches stage=pretrain"


def test_guess_of_columns_does_not_name_a_hidden_one(write):
    """Before: 'data.columns={text: "text (hidden by data.columns)"}'."""
    with pytest.raises(BadRowError) as error:
        schema_of_source(open_with(write([{"text": "a", "body": "b"}]), text=None), "text")
    assert error.value.fix == "name your columns, a guess is 'data.columns={text: body}'"


def test_label_of_a_kto_row_is_no_preference_pair():
    with pytest.raises(BadRowError) as error:
        detect_schema({"prompt": "a", "completion": "b", "label": True}, "preference", "file:1")
    assert "chosen and rejected" in error.value.fix


@pytest.mark.parametrize("field", ["image", "images", "audio", "video"])
@pytest.mark.parametrize(
    "data_format, row",
    [
        ("chat", {"messages": CHAT}),
        ("text", {"text": "a caption"}),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ],
)
def test_images_and_audio_of_rows_are_refused_with_the_way_out(write, build, field, data_format, row):
    """Before: `images` beside text was ignored without a message."""
    with pytest.raises(BadRowError) as error:
        build(data_format, write([{**row, field: ["a.png"]}]))
    assert (
        f"the field {field} cannot be trained on" in error.value.message
        and f"'data.columns={{{field}: null}}'" in error.value.fix
    )
    build(data_format, write([{**row, field: []}]))  # an empty list has no content


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi", "images": ["a.png"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]},
    ],
)
def test_images_of_messages_are_refused(write, build, message):
    with pytest.raises(BadRowError) as error:
        build("chat", write([{"messages": [message, CHAT[1]]}]))
    assert "images" in error.value.fix or "rows of text only" in error.value.fix


def test_unused_columns_of_all_rows_are_counted_and_survive_the_cache(write, build):
    rows = [{"text": f"row {i}", "id": i, "meta": None, **({"late": 1} if i == 1500 else {})} for i in range(1600)]
    path = write(rows)
    for _ in range(2):
        assert build("text", path).sources[0].store.stats.unused == {"id": 1600, "late": 1}


def test_unused_fields_of_messages_are_those_that_the_template_does_not_name(write, build):
    message = {**CHAT[1], "timestamp": 1, "score": False}
    unused = (
        build("chat", write([{"messages": [CHAT[0], message], "source": "x", "tools": None}]))
        .sources[0]
        .store.stats.unused
    )
    assert unused == {"source": 1, "messages[].timestamp": 1, "messages[].score": 1}


def test_unused_columns_are_none_for_rows_of_the_schemas(write, build):
    for fields in (
        {"prompt": "a", "completion": "b", "system": "s", "weight": 2},
        {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]},
    ):
        assert not build("chat", write([fields])).sources[0].store.stats.unused


PAIR = {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "no"}]}
ROWS = {
    "text": {"text": "t"}, "prompt completion": {"prompt": "p", "completion": "c"}, "prompt response": {"prompt": "p", "response": "r"},
    "dolly": {"instruction": "i", "context": "x", "response": "r"}, "alpaca": {"instruction": "i", "output": "o"}, "minimind chat": {"conversations": CHAT},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "openai messages": {"messages": CHAT},
    "hh-rlhf": {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}, "minimind preference": PAIR,
    "openai preference": {"input": {"messages": CHAT[:1]}, "preferred_output": CHAT[1:], "non_preferred_output": PAIR["rejected"][1:]},
    "alpaca preference": {"instruction": "i", "chosen": "a", "rejected": "b"}, "sharegpt preference": {"conversations": CHAT[:1], **PAIR},
    "trl preference": {"prompt": "p", "chosen": "a", "rejected": "b"},
}  # fmt: skip
OPTIONAL = {
    "system": "s",
    "tools": [{"name": "f"}],
    "functions": [{"name": "g"}],
    "input": "x",
    "context": "y",
    "history": [["a", "b"]],
    "title": "z",
}


@pytest.mark.parametrize("name", ROWS)
def test_unused_columns_are_those_without_an_effect(name):
    schema, row = SCHEMAS[name], ROWS[name]
    before = schema.read(row, "file:1")
    for field, value in OPTIONAL.items():
        if field not in row:
            has_effect = schema.read({**row, field: value}, "file:1") != before
            assert has_effect == (field in schema.fields) or (not has_effect and field == "context"), field


def test_unused_columns_are_tested_for_every_schema():
    assert set(ROWS) == {name for name, schema in SCHEMAS.items() if schema.parse.__module__.startswith("data.")}
