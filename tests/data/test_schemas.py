"""Row schemas: detection, the example of each, and the errors of rows that cannot be used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from data.schemas.messages import check_chat
from data.schemas.registry import (
    SCHEMAS,
    ChatExample,
    PreferencePair,
    TextExample,
    detect_schema,
    register_schema,
    schema_of_source,
)
from data.schemas.text import example_weight
from data.sources.files import Source
from data.store.cache import fingerprinted_files
from data.types import BadRowError

CALL = {"name": "weather", "arguments": {"town": "Pell"}}
CALLED = {"type": "function", "function": CALL}
TOOLS = [{"name": "weather", "description": "of a town", "parameters": {"type": "object"}}]
ASK = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}
WORSE = {"role": "assistant", "content": "no"}
HUMAN = {"from": "human", "value": "hi"}
GPT = {"from": "gpt", "value": "ho"}


def messages_of(example):
    """Return the messages without empty fields; of a preference (chosen, rejected)."""
    if isinstance(example, PreferencePair):
        return messages_of(example.chosen), messages_of(example.rejected)
    return [{key: value for key, value in message.items() if value} for message in example.messages]


def read(row, data_format):
    return detect_schema(row, data_format, "file:1").read(row, "file:1")


MESSAGES = [ASK, ANSWER]
CHATS = [  # schema, row, messages
    ("minimind chat", {"conversations": MESSAGES}, MESSAGES),
    ("minimind chat", {"conversations": json.dumps(MESSAGES)}, MESSAGES),
    (
        "minimind chat",
        {"conversations": [ASK, {**ANSWER, "reasoning_content": "hm"}]},
        [ASK, {**ANSWER, "reasoning_content": "hm"}],
    ),
    (
        "minimind chat",
        {"conversations": [ASK, {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}]},
        [ASK, {"role": "assistant", "tool_calls": [CALLED]}],
    ),
    ("minimind chat", {"conversations": [*MESSAGES, ASK]}, [*MESSAGES, ASK]),
    ("openai messages", {"messages": MESSAGES}, MESSAGES),
    (
        "openai messages",
        {"messages": [{"role": "developer", "content": "be brief"}, *MESSAGES]},
        [{"role": "system", "content": "be brief"}, *MESSAGES],
    ),
    (
        "openai messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "value": "i"}]},
                ANSWER,
            ]
        },
        MESSAGES,
    ),
    (
        "openai messages",
        {
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {**CALL, "arguments": '{"town": "Pell"}'}}
                    ],
                },
                {"role": "tool", "content": "dry", "tool_call_id": "1"},
                ANSWER,
            ]
        },
        [
            ASK,
            {"role": "assistant", "tool_calls": [{**CALLED, "id": "1"}]},
            {"role": "tool", "content": "dry", "tool_call_id": "1"},
            ANSWER,
        ],
    ),
    (
        "openai messages",
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": '{"town": "Pell"}'}},
                {"role": "function", "name": "weather", "content": "dry"},
                {**ANSWER, "function_call": None},
            ]
        },
        [
            ASK,
            {"role": "assistant", "tool_calls": [CALLED]},
            {"role": "tool", "content": "dry", "name": "weather"},
            ANSWER,
        ],
    ),
    ("sharegpt", {"conversations": [HUMAN, GPT]}, MESSAGES),
    (
        "sharegpt",
        {"conversations": [HUMAN, GPT], "system": "be brief"},
        [{"role": "system", "content": "be brief"}, *MESSAGES],
    ),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "be brief"},
                {"from": "user", "value": "hi"},
                {"from": "bing", "value": "ho"},
            ]
        },
        None,
    ),
    (
        "sharegpt",
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "dry"},
                GPT,
            ]
        },
        [ASK, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "content": "dry"}, ANSWER],
    ),
    ("alpaca", {"instruction": "hi", "output": "ho"}, MESSAGES),
    (
        "alpaca",
        {"instruction": "add", "input": "1 2", "output": "3", "text": "all of it"},
        [{"role": "user", "content": "add\n1 2"}, {"role": "assistant", "content": "3"}],
    ),
    ("alpaca", {"instruction": "", "input": "hi", "output": "ho"}, MESSAGES),
    (
        "alpaca",
        {"instruction": "hi", "input": "", "output": "ho", "system": "be brief", "history": [["a", "b"], ["c", "d"]]},
        [
            {"role": "system", "content": "be brief"},
            *({"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)),
            *MESSAGES,
        ],
    ),
    ("alpaca", {"instruction": "hi", "output": "ho", "history": "[]"}, MESSAGES),
    ("dolly", {"instruction": "hi", "context": "", "response": "ho", "category": "open_qa"}, MESSAGES),
    ("dolly", {"instruction": "h", "context": "i", "response": "ho"}, [{"role": "user", "content": "h\ni"}, ANSWER]),
    ("openai messages", {"messages": [{"role": "system", "content": None}, *MESSAGES]}, MESSAGES),
    (
        "minimind chat",
        {"conversations": [{"role": "system", "content": " "}, *MESSAGES], "system": "be brief"},
        [{"role": "system", "content": "be brief"}, *MESSAGES],
    ),
    ("sharegpt", {"conversations": [HUMAN, GPT], "system": " "}, MESSAGES),
    ("prompt completion", {"prompt": "hi", "completion": "ho"}, MESSAGES),
    ("prompt completion", {"prompt": [ASK], "completion": [ANSWER]}, MESSAGES),
    ("prompt completion", {"prompt": [ASK], "completion": [ANSWER, *MESSAGES]}, [*MESSAGES, *MESSAGES]),  # asked again
    ("prompt response", {"prompt": "hi", "response": "ho"}, MESSAGES),
]


@pytest.mark.parametrize("schema, row, messages", CHATS)
def test_schema_of_a_conversation_is_detected_and_read(schema, row, messages):
    assert detect_schema(row, "chat", "file:1").name == schema
    chat = read(row, "chat")
    assert isinstance(chat, ChatExample) and chat.tools is None and (messages is None or messages_of(chat) == messages)
    assert [message["role"] for message in chat.messages if message["content"] == "be brief"] in ([], ["system"])


@pytest.mark.parametrize("stored", [TOOLS, json.dumps(TOOLS)], ids=["list", "json"])
@pytest.mark.parametrize(
    "row",
    [
        {"conversations": MESSAGES},
        {"conversations": [HUMAN, GPT]},
        {"messages": MESSAGES},
        {"chosen": MESSAGES, "rejected": [ASK, WORSE]},
        {"instruction": "hi", "output": "ho"},
    ],
    ids=["minimind", "sharegpt", "openai", "preference", "alpaca"],
)
def test_schema_reads_tools_of_a_row_as_list_or_json(row, stored):
    example = read({**row, "tools": stored}, "preference" if "chosen" in row else "chat")
    assert (example.chosen if isinstance(example, PreferencePair) else example).tools == TOOLS


@pytest.mark.parametrize("stored", [TOOLS, json.dumps(TOOLS)], ids=["list", "json"])
def test_schema_reads_tools_of_a_message(stored):
    system = {"role": "system", "content": "be brief", "tools": stored}
    assert read({"conversations": [system, *MESSAGES]}, "chat").tools == TOOLS
    pair = read({"prompt": [system, ASK], "chosen": [ANSWER], "rejected": [WORSE]}, "preference")
    assert pair.chosen.tools == pair.rejected.tools == TOOLS and "tools" not in pair.chosen.messages[0]


@pytest.mark.parametrize(
    "schema, row",
    [
        ("minimind preference", {"chosen": MESSAGES, "rejected": [ASK, WORSE]}),
        ("minimind preference", {"chosen": json.dumps(MESSAGES), "rejected": json.dumps([ASK, WORSE])}),
        ("trl preference", {"prompt": "hi", "chosen": "ho", "rejected": "no"}),
        ("trl preference", {"prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE]}),
        (
            "trl preference",
            {"prompt": json.dumps([ASK]), "chosen": json.dumps([ANSWER]), "rejected": json.dumps([WORSE])},
        ),
        ("trl preference", {"prompt": [ASK], "chosen": ANSWER, "rejected": WORSE}),
        ("trl preference", {"prompt": [ASK], "chosen": MESSAGES, "rejected": [ASK, WORSE]}),
        (
            "trl preference",
            {"prompt": "hi", "chosen": MESSAGES, "rejected": [ASK, WORSE], "messages": MESSAGES, "score_chosen": 5.0},
        ),
        ("sharegpt preference", {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}}),
        ("sharegpt preference", {"conversations": [HUMAN], "chosen": [ANSWER], "rejected": WORSE}),
        ("alpaca preference", {"instruction": "hi", "input": "", "chosen": "ho", "rejected": "no"}),
        (
            "openai preference",
            {"input": {"messages": [ASK]}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]},
        ),
        (
            "openai preference",
            {
                "input": json.dumps({"messages": [ASK]}),
                "preferred_output": json.dumps([ANSWER]),
                "non_preferred_output": [WORSE],
            },
        ),
        ("hh-rlhf", {"chosen": "\n\nHuman: hi\n\nAssistant: ho", "rejected": "\n\nHuman: hi\n\nAssistant: no"}),
        (
            "trl preference",
            {"prompt": [{"role": "system", "content": ""}, ASK], "chosen": MESSAGES, "rejected": [ASK, WORSE]},
        ),
    ],
)
def test_schema_of_a_preference_gives_two_complete_conversations(schema, row):
    assert detect_schema(row, "preference", "file:1").name == schema
    assert messages_of(read(row, "preference")) == (MESSAGES, [ASK, WORSE])


def test_schema_does_not_repeat_a_prompt_that_the_answers_contain():
    prompt = [{"role": "system", "content": "be brief"}, *MESSAGES, {"role": "user", "content": "more"}]
    for chosen, rejected in (([ANSWER], [WORSE]), ([*prompt, ANSWER], [*prompt, WORSE])):
        assert messages_of(read({"prompt": prompt, "chosen": chosen, "rejected": rejected}, "preference")) == (
            [*prompt, ANSWER],
            [*prompt, WORSE],
        )
    complete = [prompt[0], ASK, ANSWER]  # the prompt is the question only, the answers contain the system message, too
    assert (
        messages_of(read({"prompt": "hi", "chosen": complete, "rejected": [prompt[0], ASK, WORSE]}, "preference"))[0]
        == complete
    )


def test_schema_keeps_every_character_of_a_text():
    assert read({"text": " a\n", "url": "b"}, "text") == TextExample(" a\n")


@pytest.mark.parametrize("names", [("human", "gpt"), ("user", "bot"), ("human", "model")], ids=" ".join)
@pytest.mark.parametrize("key", ["role", "from"])
def test_roles_have_the_names_of_other_tools_in_messages_of_any_form(names, key):
    text = "content" if key == "role" else "value"
    turns, _ = check_chat([{key: name, text: "a"} for name in names], None, "file:1 messages")
    assert [(turn["role"], turn["content"]) for turn in turns] == [("user", "a"), ("assistant", "a")]


def test_text_of_a_message_with_a_role_may_be_its_value():
    turns, _ = check_chat([{"role": "human", "value": "a"}], None, "file:1 messages")
    assert turns == [{"role": "user", "content": "a", "reasoning_content": "", "tool_calls": None}]


def test_check_chat_keeps_valid_values_unchanged():
    messages = [
        {"role": "user", "content": " hi\n", "name": "Ada"},
        {"role": "assistant", "content": "<think>no</think> [{"},
    ]
    turns, tools = check_chat(messages, "", "here")
    assert [
        {key: turn[key] for key in message} for turn, message in zip(turns, messages, strict=True)
    ] == messages and tools is None


ROW = {
    "text": {"text": "a"},
    "chat": {"conversations": MESSAGES},
    "preference": {"chosen": MESSAGES, "rejected": [ASK, WORSE]},
}
STAGE = {"text": "stage=pretrain", "chat": "stage=sft", "preference": "stage=dpo"}


@pytest.mark.parametrize("data_format, other", [(a, b) for a in ROW for b in ROW if a != b])
def test_schema_error_names_the_stage_that_fits_the_row(data_format, other):
    with pytest.raises(BadRowError) as error:
        detect_schema(ROW[other], data_format, "file:1")
    assert error.value.reason == "wrong keys" and STAGE[data_format] in error.value.message
    assert error.value.fix == f"the row matches {STAGE[other]}" and ", ".join(ROW[other]) in error.value.message


def test_schema_prompt_of_a_preference_is_not_a_conversation():
    with pytest.raises(BadRowError, match="stage=sft reads .*the row matches stage=dpo"):
        detect_schema({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, "chat", "file:1")


def test_schema_error_of_missing_keys_names_the_schema_that_matches():
    with pytest.raises(BadRowError) as error:
        SCHEMAS["alpaca"].read({"messages": MESSAGES}, "file:1")
    assert error.value.args == (
        "rows of the schema alpaca have instruction and output; found messages",
        "file:1",
        'the row matches the schema openai messages: data.schema="openai messages", or a file of its own if other rows do not',
    )


def test_schema_priority_is_fixed_for_rows_that_match_several():
    """Rows of public data sets with more columns than one schema needs."""
    everything = {
        "text": "a",
        "messages": MESSAGES,
        "prompt": "hi",
        "response": "ho",
        "instruction": "hi",
        "output": "ho",
        "context": "",
    }
    assert detect_schema(everything, "chat", "file:1").name == "openai messages"
    assert (
        detect_schema({**everything, "messages": None, "conversations": MESSAGES}, "chat", "file:1").name
        == "minimind chat"
    )
    pair = {"chosen": MESSAGES, "rejected": [ASK, WORSE]}
    assert detect_schema({**everything, **pair}, "preference", "file:1").name == "trl preference"
    assert detect_schema({**everything, **pair}, "text", "file:1").name == "text"


def test_schema_of_source_is_that_of_the_first_matching_row(write):
    path = write(b'{"x": 1}\n[\n{"text": "a"}\n')
    assert schema_of_source(Source.open(path), "text") == "text"
    with pytest.raises(BadRowError, match="found x") as error:
        schema_of_source(Source.open(path), "chat")
    assert error.value.setting == f"{path}:1"


def test_schema_of_source_is_detected_again_only_where_the_file_has_changed(write, monkeypatch):
    path = write([{"text": "a"}])
    assert schema_of_source(Source.open(path), "text") == "text"
    with monkeypatch.context() as patched:
        patched.setattr(Source, "items", None)  # a file that is read again fails
        assert schema_of_source(Source.open(path), "text") == "text"
    path.write_text('{"content": "a"}\n')
    os.utime(path, ns=(1, 1))
    with pytest.raises(BadRowError):
        schema_of_source(Source.open(path), "text")


@pytest.fixture
def registered(monkeypatch):
    """Restores the registry after the test."""
    before = dict(SCHEMAS)
    yield
    SCHEMAS.clear()
    SCHEMAS.update(before)


def test_register_schema_of_a_user_is_preferred_to_a_built_in_one(registered):
    @register_schema("notes", "text", keys=("text",), detect=lambda row: "note" in row)
    def parse_notes(row, where):
        return TextExample(row["text"] + row["note"])

    assert read({"text": "a", "note": "b"}, "text") == TextExample("ab") and read({"text": "a"}, "text") == TextExample(
        "a"
    )
    assert Path(__file__) in fingerprinted_files("notes")  # another version of the module is another token store


def test_register_schema_refuses_a_known_name_and_an_unknown_format(registered):
    with pytest.raises(UserError, match="data.schema 'alpaca' is registered twice"):
        register_schema("alpaca", "chat", keys=("a",))(lambda row, where: TextExample("a"))
    with pytest.raises(UserError, match="data_format must be one of preference, chat, text, got audio"):
        register_schema("sound", "audio", keys=("a",))


@pytest.mark.slow
def test_register_schema_of_a_plugin_encodes_rows_in_worker_processes(tmp_path):
    """A plugin is a .py file outside the checkout: workers cannot import it by name."""
    (tmp_path / "my_schemas.py").write_text(
        "from data.schemas.registry import TextExample, register_schema\n"
        "@register_schema('two parts', 'text', keys=('a', 'b'))\n"
        "def parse(row, where):\n"
        "    return TextExample(row['a'] + row['b'])\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": "one ", "b": "two"}) + "\n")
    program = """
