"""Schemas of conversations: OpenAI, ShareGPT, MiniMind, Alpaca, Dolly, and prompts with one answer; and of preferences,
a prompt with a chosen and a rejected answer: TRL, ShareGPT, Alpaca, OpenAI, MiniMind and hh-rlhf.
And random changes of both, as in MiniMind: add a system message, add an empty think block.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from data.schemas.columns import columns_override
from data.schemas.messages import as_objects, check_chat, check_order, drop_empty_system, parse_json_field
from data.schemas.registry import ChatExample, PreferencePair, register_schema
from data.schemas.text import optional_text, required_text
from data.types import BadRowError, type_name

if TYPE_CHECKING:
    from data.types import EncodingConfig

CHAT_FIELDS = ("system", "tools")  # optional fields of conversations of every schema
ALPACA_FIELDS = (*CHAT_FIELDS, "history", "input")
PREFERENCE_KEYS = ("chosen", "rejected")
HH_TURN = "\n\nHuman:"  # beginning of each dialogue of hh-rlhf
NO_PROMPT: list[dict] = []  # of rows whose answers contain the prompt
register_chat = partial(register_schema, data_format="chat", optional=CHAT_FIELDS)
register_preference = partial(register_schema, data_format="preference", optional=CHAT_FIELDS)
EMPTY_THINK = "<think>\n\n</think>\n\n"


def chat_message(role: str, text: str) -> dict:
    return {"role": role, "content": text, "reasoning_content": "", "tool_calls": None}


def chat_example(messages: Any, row: dict, where: str) -> ChatExample:
    """Check `messages` and return them with the tools and the system message of `row`. Raises BadRowError."""
    turns, tools = check_chat(messages, row.get("tools"), where)
    turns = check_order(turns, where)
    system = optional_text(row, "system", where)
    system = system if system.strip() else ""  # as a blank message of the system, it is none
    if system and turns[0]["role"] == "system" and turns[0]["content"].strip() != system.strip():
        message = "the field system differs from the system message of the conversation"
        raise BadRowError("two system messages", message, f"{where} system", "keep one of them")
    if system and turns[0]["role"] != "system":
        turns = [chat_message("system", system), *turns]
    return ChatExample(turns, tools)


# --- prompts with one answer ---


def answer_example(prompt: Any, row: dict, key: str, where: str) -> ChatExample:
    """Return `prompt` and the answer in `row[key]`: a string, a message, or messages, which may repeat the prompt."""
    answer = _messages_or_text(row[key], f"{where} {key}")
    if isinstance(answer, str) and prompt is NO_PROMPT:
        guess = columns_override(row, "preference")
        fix = f"name the column of the prompt, a guess is {guess}" if guess else "add the field prompt"
        message = f"without a prompt, {key} must be a list of messages, found a string"
        raise BadRowError("wrong type", message, f"{where} {key}", fix)
    if prompt and not isinstance(answer, list | dict):
        answer = [chat_message("assistant", required_text(row, key, where))]
    question, tools = (
        check_chat(prompt, row.get("tools"), f"{where} prompt") if prompt is not NO_PROMPT else ([], row.get("tools"))
    )
    turns, tools = check_chat([answer] if isinstance(answer, dict) else answer, tools, f"{where} {key}")
    question, turns = drop_empty_system(question), drop_empty_system(turns)
    prefix, texts = ([(turn["role"], turn["content"]) for turn in part] for part in (question, turns))
    is_inside = len(prefix) == 1 and prefix[0] in texts and texts[0][0] != "assistant"
    contains_prompt = texts[: len(prefix)] == prefix or is_inside
    return chat_example(turns if contains_prompt else [*question, *turns], {**row, "tools": tools}, f"{where} {key}")


def prompt_messages(row: dict, where: str) -> Any:
    """Return the messages in `row["prompt"]`, a string or a list of messages."""
    prompt = _messages_or_text(row["prompt"], f"{where} prompt")
    if isinstance(prompt, list | dict):
        return prompt
    if not optional_text(row, "prompt", where).strip():
        raise BadRowError("empty text", "the prompt is empty", f"{where} prompt", "delete the row")
    return [chat_message("user", prompt)]


def alpaca_prompt(row: dict, where: str, more: tuple[str, ...] = ("input",)) -> list[dict]:
    """Return the messages before the answer of an Alpaca row: `history`, then `instruction` with the fields `more`
    appended.
    """
    history = parse_json_field(row.get("history"), f"{where} history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    ):
        raise BadRowError(
            "wrong type", "history must be a list of [question, answer]", f"{where} history", 'write [["...", "..."]]'
        )
    question = "\n".join(text for text in (optional_text(row, key, where) for key in ("instruction", *more)) if text)
    if not question.strip():
        raise BadRowError("empty text", f"instruction and {' and '.join(more)} are empty", where, "delete the row")
    earlier = [
        chat_message(role, text) for pair in history for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [*earlier, chat_message("user", question)]


def _messages_or_text(value: Any, where: str) -> Any:
    """Return a list of messages, which may be stored as a JSON string, or any other value as it is."""
    is_json = isinstance(value, str) and value.lstrip().startswith("[{") and _role_key(value)
    return parse_json_field(value, where) if is_json else value


def _role_key(messages: Any) -> str:
    """Return the key of the first message that names its author: role, from, or "".

    Messages may be stored as a JSON string.
    """
    if isinstance(messages, str):
        return next((key for key in ("role", "from") if f'"{key}"' in messages), "")
    first = messages[0] if isinstance(messages, list) and messages else None
    return next((key for key in ("role", "from") if isinstance(first, dict) and key in first), "")


def chat_tools(row: dict, where: str) -> list[dict] | None:
    """Return the tools of a row in OpenAI's format, from `tools` or its former name `functions`."""
    tools, functions = (as_objects(row.get(key), f"{where} {key}") for key in ("tools", "functions"))
    if tools and functions:
        raise BadRowError(
            "wrong type", "the row has both tools and functions", f"{where} functions", "keep tools, the current name"
        )
    return tools or (functions and [{"type": "function", "function": function} for function in functions])


