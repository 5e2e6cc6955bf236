"""Every common shape of rows becomes text, a conversation or a preference; a row that cannot is bad, and says where and why."""

import json

import pytest

from data.schemas.errors import BadRowError
from data.schemas.messages import check_chat
from data.schemas.schemas import SCHEMAS, ChatExample, PreferencePair, TextExample, detect_schema, example_weight

CALL = {"name": "weather", "arguments": {"town": "Pell"}}
CALLED = {"type": "function", "function": CALL}
TOOLS = [{"name": "weather", "description": "of a town", "parameters": {"type": "object"}}]
ASK = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}
WORSE = {"role": "assistant", "content": "no"}
HUMAN = {"from": "human", "value": "hi"}
GPT = {"from": "gpt", "value": "ho"}


def short(item):
    """What was read, without the fields that are empty."""
    if isinstance(item, PreferencePair):
        return short(item.chosen), short(item.rejected)
    return [{key: value for key, value in message.items() if value} for message in item.messages]


def read(row, rows, shape=None):
    return (SCHEMAS[shape] if shape else detect_schema(row, rows, "file:1")).read(row, "file:1")


TALK = [ASK, ANSWER]
CHATS = [  # shape, row, what is said
    ("minimind chat", {"conversations": TALK}, TALK),
    ("minimind chat", {"conversations": json.dumps(TALK)}, TALK),
    ("minimind chat", {"conversations": [ASK, {**ANSWER, "reasoning_content": "hm"}]}, [ASK, {**ANSWER, "reasoning_content": "hm"}]),
    (
        "minimind chat",
        {"conversations": [ASK, {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}]},
        [ASK, {"role": "assistant", "tool_calls": [CALLED]}],
    ),
    ("minimind chat", {"conversations": [*TALK, ASK]}, [*TALK, ASK]),
    ("openai messages", {"messages": TALK}, TALK),
    ("openai messages", {"messages": [{"role": "developer", "content": "be brief"}, *TALK]}, [{"role": "system", "content": "be brief"}, *TALK]),
    ("openai messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, ANSWER]}, TALK),
    (
        "openai messages",
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {**CALL, "arguments": '{"town": "Pell"}'}}]},
                {"role": "tool", "content": "dry", "tool_call_id": "1"},
                ANSWER,
            ]
        },
        [ASK, {"role": "assistant", "tool_calls": [{**CALLED, "id": "1"}]}, {"role": "tool", "content": "dry", "tool_call_id": "1"}, ANSWER],
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
        [ASK, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "content": "dry", "name": "weather"}, ANSWER],
    ),
    ("sharegpt", {"conversations": [HUMAN, GPT]}, TALK),
    ("sharegpt", {"conversations": [HUMAN, GPT], "system": "be brief"}, [{"role": "system", "content": "be brief"}, *TALK]),
    ("sharegpt", {"conversations": [{"from": "system", "value": "be brief"}, {"from": "user", "value": "hi"}, {"from": "bing", "value": "ho"}]}, None),
    (
        "sharegpt",
        {"conversations": [HUMAN, {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "dry"}, GPT]},
        [ASK, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "content": "dry"}, ANSWER],
    ),
    ("alpaca", {"instruction": "hi", "output": "ho"}, TALK),
    (
        "alpaca",
        {"instruction": "add", "input": "1 2", "output": "3", "text": "all of it"},
        [{"role": "user", "content": "add\n1 2"}, {"role": "assistant", "content": "3"}],
    ),
    ("alpaca", {"instruction": "", "input": "hi", "output": "ho"}, TALK),
    (
        "alpaca",
        {"instruction": "hi", "input": "", "output": "ho", "system": "be brief", "history": [["a", "b"], ["c", "d"]]},
        [
            {"role": "system", "content": "be brief"},
            *({"role": role, "content": words} for role, words in zip(["user", "assistant"] * 2, "abcd", strict=True)),
            *TALK,
        ],
    ),
    ("alpaca", {"instruction": "hi", "output": "ho", "history": "[]"}, TALK),
    ("dolly", {"instruction": "hi", "context": "", "response": "ho", "category": "open_qa"}, TALK),
    ("dolly", {"instruction": "h", "context": "i", "response": "ho"}, [{"role": "user", "content": "h\ni"}, ANSWER]),
    ("openai messages", {"messages": [{"role": "system", "content": None}, *TALK]}, TALK),
    ("minimind chat", {"conversations": [{"role": "system", "content": " "}, *TALK], "system": "be brief"}, [{"role": "system", "content": "be brief"}, *TALK]),
    ("prompt completion", {"prompt": "hi", "completion": "ho"}, TALK),
    ("prompt completion", {"prompt": [ASK], "completion": [ANSWER]}, TALK),
    ("prompt response", {"prompt": "hi", "response": "ho"}, TALK),
]