import sys
from pathlib import Path
from common.registry import import_plugins
from data.schemas.registry import schema_of_source
from data.sources.files import Source
from data.store.cache import load_or_build
from data.tokenize.tokenizer import Tokenizer
from data.types import EncodingConfig
folder, tokenizer = Path(sys.argv[1]), Tokenizer.load(Path("data/samples/tokenizer"))
import_plugins([str(folder / "my_schemas.py")])
source = Source.open(folder / "rows.jsonl")
encoding = EncodingConfig("text", schema_of_source(source, "text"), tokenizer.folder, 16, "split", "assistant", "error")
store = load_or_build(source, encoding, tokenizer, folder / "cache", num_workers=2)
print(encoding.schema, [tokenizer.decode(ids.tolist()) for ids, _ in store.read(0)[0]])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "two parts ['one two']\n", done.stderr


def test_register_schema_needs_no_heavy_library():
    program = "import sys, data.schemas.registry; print([name for name in ('torch', 'numpy', 'pyarrow', 'tokenizers') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("value, weight", [(2, 2.0), (0.5, 0.5), ("3", 3.0), (None, 1.0), ("", 1.0)])
def test_example_weight_is_a_number_or_1_by_default(value, weight):
    assert example_weight({"weight": value}, "file:1") == weight and example_weight({}, "file:1") == 1.0


