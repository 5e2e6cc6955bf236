"""Conversations as files write them, checked and brought into one form: roles and fields as OpenAI names them."""

from __future__ import annotations

import difflib
import json
from typing import Any

from data.schemas.errors import BadRowError, parse_row, type_name

OPENAI = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
SHAREGPT = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "bard": "assistant"},
    **{"function_call": "assistant", "observation": "tool"},
}
# Who may speak after whom; "" is the beginning. An answer may be followed by a call, or by what a tool found.
ALLOWED_NEXT_ROLE = {"": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant", "user")}
EMPTY_VALUES = ("null", "None")  # as tables hold it in columns of strings
REASONING = ("reasoning_content", "reasoning", "thinking")  # DeepSeek's and Qwen's name, OpenRouter's and vLLM's, Ollama's and gpt-oss's
MESSAGE = 'write {"role": "user", "content": "..."}'


def check_chat(messages: Any, tools: Any, where: str) -> tuple[list[dict], list[dict] | None]:
    """(messages, tools), each of its right type, where both may be stored as JSON strings. Raises BadRow.

    Tools may stand beside the messages or on one of them. Of the order of roles nothing is said: a question alone is fine.
    """
    messages = parse_json_field(messages, where)
    if not isinstance(messages, list) or not messages:
        found = "an empty one" if messages == [] else type_name(messages)
        raise BadRowError("wrong type", f"a conversation is a list of messages, found {found}", where, f"{MESSAGE[:6]}[{MESSAGE[6:]}, ...]")
    turns = [_turn(message, f"{where}[{place}]") for place, message in enumerate(messages)]
    for place, turn in enumerate(turns):
        tools = as_objects(turn.pop("tools", None), f"{where}[{place}].tools") or tools
    return turns, as_objects(tools, f"{where} tools")


def check_order(messages: list[dict], where: str) -> list[dict]:
    """The messages, where they can be learned from: roles take turns and the assistant has one. Raises BadRow."""
    before = ""
    for place, message in enumerate(messages):
        role = message["role"]
        if _is_silent(message):
            continue
        calls = before == role == "assistant" and message.get("tool_calls")
        if role not in ALLOWED_NEXT_ROLE[before] and not calls:
            what = f"{role} after {before}" if before else f"{role} comes first"
            allowed = " or ".join(ALLOWED_NEXT_ROLE[before])
            fix = "put the system message first" if role == "system" else f"here comes {allowed}: join or delete turns"
            raise BadRowError("roles out of order", f"roles out of order: {what}", f"{where}[{place}].role", fix)
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError("no assistant turn", "no assistant turn: nothing to learn", where, "add the assistant's answer, or delete the row")
    return messages


def drop_empty_system(messages: list[dict]) -> list[dict]:
    """The messages without a system message that says nothing (MiniMind hangs tools on such ones)."""
    return [message for message in messages if not _is_silent(message)]


def _is_silent(message: dict) -> bool:
    return message["role"] == "system" and not message["content"].strip()


def as_objects(value: Any, where: str) -> list[dict] | None:
    """A list of objects, also where it is stored as a JSON string; None where there is nothing."""
    value = parse_json_field(value, where)
    if not value or value in EMPTY_VALUES:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRowError("wrong type", f"expected a list of objects, found {type_name(value)}", where, "write a JSON list of objects")
    return value


def message_content(value: Any, where: str) -> str:
    """The words of a message: one string, or OpenAI's list of text parts."""
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                found = part.get("type") if isinstance(part, dict) else type_name(part)
                raise BadRowError("wrong type", f"only text can be read, found a part {found}", where, 'write {"type": "text", "text": "..."}')
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise BadRowError("wrong type", f"{where.rpartition('.')[2]} must be a string, found {type_name(value)}", where, "write the words as one string")
    return value


def _turn(message: Any, where: str) -> dict:
    if not isinstance(message, dict):
        raise BadRowError("wrong type", f"a message is a JSON object, found {type_name(message)}", where, MESSAGE)
    if "from" in message and "role" not in message:
        turn = _from_sharegpt(message, where)
    else:
        turn = {**message, "role": _role(message.get("role"), OPENAI, f"{where}.role")}
    speaks = turn["role"] == "assistant"
    may_miss = turn["role"] in ("assistant", "system")
    turn["content"] = "" if turn.get("content") is None and may_miss else message_content(turn.get("content"), f"{where}.content")
    turn["reasoning_content"] = _reasoning(turn, where)
    turn["tool_calls"] = _called(turn, where)
    if not _carries_loss(turn.pop("weight", None), f"{where}.weight"):
        turn["weight"] = 0
    for field in () if speaks else ("reasoning_content", "tool_calls"):
        if turn[field]:
            raise BadRowError("wrong type", f"a {turn['role']} message has {field}", f"{where}.{field}", "only the assistant reasons and calls: take it out")
    if speaks and not (turn["content"].strip() or turn["reasoning_content"].strip() or turn["tool_calls"]):
        raise BadRowError("empty assistant turn", "the assistant says nothing", f"{where}.content", "give the turn a content, or delete it")
    return turn


def _reasoning(message: dict, where: str) -> str:
    """What stands under any of the names that reasoning has; OpenRouter's details are the same in parts, beside it or alone."""
    said = {field: message_content(message[field], f"{where}.{field}") for field in REASONING if message.get(field) is not None}
    fields = [field for field, words in said.items() if words]
    if len({said[field].strip() for field in fields}) > 1:
        raise BadRowError("wrong type", f"{' and '.join(fields)} differ", where, "keep one of them")
    if fields:
        return said[fields[0]]
    details = as_objects(message.get("reasoning_details"), f"{where}.reasoning_details") or []
    words = [part for detail in details if isinstance(part := detail.get("text") or detail.get("summary"), str)]
    if len(words) < len(details):
        what, fix = "reasoning_details without words (encrypted?)", "write the words as reasoning_content, or take the field out"
        raise BadRowError("wrong type", what, f"{where}.reasoning_details", fix)
    return "".join(words)


def _called(message: dict, where: str) -> list[dict] | None:
    """The tool calls, also where there is one under the name it had in OpenAI's first form."""
    calls = _calls(message.get("tool_calls"), f"{where}.tool_calls")
    call = parse_json_field(message.pop("function_call", None), f"{where}.function_call")
    if not call:
        return calls
    if calls:
        raise BadRowError("wrong type", "function_call and tool_calls stand side by side", f"{where}.function_call", "keep tool_calls, its new name")
    return _calls([call], f"{where}.function_call")


def _carries_loss(weight: Any, where: str) -> bool:
    """OpenAI's weight of a message: 0 for an answer that is read and not learned."""
    if weight is None or (weight in (0, 1) and not isinstance(weight, bool)):
        return weight != 0
    what = f"the weight of a message is 0 or 1, found {json.dumps(weight, default=str)}"
    raise BadRowError("wrong weight", what, where, "write 0 for an answer that is not to be learned; a weight beside the messages may be any number above 0")


def _role(name: Any, known: dict[str, str], where: str) -> str:
    if isinstance(name, str) and name in known:
        return known[name]
    near = difflib.get_close_matches(name if isinstance(name, str) else "", known, n=1)
    fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
    raise BadRowError("unknown role", f"unknown role {json.dumps(name, ensure_ascii=False, default=str)}", where, fix)


def _from_sharegpt(message: dict, where: str) -> dict:
    turn = {key: value for key, value in message.items() if key not in ("from", "value")}
    turn["role"] = _role(message["from"], SHAREGPT, f"{where}.from")
    if message["from"] == "function_call":
        value = message.get("value")
        calls = parse_row(value.encode(), f"{where}.value") if isinstance(value, str) and value.strip() else value
        return {**turn, "tool_calls": [calls] if isinstance(calls, dict) else calls}
    return {**turn, "content": None if message.get("value") is None else message_content(message["value"], f"{where}.value")}


def _calls(value: Any, where: str) -> list[dict] | None:
    """Tool calls as OpenAI nests them; their arguments as an object where they are one, which every template can write out."""
    calls = as_objects(value, where)
    return calls and [_call(call, where) for call in calls]


def _call(call: dict, where: str) -> dict:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), (dict, str)):
        raise BadRowError("wrong type", "a tool call has a name and arguments", where, 'write {"name": "...", "arguments": {...}}')
    arguments = function["arguments"]
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        arguments = parse_row(arguments.encode(), f"{where} arguments")
    nested = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**nested, "id": call["id"]} if isinstance(call.get("id"), str) else nested


def parse_json_field(value: Any, where: str) -> Any:
    """What a string holds that is a JSON list or object: tables and MiniMind store them so."""
    if not isinstance(value, str):
        return value
    begin = value.lstrip()[:1]
    return parse_row(value.encode(), where) if begin and begin in "[{" else value.strip() or None