# --- schemas: of those that match a row, the last one is used ---


@register_chat("prompt response", keys=("prompt", "response"))
def parse_prompt_response(row: dict, where: str) -> ChatExample:
    return answer_example(prompt_messages(row, where), row, "response", where)


@register_chat("prompt completion", keys=("prompt", "completion"))
def parse_prompt_completion(row: dict, where: str) -> ChatExample:
    return answer_example(prompt_messages(row, where), row, "completion", where)


@register_chat("dolly", keys=("instruction", "context", "response"), optional=ALPACA_FIELDS)
def parse_dolly(row: dict, where: str) -> ChatExample:
    prompt = alpaca_prompt(row, where, ("input", "context"))
    return chat_example([*prompt, chat_message("assistant", required_text(row, "response", where))], row, where)


@register_chat("alpaca", keys=("instruction", "output"), optional=ALPACA_FIELDS)
def parse_alpaca(row: dict, where: str) -> ChatExample:
    return chat_example(
        [*alpaca_prompt(row, where), chat_message("assistant", required_text(row, "output", where))], row, where
    )


@register_chat(
    "minimind chat", keys=("conversations",), detect=lambda row: _role_key(row.get("conversations")) == "role"
)
@register_chat("sharegpt", keys=("conversations",), detect=lambda row: _role_key(row.get("conversations")) == "from")
def parse_conversations(row: dict, where: str) -> ChatExample:
    return chat_example(row["conversations"], row, f"{where} conversations")


@register_chat("openai messages", keys=("messages",), optional=(*CHAT_FIELDS, "functions"))
def parse_openai(row: dict, where: str) -> ChatExample:
    return chat_example(row["messages"], {**row, "tools": chat_tools(row, where)}, f"{where} messages")


# --- preferences: those with more keys come later, because the last one that matches is used ---


def preference_pair(prompt: Any, row: dict, where: str, keys: tuple[str, str] = PREFERENCE_KEYS) -> PreferencePair:
    """Return the conversations of `prompt` with the answers in the two `keys` of the row, as `answer_example` reads them.

    Raises BadRowError if they are equal or answer different questions, or a message has a weight that is not 0 or 1.
    """
    chosen, rejected = (answer_example(prompt, row, key, where) for key in keys)
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
    questions = [
        [turn["content"].strip() for turn in chat.messages if turn["role"] in ("system", "user")][
            : 1 + (chat.messages[0]["role"] == "system")
        ]
        for chat in (chosen, rejected)
    ]
    if questions[0] != questions[1]:
        problem = "the system messages or first questions of chosen and rejected differ"
        raise BadRowError("different prompts", problem, where, "give both the same prompt, or delete the row")
    return PreferencePair(chosen, rejected)