@pytest.mark.parametrize(
    "weight",
    [0, -1, float("nan"), float("inf"), True, "much", [1], 10**400, 1e40, 1e-50],
    ids=lambda value: str(value)[:10],
)
def test_example_weight_refuses_what_is_not_positive_or_overflows_fp32(weight):
    with pytest.raises(BadRowError) as error:
        example_weight({"weight": weight}, "file:1")
    assert error.value.reason == "wrong weight" and error.value.setting == "file:1 weight"


@pytest.mark.parametrize("weight, expected", [(0, 0), (0.0, 0), (1, None), (None, None), (0.5, 0.5), (2, 2)])
def test_schema_keeps_a_weight_of_a_message_that_is_not_1(weight, expected):
    for row in (
        {"messages": [ASK, {**ANSWER, "weight": weight}]},
        {"conversations": [HUMAN, {**GPT, "weight": weight}]},
    ):
        assert read(row, "chat").messages[1].get("weight") == expected


@pytest.mark.parametrize(
    "without",
    [
        {"weight": 0},
        {"loss_weight": 0.0},
        {"train": False},
        {"train": False, "weight": 0},
        {"train": None, "loss_weight": 0},
    ],
    ids=repr,
)
@pytest.mark.parametrize("kept", [{}, {"loss_weight": 1.0}, {"train": True, "weight": None}], ids=repr)
def test_message_without_loss_is_read_in_every_schema(build, write, tokenizer, without, kept):
    """Before: loss_weight and train were passed to the chat template, and every answer was trained on."""
    chat = [ASK, WORSE | without, ASK, ANSWER | kept]
    named = [
        {{"role": "from", "content": "value"}.get(key, key): value for key, value in message.items()}
        for message in chat
    ]
    rows = [
        {"messages": chat},
        {"conversations": chat},
        {"conversations": json.dumps(named)},
        {"prompt": chat[:3], "completion": chat[3:]},
    ]
    for number, row in enumerate(rows):
        [sequence] = build("chat", write([row], f"{number}.jsonl"))[0].sequences
        assert tokenizer.decode(sequence.ids[sequence.loss_mask].tolist(), skip_special=False) == "ho<|im_end|>"
    for row in (
        {"chosen": chat, "rejected": [*chat[:3], {"role": "assistant", "content": "hu"}]},
        {"prompt": chat[:3], "chosen": chat[3:], "rejected": "hu"},
    ):
        assert [
            [message.get("weight") for message in side.messages] for side in vars(read(row, "preference")).values()
        ] == [[None, 0, None, None]] * 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"train": "false"}, 'the train of a message must be false or true, found "false"'), ({"train": 0}, "the train of a message must be false or true, found 0"),
        ({"loss_weight": "0.5"}, "the loss_weight of a message must be 0 or a number from 1e-09 to 1e\\+09, found \"0.5\""), ({"loss_weight": False}, "must be 0 or a number .* found false"),
        ({"loss_weight": -1}, "found -1"), ({"loss_weight": float("nan")}, "found NaN"), ({"weight": float("inf")}, "found Infinity"), ({"weight": 1e300}, "found 1e"), ({"weight": 1e-46}, "found 1e-46"),
        ({"loss_weight": 0.5, "weight": 0.25}, "weight and loss_weight of a message differ"), ({"loss_weight": 0.5, "train": True}, "loss_weight and train of a message differ"),
        ({"train": True, "loss_weight": 0.0}, "loss_weight and train of a message differ"), ({"weight": 1, "train": False}, "weight and train of a message differ"),
    ], ids=repr,
)  # fmt: skip
def test_message_with_an_unclear_loss_weight_is_refused(fields, says):
    for message in (ANSWER | fields, GPT | fields, ASK | fields):
        with pytest.raises(BadRowError, match=says):
            check_chat([message], None, "file:1 messages")