@pytest.mark.parametrize("shape, row, said", CHATS)
def test_a_conversation_of_every_shape_is_recognised_and_read(shape, row, said):
    assert detect_schema(row, "chat", "file:1").name == shape
    chat = read(row, "chat")
    assert isinstance(chat, ChatExample) and chat.tools is None and (said is None or short(chat) == said)
    assert [message["role"] for message in chat.messages if message["content"] == "be brief"] in ([], ["system"])


@pytest.mark.parametrize("stored", [TOOLS, json.dumps(TOOLS)])
@pytest.mark.parametrize(
    "row",
    [
        {"conversations": TALK},
        {"conversations": [HUMAN, GPT]},
        {"messages": TALK},
        {"chosen": TALK, "rejected": [ASK, WORSE]},
        {"instruction": "hi", "output": "ho"},
    ],
)
def test_tools_may_stand_beside_the_messages_as_a_list_or_as_json(row, stored):
    read_row = read({**row, "tools": stored}, "preference" if "chosen" in row else "chat")
    assert (read_row.chosen if isinstance(read_row, PreferencePair) else read_row).tools == TOOLS


@pytest.mark.parametrize("stored", [TOOLS, json.dumps(TOOLS)])
def test_tools_may_stand_on_a_message(stored):
    system = {"role": "system", "content": "be brief", "tools": stored}
    assert read({"conversations": [system, *TALK]}, "chat").tools == TOOLS
    pair = read({"prompt": [system, ASK], "chosen": [ANSWER], "rejected": [WORSE]}, "preference")
    assert pair.chosen.tools == pair.rejected.tools == TOOLS and "tools" not in pair.chosen.messages[0]


@pytest.mark.parametrize(
    "shape, row",
    [
        ("minimind preference", {"chosen": TALK, "rejected": [ASK, WORSE]}),
        ("minimind preference", {"chosen": json.dumps(TALK), "rejected": json.dumps([ASK, WORSE])}),
        ("trl preference", {"prompt": "hi", "chosen": "ho", "rejected": "no"}),
        ("trl preference", {"prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE]}),
        ("trl preference", {"prompt": json.dumps([ASK]), "chosen": json.dumps([ANSWER]), "rejected": json.dumps([WORSE])}),
        ("trl preference", {"prompt": [ASK], "chosen": ANSWER, "rejected": WORSE}),
        ("trl preference", {"prompt": [ASK], "chosen": TALK, "rejected": [ASK, WORSE]}),
        ("trl preference", {"prompt": "hi", "chosen": TALK, "rejected": [ASK, WORSE], "messages": TALK, "score_chosen": 5.0}),
        ("sharegpt preference", {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}}),
        ("sharegpt preference", {"conversations": [HUMAN], "chosen": [ANSWER], "rejected": WORSE}),
        ("alpaca preference", {"instruction": "hi", "input": "", "chosen": "ho", "rejected": "no"}),
        ("openai preference", {"input": {"messages": [ASK]}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}),
        ("openai preference", {"input": json.dumps({"messages": [ASK]}), "preferred_output": json.dumps([ANSWER]), "non_preferred_output": [WORSE]}),
        ("hh-rlhf", {"chosen": "\n\nHuman: hi\n\nAssistant: ho", "rejected": "\n\nHuman: hi\n\nAssistant: no"}),
        ("trl preference", {"prompt": [{"role": "system", "content": ""}, ASK], "chosen": TALK, "rejected": [ASK, WORSE]}),
    ],
)
def test_a_preference_of_every_shape_becomes_two_whole_conversations(shape, row):
    assert detect_schema(row, "preference", "file:1").name == shape
    assert short(read(row, "preference")) == (TALK, [ASK, WORSE])


def test_a_prompt_of_several_turns_is_not_doubled():
    prompt = [{"role": "system", "content": "be brief"}, *TALK, {"role": "user", "content": "more"}]
    for chosen, rejected in (([ANSWER], [WORSE]), ([*prompt, ANSWER], [*prompt, WORSE])):
        assert short(read({"prompt": prompt, "chosen": chosen, "rejected": rejected}, "preference")) == ([*prompt, ANSWER], [*prompt, WORSE])
    whole = [prompt[0], ASK, ANSWER]  # the prompt is the question alone, the answers tell what came before it, too
    assert short(read({"prompt": "hi", "chosen": whole, "rejected": [prompt[0], ASK, WORSE]}, "preference"))[0] == whole


def test_text_is_text_to_the_character():
    assert read({"text": " a\n", "url": "b"}, "text") == TextExample(" a\n")


def test_good_values_pass_unchanged():
    messages = [{"role": "user", "content": " hi\n", "name": "Ada"}, {"role": "assistant", "content": "<think>no</think> [{"}]
    turns, tools = check_chat(messages, "", "here")
    assert [{key: turn[key] for key in message} for turn, message in zip(turns, messages, strict=True)] == messages and tools is None


ROW = {"text": {"text": "a"}, "chat": {"conversations": TALK}, "preference": {"chosen": TALK, "rejected": [ASK, WORSE]}}
STAGE = {"text": "stage=pretrain", "chat": "stage=sft", "preference": "stage=dpo"}


@pytest.mark.parametrize("rows", ROW)
@pytest.mark.parametrize("other", ROW)
def test_a_file_of_another_stage_is_told_which(rows, other):
    if rows == other:
        return
    with pytest.raises(BadRowError) as refusal:
        detect_schema(ROW[other], rows, "file:1")
    assert refusal.value.reason == "wrong keys" and STAGE[rows] in refusal.value.args[0]
    assert refusal.value.args[2] == f"the file looks made for {STAGE[other]}" and ", ".join(ROW[other]) in refusal.value.args[0]


def test_what_stands_beside_two_answers_is_no_conversation():
    with pytest.raises(BadRowError, match="stage=sft reads .*looks made for stage=dpo"):
        detect_schema({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, "chat", "file:1")


def test_a_shape_that_is_forced_is_not_guessed_again():
    with pytest.raises(BadRowError) as refusal:
        SCHEMAS["alpaca"].read({"messages": TALK}, "file:1")
    assert refusal.value.args == (
        "rows of the shape alpaca have instruction and output; found messages",
        "file:1",
        'the row looks like one of the shape openai messages: data.shape="openai messages"',
    )


def test_every_shape_is_named_by_itself_and_fits_its_stage():
    assert all(name == shape.name and shape.rows in STAGE for name, shape in SCHEMAS.items())


@pytest.mark.parametrize("weight, read_as", [(2, 2.0), (0.5, 0.5), ("3", 3.0), (None, 1.0), ("", 1.0)])
def test_a_row_may_weigh_more_or_less(weight, read_as):
    assert example_weight({"weight": weight}, "file:1") == read_as and example_weight({}, "file:1") == 1.0


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), True, "much", [1], 10**400])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(BadRowError) as refusal:
        example_weight({"weight": weight}, "file:1")
    assert refusal.value.reason == "wrong weight" and refusal.value.args[1] == "file:1 weight"


