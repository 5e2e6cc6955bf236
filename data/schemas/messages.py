"""Conversations as data files contain them, checked and converted to one form: roles and fields as in OpenAI's chat
API.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import Any

from common.errors import did_you_mean
from data.schemas.columns import check_no_loss_mask, check_no_media
from data.types import BadRowError, parse_json_row, type_name

# as role or from; also a message whose `from` is function_call, whose text is a call
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "bing", "chatgpt", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
}
# Role -> roles allowed after it; "" is the beginning. An assistant message with tool calls may also follow another one
# (`check_order`).
ALLOWED_NEXT_ROLE = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant", "user"),
}
NULL_STRINGS = ("null", "None")  # null in tables with string columns
# of DeepSeek and Qwen, of OpenRouter and vLLM, of Ollama and gpt-oss
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# others are for the chat template
CHECKED_FIELDS = frozenset(("role", "content", "tool_calls", "weight", "reasoning_details", *REASONING_FIELDS))
PLAIN_FIELDS = frozenset(("role", "content", "reasoning_content", "tool_calls"))
MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e9  # sums of losses with these weights are far from the limits of fp32
NUMBERS = ((int, float), "0", f"a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
# The weight of a message in the loss, as OpenAI, LLaMA-Factory and axolotl write it -> types, value without loss, other
# values
LOSS_FIELDS = {"weight": NUMBERS, "loss_weight": NUMBERS, "train": ((bool,), "false", "true")}
# data.turns of the row that is parsed now: `parse` of a schema takes a row and its position only
TURNS_OF_ROW: ContextVar[str] = ContextVar("data.turns", default="strict")
MESSAGE_FIX = 'write {"role": "user", "content": "..."}'


def check_chat(
    messages: Any, tools: Any, where: str, allows_empty_answers: bool = False
) -> tuple[list[dict], list[dict] | None]:
    """Return (messages, tools) with checked types; both may be stored as JSON strings. Raises BadRowError.

    `allows_empty_answers`: those of a model, which may end its answer at once. Tools may also be a field of one
    message. The order of roles is not checked: a prompt alone is valid.
    """
    messages = parse_json_field(messages, where)
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else type_name(messages)
        raise BadRowError(
            "wrong type",
            f"a conversation must be a list of messages, found {found}",
            where,
            'write [{"role": "user", "content": "..."}, ...]',
        )
    turns = [
        _check_message(message, f"{where}[{index}]", allows_empty_answers) for index, message in enumerate(messages)
    ]
    for index, turn in enumerate(turns):
        if "tools" in turn:
            tools = as_objects(turn.pop("tools"), f"{where}[{index}].tools") or tools
    return turns, as_objects(tools, f"{where} tools")


def check_order(messages: list[dict], where: str) -> list[dict]:
    """Return `messages` without blank system messages (MiniMind stores tools in such messages).

    Raises BadRowError unless the roles alternate and at least one message is the assistant's. data.turns=merge joins
    messages that one role has in a row, and lets the assistant begin.
    """
    turns: list[dict] = []
    for index, message in enumerate(messages):
        role, previous = message["role"], turns[-1]["role"] if turns else ""
        if _is_empty_system(message):
            continue
        is_second_call = previous == role == "assistant" and message.get("tool_calls")
        if role in ALLOWED_NEXT_ROLE[previous] or is_second_call:
            turns.append(message)
            continue
        # reasoning comes before the content of a message, so the second may have none
        joined = {**(turns or [{}])[-1], "content": message["content"], "reasoning_content": ""}
        differing = [name for name in {**joined, **message} if joined.get(name) != message.get(name)]
        can_merge = not differing or role == "assistant" != previous
        if can_merge and TURNS_OF_ROW.get() == "merge":
            if role == previous:
                text = "\n\n".join(filter(None, (turns[-1]["content"], message["content"])))
                message = {**turns.pop(), "content": text}
            turns.append(message)
            continue
        problem = f"{role} after {previous}" if previous else f"{role} comes first"
        if differing and role == previous:
            problem += f", which differ in {' and '.join(differing)}"
        fix = f"{'data.turns=merge' if can_merge else 'merge'} or delete messages: allowed here is {' or '.join(ALLOWED_NEXT_ROLE[previous])}"
        if role == "system" and not can_merge:
            fix = "move the system message to the front"
        raise BadRowError("roles out of order", f"roles out of order: {problem}", f"{where}[{index}].role", fix)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError(
            "no assistant turn",
            "no assistant message: no token has loss",
            where,
            "add an answer of the assistant, or delete the row",
        )
    return turns


def drop_empty_system(messages: list[dict]) -> list[dict]:
    """Return the messages without blank system messages (MiniMind stores tools in such messages)."""
    return [message for message in messages if not _is_empty_system(message)]


def _is_empty_system(message: dict) -> bool:
    return message["role"] == "system" and not message["content"].strip()


def parse_json_field(value: Any, where: str) -> Any:
    """Return the list or object in a JSON string, as tables and MiniMind store them; any other value as it is, a blank
    string as None.
    """
    if not isinstance(value, str):
        return value
    first = value.lstrip()[:1]
    return parse_json_row(value.encode(), where) if first and first in "[{" else value.strip() or None


def as_objects(value: Any, where: str) -> list[dict] | None:
    """Return a list of objects, which may be stored as a JSON string; None if it is empty.

    Raises BadRowError.
    """
    value = parse_json_field(value, where)
    if not value or value in NULL_STRINGS:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRowError(
            "wrong type", f"expected a list of objects, found {type_name(value)}", where, "write a JSON list of objects"
        )
    return value


# --- one message ---


def _check_message(message: Any, where: str, allows_empty_answers: bool) -> dict:
    """Return a copy with role, content (a string), reasoning_content, tool_calls, and weight if it is not 1, or of
    another role. Raises BadRowError.
    """
    if _is_plain(message):  # most messages, in a fifth of the time
        return {**message, "role": ROLES[message["role"]], "reasoning_content": "", "tool_calls": None}
    if not isinstance(message, dict):
        raise BadRowError(
            "wrong type", f"a message must be a JSON object, found {type_name(message)}", where, MESSAGE_FIX
        )
    check_no_media(message, where)
    if "value" in message and "role" in message and "content" not in message:  # as beside "from"
        message = {"content" if key == "value" else key: value for key, value in message.items()}
    if "from" in message and "role" not in message:
        turn = _from_sharegpt(message, where)
    else:
        turn = {**message, "role": _check_role(message.get("role"), f"{where}.role")}
    is_assistant = turn["role"] == "assistant"
    may_be_null = turn["role"] in ("assistant", "system")
    turn["content"] = (
        "" if turn.get("content") is None and may_be_null else _check_content(turn.get("content"), f"{where}.content")
    )
    turn["reasoning_content"] = _check_reasoning(turn, where)
    turn["tool_calls"] = _check_tool_calls(turn, where)
    weight = _pop_weight(turn, where)
    check_no_loss_mask(turn, where)
    if weight is not None and (weight != 1 or not is_assistant):
        turn["weight"] = weight
    for field in () if is_assistant else ("reasoning_content", "tool_calls"):
        if turn[field]:
            problem = f"{field} is allowed in assistant messages only, found in a {turn['role']} message"
            raise BadRowError("wrong type", problem, f"{where}.{field}", "remove the field")
    if (
        is_assistant
        and not allows_empty_answers
        and not (turn["content"].strip() or turn["reasoning_content"].strip() or turn["tool_calls"])
    ):
        raise BadRowError(
            "empty assistant turn",
            "the assistant message is empty",
            f"{where}.content",
            "add content, or delete the message",
        )
    return turn


def _is_plain(message: Any) -> bool:
    """Return whether a message has a role and a text, and no other field that is set: then nothing of it has to be
    checked or converted.
    """
    if not isinstance(message, dict) or not PLAIN_FIELDS.issuperset(message) or message.get("tool_calls") is not None:
        return False
    role, content, reasoning = message.get("role"), message.get("content"), message.get("reasoning_content")
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        return False
    return (reasoning is None or reasoning == "") and not content.isspace() and content != ""


def _check_role(name: Any, where: str) -> str:
    if isinstance(name, str) and name in ROLES:
        return ROLES[name]
    message = f"role must be one of {', '.join(dict.fromkeys(ROLES.values()))}, got {json.dumps(name, ensure_ascii=False, default=str)}"
    known = sorted(ROLES.keys() - {"function"})  # function_call is none of its calls
    fix = did_you_mean(name if isinstance(name, str) else "", known, "correct the role")
    raise BadRowError("unknown role", message, where, fix)


def _from_sharegpt(message: dict, where: str) -> dict:
    turn = {key: value for key, value in message.items() if key not in ("from", "value")}
    if message["from"] == "function_call":
        value = message.get("value")
        calls = parse_json_row(value.encode(), f"{where}.value") if isinstance(value, str) and value.strip() else value
        return {**turn, "role": "assistant", "tool_calls": [calls] if isinstance(calls, dict) else calls}
    return {
        **turn,
        "role": _check_role(message["from"], f"{where}.from"),
        "content": None if message.get("value") is None else _check_content(message["value"], f"{where}.value"),
    }


def _check_content(value: Any, where: str) -> str:
    """Return the text of a message: one string, or a list of text parts as OpenAI ("text") or LLaMA-Factory ("value")
    write them.
    """
    if isinstance(value, list):
        texts: list[str] = []
        for part in value:
            text = isinstance(part, dict) and part.get("type") == "text" and part.get("text", part.get("value"))
            if not isinstance(text, str):
                found = part.get("type") if isinstance(part, dict) else type_name(part)
                fix = 'write {"type": "text", "text": "..."}; reasoning and calls are the fields reasoning_content and tool_calls of the message; leave out images, audio and video: models of this program read and write text'
                raise BadRowError("wrong type", f"only text parts are supported, found {found}", where, fix)
            check_no_loss_mask(part, where)
            texts.append(text)
        return "".join(texts)
    if not isinstance(value, str):
        raise BadRowError(
            "wrong type",
            f"{where.rpartition('.')[2]} must be a string, found {type_name(value)}",
            where,
            "write one string",
        )
    return value


def _check_reasoning(message: dict, where: str) -> str:
    """Return the reasoning under any of its names; OpenRouter's reasoning_details repeat it in parts, or replace it."""
    texts = {
        field: _check_content(message[field], f"{where}.{field}")
        for field in REASONING_FIELDS
        if message.get(field) is not None
    }
    fields = [field for field, text in texts.items() if text]
    if len({texts[field].strip() for field in fields}) > 1:
        raise BadRowError("wrong type", f"{' and '.join(fields)} differ", where, "keep one of them")
    if fields:
        return texts[fields[0]]
    details = as_objects(message.get("reasoning_details"), f"{where}.reasoning_details") or []
    parts = [part for detail in details if isinstance(part := detail.get("text") or detail.get("summary"), str)]
    if len(parts) < len(details):
        problem, fix = (
            "reasoning_details without text (encrypted?)",
            "write the reasoning as reasoning_content, or remove the field",
        )
        raise BadRowError("wrong type", problem, f"{where}.reasoning_details", fix)
    return "".join(parts)