@pytest.mark.parametrize(
    "name", ["loss", "mask", "masked", "trainable", "ignore", "skip_training", "train_on", "trainOn", "train_detail", "no_loss", "lossMask", "weights", "compute_loss", "is_trained", "skip"]
)  # fmt: skip
def test_message_field_that_sounds_like_a_loss_mask_is_refused(name):
    """Before: listed as an unused column, and the answer was trained on."""
    parts = {"role": "assistant", "content": [{"type": "text", "text": "ho", name: False}]}
    for message in (ANSWER | {name: False}, ANSWER | {name: 0}, ASK | {name: [[0, 1]]}, GPT | {name: "none"}, parts):
        with pytest.raises(BadRowError, match=f"the field {name} seems to say what has loss") as error:
            check_chat([message], None, "file:1 messages")
        assert '"weight": 0' in error.value.fix and f"remove {name}" in error.value.fix
    assert check_chat([ANSWER | {name: None}], None, "file:1")


@pytest.mark.parametrize(
    "name", ["id", "name", "tool_call_id", "glossary", "task", "constraint", "learning_goal", "model", "maskot"]
)
def test_message_field_that_is_no_loss_mask_is_passed_to_the_template(name):
    assert check_chat([ANSWER | {name: "x"}], None, "file:1")[0][0][name] == "x"