@pytest.mark.parametrize("weight, kept", [(0, 0), (0.0, 0), (1, None), (None, None)])
def test_a_message_of_weight_0_keeps_it(weight, kept):
    for row in ({"messages": [ASK, {**ANSWER, "weight": weight}]}, {"conversations": [HUMAN, {**GPT, "weight": weight}]}):
        assert read(row, "chat").messages[1].get("weight") == kept


@pytest.mark.parametrize("weight", [0.5, 2, -1, True, "0", [0]])
def test_a_message_weighs_0_or_1(weight):
    with pytest.raises(BadRowError, match="is 0 or 1") as refusal:
        read({"messages": [ASK, {**ANSWER, "weight": weight}]}, "chat")
    assert refusal.value.reason == "wrong weight" and refusal.value.args[1] == "file:1 messages[1].weight"


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
def test_reasoning_is_read_under_all_its_names(fields):
    assert read({"messages": [ASK, {**ANSWER, **fields}]}, "chat").messages[1]["reasoning_content"].strip() == "hm"


@pytest.mark.parametrize("stored", [TOOLS, json.dumps(TOOLS)])
def test_functions_are_tools_under_their_old_name(stored):
    assert read({"messages": TALK, "functions": stored}, "chat").tools == [{"type": "function", "function": TOOLS[0]}]
    assert read({"messages": TALK, "functions": [], "tools": TOOLS}, "chat").tools == TOOLS


