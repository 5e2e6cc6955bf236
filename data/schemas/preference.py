"""Schemas of preferences: a prompt with a chosen and a rejected answer, as TRL, ShareGPT, Alpaca, OpenAI, MiniMind and
hh-rlhf write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from data.errors import BadRowError, type_name
from data.schemas.chat import (
    CHAT_FIELDS,
    NO_PROMPT,
    alpaca_prompt,
    answer_example,
    chat_example,
    chat_message,
    chat_tools,
    prompt_messages,
)
from data.schemas.messages import parse_json_field
from data.schemas.registry import ChatExample, PreferencePair, register_schema

PREFERENCE_KEYS = ("chosen", "rejected")
HH_TURN = "\n\nHuman:"  # beginning of each dialogue of hh-rlhf


def preference_pair(
    parse: Callable[[str], ChatExample], where: str, keys: tuple[str, str] = PREFERENCE_KEYS
) -> PreferencePair:
    """Return the two conversations that `parse` returns for the two keys.

    Raises BadRowError if they are equal, or a message has a weight that is not 0 or 1.
    """
    chosen, rejected = map(parse, keys)
    for key, chat in zip(keys, (chosen, rejected), strict=True):
        for message in chat.messages:
            if (weight := message.get("weight", 1)) not in (0, 1):
                problem = f"a message of a preference has weight {weight}, but a preference compares whole answers: only 0 and 1 are read"
                raise BadRowError(
                    "wrong weight",
                    problem,
                    f"{where} {key}",
                    "write 0 for a turn without loss, or remove the field; the weight of the row may be any",
                )
    if chosen == rejected:
        raise BadRowError(
            "chosen equals rejected", "chosen and rejected are the same", where, "delete the row: it has no preference"
        )
    return PreferencePair(chosen, rejected)


def _is_hh(row: dict) -> bool:
    return all(isinstance(row[key], str) and row[key].startswith(HH_TURN) for key in PREFERENCE_KEYS)


# Of the schemas that match a row, the last one is used: those with more keys come later.


@register_schema("hh-rlhf", "preference", keys=PREFERENCE_KEYS, detect=_is_hh, optional=CHAT_FIELDS)
def parse_hh(row: dict, where: str) -> PreferencePair:
    return preference_pair(
        lambda key: chat_example(_hh_messages(row[key], f"{where} {key}"), row, f"{where} {key}"), where
    )


def _hh_messages(text: Any, where: str) -> list[dict]:
    """Return the messages of a dialogue that is one string: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    if not isinstance(text, str) or not text.startswith(HH_TURN):
        message = "a dialogue must be a string that begins with two line breaks and Human:"
        raise BadRowError("wrong type", message, where, f"write {json.dumps(HH_TURN + ' ...')}")
    _, *parts = re.split(r"\n\n(Human|Assistant): ?", text)
    return [
        chat_message("user" if name == "Human" else "assistant", content)
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


@register_schema(
    "minimind preference", "preference", keys=PREFERENCE_KEYS, detect=lambda row: not _is_hh(row), optional=CHAT_FIELDS
)
def parse_minimind_preference(row: dict, where: str) -> PreferencePair:
    return preference_pair(lambda key: answer_example(NO_PROMPT, row, key, where), where)


@register_schema(
    "openai preference", "preference", keys=("input", "preferred_output", "non_preferred_output"), optional=("system",)
)
def parse_openai_preference(row: dict, where: str) -> PreferencePair:
    prompt = parse_json_field(row["input"], f"{where} input")
    if not isinstance(prompt, dict) or "messages" not in prompt:
        fix = 'write {"input": {"messages": [...]}, ...}'
        raise BadRowError(
            "wrong type", f"input must be an object with messages, found {type_name(prompt)}", f"{where} input", fix
        )
    row = {**row, "tools": chat_tools(prompt, f"{where} input")}
    return preference_pair(
        lambda key: answer_example(prompt["messages"], row, key, where),
        where,
        ("preferred_output", "non_preferred_output"),
    )


@register_schema(
    "alpaca preference",
    "preference",
    keys=("instruction", *PREFERENCE_KEYS),
    optional=(*CHAT_FIELDS, "history", "input"),
)
def parse_alpaca_preference(row: dict, where: str) -> PreferencePair:
    return preference_pair(lambda key: answer_example(alpaca_prompt(row, where), row, key, where), where)


@register_schema("sharegpt preference", "preference", keys=("conversations", *PREFERENCE_KEYS), optional=CHAT_FIELDS)
def parse_sharegpt_preference(row: dict, where: str) -> PreferencePair:
    return preference_pair(lambda key: answer_example(row["conversations"], row, key, where), where)


@register_schema("trl preference", "preference", keys=("prompt", *PREFERENCE_KEYS), optional=CHAT_FIELDS)
def parse_trl_preference(row: dict, where: str) -> PreferencePair:
    return preference_pair(lambda key: answer_example(prompt_messages(row, where), row, key, where), where)