@pytest.mark.parametrize(
    ("loss_on", "fields"),
    [("assistant", {"train": True}), ("last_assistant", {"weight": 1}), ("all", {"loss_weight": 0.0})],
)
@pytest.mark.parametrize("content", ["hi", "a <|im_end|> b"])  # rendered by its shape, and by itself
def test_message_of_the_user_that_contradicts_loss_on_is_refused(template, loss_on, fields, content):
    with pytest.raises(
        BadRowError, match=f"a user message has weight . and data.loss_on={loss_on}".replace(" and", ", and")
    ) as error:
        template.encode([ASK | fields | {"content": content}, ANSWER], loss_on=loss_on)
    allowed = error.value.fix.partition(",")[0].removeprefix("data.loss_on=")
    assert any(template.encode([ASK | fields | {"content": content}, ANSWER], loss_on=allowed)[1])


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_message_of_the_user_with_a_fractional_weight_is_refused(template, loss_on):
    with pytest.raises(BadRowError, match=f"a user message has weight 0.5, and data.loss_on={loss_on}") as error:
        template.encode([{**ASK, "weight": 0.5}, ANSWER], loss_on=loss_on)
    assert error.value.fix == "remove the field of this message"


def test_preference_with_a_fractional_weight_is_refused(write, build):
    side = [ASK, {**ANSWER, "loss_weight": 0.5}]
    for row in ({"chosen": side, "rejected": [ASK, WORSE]}, {"chosen": [ASK, ANSWER], "rejected": side}):
        name = "chosen" if row["chosen"] is side else "rejected"
        with pytest.raises(BadRowError, match="a message of a preference has weight 0.5") as error:
            build(
                "preference",
                write(
                    [{"chosen": [ASK, ANSWER], "rejected": [ASK, {**WORSE, "weight": 1}]}] * 2 + [row], f"{name}.jsonl"
                ),
            )
        assert error.value.setting.endswith(f"{name}.jsonl:3 {name}") and "data.on_bad_row=skip" in error.value.fix