def _is_hh(row: dict) -> bool:
    return all(isinstance(row[key], str) and row[key].startswith(HH_TURN) for key in PREFERENCE_KEYS)


@register_preference("hh-rlhf", keys=PREFERENCE_KEYS, detect=_is_hh)
def parse_hh(row: dict, where: str) -> PreferencePair:
    dialogues = {key: _hh_messages(row[key], f"{where} {key}") for key in PREFERENCE_KEYS}
    return preference_pair(NO_PROMPT, row | dialogues, where)


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


@register_preference("minimind preference", keys=PREFERENCE_KEYS, detect=lambda row: not _is_hh(row))
def parse_minimind_preference(row: dict, where: str) -> PreferencePair:
    return preference_pair(NO_PROMPT, row, where)


@register_preference(
    "openai preference", keys=("input", "preferred_output", "non_preferred_output"), optional=("system",)
)
def parse_openai_preference(row: dict, where: str) -> PreferencePair:
    prompt = parse_json_field(row["input"], f"{where} input")
    if not isinstance(prompt, dict) or "messages" not in prompt:
        fix = 'write {"input": {"messages": [...]}, ...}'
        raise BadRowError(
            "wrong type", f"input must be an object with messages, found {type_name(prompt)}", f"{where} input", fix
        )
    row = {**row, "tools": chat_tools(prompt, f"{where} input")}
    return preference_pair(prompt["messages"], row, where, ("preferred_output", "non_preferred_output"))


@register_preference("alpaca preference", keys=("instruction", *PREFERENCE_KEYS), optional=ALPACA_FIELDS)
def parse_alpaca_preference(row: dict, where: str) -> PreferencePair:
    return preference_pair(alpaca_prompt(row, where), row, where)


@register_preference("sharegpt preference", keys=("conversations", *PREFERENCE_KEYS))
def parse_sharegpt_preference(row: dict, where: str) -> PreferencePair:
    return preference_pair(row["conversations"], row, where)


@register_preference("trl preference", keys=("prompt", *PREFERENCE_KEYS))
def parse_trl_preference(row: dict, where: str) -> PreferencePair:
    return preference_pair(prompt_messages(row, where), row, where)


# --- random changes ---


def augment_example(
    example: ChatExample | PreferencePair, encoding: EncodingConfig, index: int
) -> ChatExample | PreferencePair:
    """Return `example`, or a copy with the changes of `encoding`: both are off where their probability is 0. Chosen and
    rejected of a preference get the same change.

    The draws depend on (seed, index) only, so that a row gives the same conversation in every process and epoch.

    With probability `system_prob`, one of `system_prompts` becomes the system message of a conversation without system
    message and tools. With probability `empty_think_prob`, each answer without reasoning begins with an empty think
    block, the form that a model uses when its chat template disables thinking. `index` is the position of the row in
    its file.
    """
    if not encoding.system_prob and not encoding.empty_think_prob:
        return example
    import numpy as np

    rng = np.random.default_rng([encoding.seed, index])
    system_draw, think_draw = rng.random(2)  # both always, so that one probability does not change the other's draws
    prompts = encoding.system_prompts
    system = prompts[int(rng.integers(len(prompts)))] if system_draw < encoding.system_prob else None
    empty_think = bool(think_draw < encoding.empty_think_prob)
    chats = [_augmented(chat, system, empty_think) for chat in example.chats]
    return PreferencePair(*chats) if isinstance(example, PreferencePair) else chats[0]


def _augmented(chat: ChatExample, system: str | None, empty_think: bool) -> ChatExample:
    messages = [_with_empty_think(message) for message in chat.messages] if empty_think else chat.messages
    if system is not None and not chat.tools and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return replace(chat, messages=messages)


def _with_empty_think(message: dict) -> dict:
    has_reasoning = message.get("reasoning_content") or "</think>" in (message.get("content") or "")
    if message["role"] != "assistant" or has_reasoning:
        return message
    return {**message, "content": EMPTY_THINK + (message.get("content") or "")}
