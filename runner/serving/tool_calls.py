"""Tool calls in the text of an answer: JSON objects between `<tool_call>` tags, as the templates of MiniMind, Qwen and Hermes write them."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from common.limits.parsers import parse_json
from data.tokenize.chat_template import ChatTemplate
from runner.serving.protocol import ApiError

OPENING_TAG = "<tool_call>"
OPENING = re.compile(r"<tool_call>\s*(?=\{)")
CLOSING = re.compile(r"\}\s*</tool_call>")


def check_tools(template: ChatTemplate) -> None:
    """Raises ApiError if tools would have no effect, or calls would not be recognized."""
    if not template.names("tools"):
        raise ApiError(400, "the chat template of this model has no tools: omit them", param="tools", code="unsupported_parameter")
    if OPENING_TAG not in str(template.tokenizer.chat_template):
        message = f"calls of tools are recognized between {OPENING_TAG} tags only, which the chat template of this model does not write: omit tools"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")


def split_tool_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text outside of calls, and the calls as OpenAI returns them. What is no valid call stays text.

    An answer is read once: time is linear in its length, whatever tags it repeats.
    """
    calls: list[dict[str, Any]] = []
    rest, position = [], 0
    while (opening := OPENING.search(text, position)) and (closing := CLOSING.search(text, opening.end())):
        call = _parse_call(text[opening.end() : closing.start() + 1])
        rest.append(text[position : closing.end() if call is None else opening.start()])
        calls += [] if call is None else [call]
        position = closing.end()
    rest.append(text[position:])
    return ("".join(rest).strip() or None) if calls else text, calls


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        call = parse_json(text)
    except ValueError:
        return None
    if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return None
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