@pytest.mark.parametrize("weight", [-0.5, -1, True, "0", [0], 10**400])
def test_schema_refuses_a_message_weight_that_is_no_weight(weight):
    with pytest.raises(BadRowError, match="must be 0 or a number") as error:
        read({"messages": [ASK, {**ANSWER, "weight": weight}]}, "chat")
    assert error.value.reason == "wrong weight" and error.value.setting == "file:1 messages[1].weight"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"thinking": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm\n", "thinking": None},
        {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.encrypted", "data": "a"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "h"}, {"type": "reasoning.summary", "summary": "m"}]},
    ],
)
def test_schema_reads_reasoning_under_all_its_names(fields):
    assert read({"messages": [ASK, {**ANSWER, **fields}]}, "chat").messages[1]["reasoning_content"].strip() == "hm"


@pytest.mark.parametrize("stored", [TOOLS, json.dumps(TOOLS)], ids=["list", "json"])
def test_schema_reads_functions_the_former_name_of_tools(stored):
    assert read({"messages": MESSAGES, "functions": stored}, "chat").tools == [
        {"type": "function", "function": TOOLS[0]}
    ]
    assert read({"messages": MESSAGES, "functions": [], "tools": TOOLS}, "chat").tools == TOOLS


@pytest.mark.parametrize(
    "row, message, where",
    [
        ({"messages": MESSAGES, "tools": TOOLS, "functions": TOOLS}, "both tools and functions", " functions"),
        ({"messages": MESSAGES, "functions": "weather"}, "a list of objects, found a string", " functions"),
        (
            {"messages": [ASK, {**ANSWER, "function_call": CALL, "tool_calls": [CALL]}]},
            "both function_call and tool_calls",
            " messages[1].function_call",
        ),
        (
            {"messages": [ASK, {**ANSWER, "function_call": "weather"}]},
            "a list of objects",
            " messages[1].function_call",
        ),
        (
            {"messages": [ASK, {**ANSWER, "function_call": {"name": "f"}}]},
            "needs a name and arguments",
            " messages[1].function_call",
        ),
        (
            {"messages": [{**ASK, "tool_calls": [CALL]}, ANSWER]},
            "tool_calls is allowed in assistant messages only",
            " messages[0].tool_calls",
        ),
        (
            {"messages": [{**ASK, "reasoning": "hm"}, ANSWER]},
            "reasoning_content is allowed in assistant messages only",
            " messages[0].reasoning_content",
        ),
        (
            {"messages": [ASK, {**ANSWER, "reasoning": "hm", "thinking": "so"}]},
            "reasoning and thinking differ",
            " messages[1]",
        ),
        (
            {"messages": [ASK, {**ANSWER, "reasoning_details": [{"data": "a"}]}]},
            "without text",
            " messages[1].reasoning_details",
        ),
        (
            {"messages": [{"role": "system", "content": "a"}, *MESSAGES], "system": "b"},
            "differs from the system message",
            " messages system",
        ),
    ],
)
def test_schema_refuses_fields_that_would_be_ignored(row, message, where):
    with pytest.raises(BadRowError) as error:
        read(row, "chat")
    assert message in error.value.message and error.value.setting == f"file:1{where}"