def _pop_weight(message: dict, where: str) -> float | None:
    """Remove the fields that say which weight a message has in the loss, and return it; None if there is none. Raises
    BadRowError if two of them differ.
    """
    weights: dict[str, float] = {}
    for field, (types, zero, others) in LOSS_FIELDS.items():
        if (value := message.pop(field, None)) is None:
            continue
        if type(value) not in types or not (value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT):
            problem = f"the {field} of a message must be {zero} or {others}, found {json.dumps(value, default=str)}"
            raise BadRowError(
                "wrong weight",
                problem,
                f"{where}.{field}",
                f"write {zero} for an answer without loss, or remove the field",
            )
        weights[field] = int(value) if value in (0, 1) else value
    if len(set(weights.values())) > 1:
        raise BadRowError("wrong weight", f"{' and '.join(weights)} of a message differ", where, "keep one of them")
    return next(iter(weights.values()), None)


def _check_tool_calls(message: dict, where: str) -> list[dict] | None:
    """Return the calls in `tool_calls`, or the one in its former name `function_call`, as OpenAI nests them."""
    calls = as_objects(message.get("tool_calls"), f"{where}.tool_calls")
    field = "tool_calls"
    if call := parse_json_field(message.pop("function_call", None), f"{where}.function_call"):
        if calls:
            raise BadRowError(
                "wrong type",
                "the message has both function_call and tool_calls",
                f"{where}.function_call",
                "keep tool_calls, the current name",
            )
        field, calls = "function_call", as_objects([call], f"{where}.function_call")
    return calls and [_check_tool_call(item, f"{where}.{field}") for item in calls]


def _check_tool_call(call: dict, where: str) -> dict:
    """Return the call with its arguments as an object where they are one, which every chat template can render."""
    function = call.get("function", call)
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), (dict, str))
    ):
        raise BadRowError(
            "wrong type", "a tool call needs a name and arguments", where, 'write {"name": "...", "arguments": {...}}'
        )
    arguments = function["arguments"]
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        arguments = parse_json_row(arguments.encode(), f"{where} arguments")
    nested = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**nested, "id": call["id"]} if isinstance(call.get("id"), str) else nested