@pytest.mark.parametrize(
    "row, what, where",
    [
        ({"messages": TALK, "tools": TOOLS, "functions": TOOLS}, "side by side", " functions"),
        ({"messages": TALK, "functions": "weather"}, "a list of objects, found a string", " functions"),
        ({"messages": [ASK, {**ANSWER, "function_call": CALL, "tool_calls": [CALL]}]}, "side by side", " messages[1].function_call"),
        ({"messages": [ASK, {**ANSWER, "function_call": "weather"}]}, "a list of objects", " messages[1].function_call"),
        ({"messages": [ASK, {**ANSWER, "function_call": {"name": "f"}}]}, "a name and arguments", " messages[1].function_call"),
        ({"messages": [{**ASK, "tool_calls": [CALL]}, ANSWER]}, "a user message has tool_calls", " messages[0].tool_calls"),
        ({"messages": [{**ASK, "reasoning": "hm"}, ANSWER]}, "a user message has reasoning_content", " messages[0].reasoning_content"),
        ({"messages": [ASK, {**ANSWER, "reasoning": "hm", "thinking": "so"}]}, "reasoning and thinking differ", " messages[1]"),
        ({"messages": [ASK, {**ANSWER, "reasoning_details": [{"data": "a"}]}]}, "without words", " messages[1].reasoning_details"),
        ({"messages": [{"role": "system", "content": "a"}, *TALK], "system": "b"}, "is not the one in it", " messages system"),
    ],
)
def test_what_a_row_says_is_never_left_out_in_silence(row, what, where):
    with pytest.raises(BadRowError) as refusal:
        read(row, "chat")
    assert what in refusal.value.args[0] and refusal.value.args[1] == f"file:1{where}"


@pytest.mark.parametrize("nothing", [None, "", "null", "None", "[]", " ", [], {}])
def test_no_tools_are_written_in_many_ways(nothing):
    said = [{"role": "system", "content": "", "tools": nothing}, ASK, {**ANSWER, "tool_calls": nothing}]
    chat = read({"messages": said, "tools": nothing, "functions": nothing}, "chat")
    assert chat.tools is None and short(chat) == TALK


def test_tools_on_a_system_message_without_words_are_kept():
    assert read({"conversations": [{"role": "system", "content": "", "tools": TOOLS}, *TALK]}, "chat") == ChatExample(check_chat(TALK, None, "")[0], TOOLS)


def test_a_place_is_that_of_the_file_where_an_empty_system_message_was_left_out_or_another_put_in_front():
    for begin, more, place in (([{"role": "system", "content": ""}], {}, 2), ([], {"system": "be brief"}, 1)):
        with pytest.raises(BadRowError) as refusal:
            read({"messages": [*begin, ASK, ASK, ANSWER], **more}, "chat")
        assert refusal.value.args[1] == f"file:1 messages[{place}].role"


def test_the_tools_of_openais_preferences_stand_beside_their_messages():
    row = {"input": {"messages": [ASK], "tools": TOOLS}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}
    pair = read(row, "preference")
    assert pair.chosen.tools == pair.rejected.tools == TOOLS


def test_a_dialogue_in_one_string_is_taken_apart_to_the_character():
    begin = "\n\nHuman: Human: a\n\n b \n\nAssistant:\n- c\n\nHuman:d"
    pair = read({"chosen": f"{begin}\n\nAssistant: e", "rejected": f"{begin}\n\nAssistant: f"}, "preference")
    assert [message["content"] for message in pair.chosen.messages] == ["Human: a\n\n b ", "\n- c", "d", "e"]
    assert [message["role"] for message in pair.rejected.messages] == ["user", "assistant"] * 2


@pytest.mark.parametrize(
    "row, reason, where",
    [
        ({"chosen": "\n\nHuman: a\n\nAssistant: ", "rejected": "\n\nHuman: a\n\nAssistant: b"}, "empty assistant turn", " chosen[1].content"),
        ({"chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c", "rejected": "\n\nHuman: a"}, "roles out of order", " chosen[1].role"),
        ({"input": {}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}, "wrong type", " input"),
        ({"input": "hi", "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}, "wrong type", " input"),
    ],
)
def test_a_preference_that_cannot_be_read_says_where(row, reason, where):
    with pytest.raises(BadRowError) as refusal:
        read(row, "preference")
    assert (refusal.value.reason, refusal.value.args[1]) == (reason, f"file:1{where}")


@pytest.mark.parametrize("rows, inner", [("text", {"text": "a"}), ("chat", {"messages": TALK}), ("text", {"messages": TALK})])
def test_rows_inside_of_one_object_are_found(rows, inner):
    with pytest.raises(BadRowError, match="found version, data") as refusal:
        detect_schema({"version": 1, "data": [inner]}, rows, "file:1")
    assert refusal.value.args[2] == 'the rows stand in its field "data": take them out, e.g. with: jq -c \'.["data"][]\' FILE'


def test_a_first_row_with_holes_says_no_dialogues():
    assert detect_schema({"chosen": None, "rejected": TALK}, "preference", "file:1").name == "minimind preference"