@pytest.mark.parametrize("empty", [None, "", "null", "None", "[]", " ", [], {}], ids=repr)
def test_schema_reads_every_form_of_no_tools(empty):
    messages = [{"role": "system", "content": "", "tools": empty}, ASK, {**ANSWER, "tool_calls": empty}]
    chat = read({"messages": messages, "tools": empty, "functions": empty}, "chat")
    assert chat.tools is None and messages_of(chat) == MESSAGES


def test_schema_keeps_tools_of_an_empty_system_message():
    assert read(
        {"conversations": [{"role": "system", "content": "", "tools": TOOLS}, *MESSAGES]}, "chat"
    ) == ChatExample(check_chat(MESSAGES, None, "")[0], TOOLS)


def test_schema_error_has_the_index_of_the_message_in_the_file():
    for begin, more, index in (([{"role": "system", "content": ""}], {}, 2), ([], {"system": "be brief"}, 1)):
        with pytest.raises(BadRowError) as error:
            read({"messages": [*begin, ASK, ASK, ANSWER], **more}, "chat")
        assert error.value.setting == f"file:1 messages[{index}].role"


def test_schema_reads_tools_of_the_input_of_an_openai_preference():
    row = {"input": {"messages": [ASK], "tools": TOOLS}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}
    pair = read(row, "preference")
    assert pair.chosen.tools == pair.rejected.tools == TOOLS


def test_schema_splits_a_dialogue_of_hh_without_loss():
    begin = "\n\nHuman: Human: a\n\n b \n\nAssistant:\n- c\n\nHuman:d"
    pair = read({"chosen": f"{begin}\n\nAssistant: e", "rejected": f"{begin}\n\nAssistant: f"}, "preference")
    assert [message["content"] for message in pair.chosen.messages] == ["Human: a\n\n b ", "\n- c", "d", "e"]
    assert [message["role"] for message in pair.rejected.messages] == ["user", "assistant"] * 2


@pytest.mark.parametrize(
    "row, reason, where",
    [
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: ", "rejected": "\n\nHuman: a\n\nAssistant: b"},
            "empty assistant turn",
            " chosen[1].content",
        ),
        (
            {"chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c", "rejected": "\n\nHuman: a"},
            "roles out of order",
            " chosen[1].role",
        ),
        ({"input": {}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}, "wrong type", " input"),
        ({"input": "hi", "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}, "wrong type", " input"),
    ],
)
def test_schema_error_of_a_preference_has_its_position(row, reason, where):
    with pytest.raises(BadRowError) as error:
        read(row, "preference")
    assert (error.value.reason, error.value.setting) == (reason, f"file:1{where}")


@pytest.mark.parametrize(
    "data_format, row", [("text", {"text": "a"}), ("chat", {"messages": MESSAGES}), ("text", {"messages": MESSAGES})]
)
def test_schema_error_names_the_field_that_contains_the_rows(data_format, row):
    with pytest.raises(BadRowError, match="found version, data") as error:
        detect_schema({"version": 1, "data": [row]}, data_format, "file:1")
    assert error.value.fix == 'the field "data" contains the rows; extract them, e.g. with: jq -c \'.["data"][]\' FILE'


def test_schema_detection_accepts_a_row_with_null_values():
    assert detect_schema({"chosen": None, "rejected": MESSAGES}, "preference", "file:1").name == "minimind preference"
