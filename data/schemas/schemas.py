"""What a row means: text, a conversation, or a preference, out of every shape such rows are commonly written in."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data.schemas.errors import BadRowError, type_name
from data.schemas.messages import as_objects, check_chat, check_order, drop_empty_system, parse_json_field

STAGE_OF_FORMAT = {"text": "stage=pretrain", "chat": "stage=sft", "preference": "stage=dpo"}  # what to say to a file of another shape


@dataclass(frozen=True)
class TextExample:
    text: str


@dataclass(frozen=True)
class ChatExample:
    """Messages have role (system, user, assistant, tool), content, and where there is some reasoning_content and tool_calls."""

    messages: list[dict]
    tools: list[dict] | None


@dataclass(frozen=True)
class PreferencePair:
    """Two whole conversations that differ; the prompt is in both."""

    chosen: ChatExample
    rejected: ChatExample


@dataclass(frozen=True)
class RowSchema:
    """One way to write rows."""

    name: str
    rows: str  # text | chat | preference
    keys: tuple[str, ...]  # that a row must have
    make: Callable[[dict, str], TextExample | ChatExample | PreferencePair]
    told: Callable[[dict], bool] = lambda row: True  # what tells it from another shape of the same keys

    def read(self, row: dict, where: str) -> TextExample | ChatExample | PreferencePair:
        """Raises BadRow where the row is not of this shape, or cannot be learned from."""
        if any(key not in row for key in self.keys):
            raise _unmatched_keys(row, f"rows of the shape {self.name} have {' and '.join(self.keys)}", self.rows, self.keys, where)
        return self.make(row, where)

    def fits(self, row: dict) -> bool:
        return all(row.get(key) is not None for key in self.keys) and self.told(row)


def detect_schema(row: dict, rows: str, where: str) -> RowSchema:
    """The shape of a row, of those that hold what is read (text, chat or preference). Raises BadRow where it has none of them."""
    candidates = [shape for shape in SCHEMAS.values() if shape.rows == rows]
    if rows == "chat" and "chosen" in row and "rejected" in row and "messages" not in row:
        candidates = []  # what stands beside them is their prompt, and has no answer
    named = [shape for shape in candidates if all(key in row for key in shape.keys)]
    if found := [shape for shape in named if shape.fits(row)] or named:
        return found[0]
    wanted = dict.fromkeys(" and ".join(shape.keys) for shape in SCHEMAS.values() if shape.rows == rows)
    raise _unmatched_keys(row, f"{STAGE_OF_FORMAT[rows]} reads {', or '.join(wanted)}", rows, next(iter(wanted)).split(" and "), where)


def example_weight(row: dict, where: str) -> float:
    """How much the row counts: its field `weight`, 1 where there is none. Raises BadRow."""
    value = row.get("weight")
    if value is None or value == "":
        return 1.0
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 < weight < math.inf:
        raise BadRowError(
            "wrong weight", f"a weight is a number above 0, found {json.dumps(value, default=str)}", f"{where} weight", "mend it, or delete the row"
        )
    return weight


def _unmatched_keys(row: dict, what: str, rows: str, keys: Any, where: str) -> BadRowError:
    """The refusal of a row without the keys that are read, which says for which stage it looks made."""
    other = next((shape for shape in SCHEMAS.values() if shape.fits(row)), None)
    fix = f"write rows as {{{', '.join(f'{json.dumps(key)}: ...' for key in keys)}}}"
    if other and other.rows != rows:
        fix = f"the file looks made for {STAGE_OF_FORMAT[other.rows]}"
    elif inner := next((key for key, value in row.items() if _holds_rows(value)), None):
        fix = f"the rows stand in its field {json.dumps(inner)}: take them out, e.g. with: jq -c '.[{json.dumps(inner)}][]' FILE"
    elif other:
        fix = f'the row looks like one of the shape {other.name}: data.shape="{other.name}"'
    return BadRowError("wrong keys", f"{what}; found {', '.join(map(str, row)) or 'nothing'}", where, fix)


def _holds_rows(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(shape.fits(first) for shape in SCHEMAS.values())


def _role_key(messages: Any) -> str:
    """How the first message says who speaks: role, from, or not at all. Messages may be stored as a JSON string."""
    if isinstance(messages, str):
        return next((key for key in ("role", "from") if f'"{key}"' in messages), "")
    first = messages[0] if isinstance(messages, list) and messages else None
    return next((key for key in ("role", "from") if isinstance(first, dict) and key in first), "")


def _spoken_by(key: str) -> Callable[[dict], bool]:
    return lambda row: _role_key(row.get("conversations")) == key


def _is_hh(row: dict) -> bool:
    return all(isinstance(row[side], str) and row[side].startswith(HH_TURN) for side in PREFERENCE_KEYS)


def check_text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise BadRowError("wrong type", f"text must be a string, found {type_name(text)}", where, 'write {"text": "..."}')
    if not text.strip():
        raise BadRowError("empty text", "the text is empty", where, "delete the row")
    return text


def _text(row: dict, where: str) -> TextExample:
    return TextExample(check_text(row["text"], where))


def _messages(key: str) -> Callable[[dict, str], ChatExample]:
    return lambda row, where: _chat(row[key], row, f"{where} {key}")


def _openai(row: dict, where: str) -> ChatExample:
    return _chat(row["messages"], {**row, "tools": _tools(row, where)}, f"{where} messages")


def _tools(row: dict, where: str) -> list[dict] | None:
    """Tools, also where they are under the name they had in OpenAI's first form."""
    tools, functions = (as_objects(row.get(key), f"{where} {key}") for key in ("tools", "functions"))
    if tools and functions:
        raise BadRowError("wrong type", "tools and functions stand side by side", f"{where} functions", "keep tools, its new name")
    return tools or (functions and [{"type": "function", "function": function} for function in functions])


def _chat(messages: Any, row: dict, where: str) -> ChatExample:
    turns, tools = check_chat(messages, row.get("tools"), where)
    turns = drop_empty_system(check_order(turns, where))
    system = _text_field(row, "system", where)
    if system and turns[0]["role"] == "system" and turns[0]["content"].strip() != system.strip():
        fix = "keep one of them"
        raise BadRowError("two system messages", "the system message beside the conversation is not the one in it", f"{where} system", fix)
    if system and turns[0]["role"] != "system":
        turns = [_message("system", system), *turns]
    return ChatExample(turns, tools)


def _message(role: str, words: str) -> dict:
    return {"role": role, "content": words, "reasoning_content": "", "tool_calls": None}


def _text_field(row: dict, key: str, where: str) -> str:
    """A field that may be missing."""
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRowError("wrong type", f"{key} must be a string, found {type_name(value)}", f"{where} {key}", "write the words as one string")
    return value or ""


def _alpaca_prompt(row: dict, where: str, more: tuple[str, ...] = ("input",)) -> list[dict]:
    """The turns of an Alpaca row before its answer: `more` is appended to instruction, history comes before both."""
    history = parse_json_field(row.get("history"), f"{where} history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(words, str) for words in pair) for pair in history
    ):
        raise BadRowError("wrong type", "history is a list of [question, answer]", f"{where} history", 'write [["...", "..."]]')
    question = "\n".join(words for words in (_text_field(row, key, where) for key in ("instruction", *more)) if words)
    if not question.strip():
        raise BadRowError("empty text", f"instruction and {' and '.join(more)} are empty", where, "delete the row")
    earlier = [_message(role, words) for pair in history for role, words in zip(("user", "assistant"), pair, strict=True)]
    return [*earlier, _message("user", question)]


def _alpaca(row: dict, where: str) -> ChatExample:
    return _chat([*_alpaca_prompt(row, where), _message("assistant", _required(row, "output", where))], row, where)


def _dolly(row: dict, where: str) -> ChatExample:
    return _chat([*_alpaca_prompt(row, where, ("input", "context")), _message("assistant", _required(row, "response", where))], row, where)


def _required(row: dict, key: str, where: str) -> str:
    if row[key] is None:
        raise BadRowError("wrong type", f"{key} must be a string, found null", f"{where} {key}", "write the words as one string")
    words = _text_field(row, key, where)
    if not words.strip():
        raise BadRowError("empty assistant turn", f"{key} is empty", f"{where} {key}", "give an answer, or delete the row")
    return words


def _completed(answer: str) -> Callable[[dict, str], ChatExample]:
    return lambda row, where: _with_answer(_prompt(row, where), row, answer, where)


def _preference_pair(prompt: Callable[[dict, str], Any]) -> Callable[[dict, str], PreferencePair]:
    return lambda row, where: _preference(lambda side: _with_answer(prompt(row, where), row, side, where), PREFERENCE_KEYS, where)


def _openai_pair(row: dict, where: str) -> PreferencePair:
    given = parse_json_field(row["input"], f"{where} input")
    if not isinstance(given, dict) or "messages" not in given:
        fix = 'write {"input": {"messages": [...]}, ...}'
        raise BadRowError("wrong type", f"input is an object with messages, found {type_name(given)}", f"{where} input", fix)
    whole = {**row, "tools": _tools(given, f"{where} input")}
    return _preference(lambda side: _with_answer(given["messages"], whole, side, where), ("preferred_output", "non_preferred_output"), where)


def _hh_pair(row: dict, where: str) -> PreferencePair:
    return _preference(lambda side: _chat(_hh_turns(row[side], f"{where} {side}"), row, f"{where} {side}"), PREFERENCE_KEYS, where)


def _hh_turns(text: Any, where: str) -> list[dict]:
    """The turns of one string, as Anthropic's helpful and harmless dialogues are written."""
    if not isinstance(text, str) or not text.startswith(HH_TURN):
        raise BadRowError("wrong type", "a dialogue is a string that begins with two line ends and Human:", where, f"write {json.dumps(HH_TURN + ' ...')}")
    _, *parts = re.split(r"\n\n(Human|Assistant): ?", text)
    return [_message("user" if who == "Human" else "assistant", words) for who, words in zip(parts[::2], parts[1::2], strict=True)]


def _preference(read: Callable[[str], ChatExample], sides: tuple[str, str], where: str) -> PreferencePair:
    chosen, rejected = map(read, sides)
    if chosen == rejected:
        raise BadRowError("chosen equals rejected", "chosen and rejected are the same", where, "delete the row: it prefers nothing")
    return PreferencePair(chosen, rejected)


def _prompt(row: dict, where: str) -> Any:
    prompt = _messages_or_words(row["prompt"], f"{where} prompt")
    if not isinstance(prompt, str):
        return prompt
    if not prompt.strip():
        raise BadRowError("empty text", "the prompt is empty", f"{where} prompt", "delete the row")
    return [_message("user", prompt)]


def _messages_or_words(value: Any, where: str) -> Any:
    """A list of messages, also where it is stored as a JSON string; a string that is none are words."""
    stored = isinstance(value, str) and value.lstrip().startswith("[{") and _role_key(value)
    return parse_json_field(value, where) if stored else value


def _with_answer(prompt: Any, row: dict, side: str, where: str) -> ChatExample:
    """The prompt and one answer to it: words, a message, or messages, which may begin with the prompt themselves."""
    answer = _messages_or_words(row[side], f"{where} {side}")
    if isinstance(answer, str) and prompt:
        answer = [_message("assistant", _required(row, side, where))]
    asked, tools = check_chat(prompt, row.get("tools"), f"{where} prompt") if prompt is not NO_PROMPT else ([], row.get("tools"))
    turns, tools = check_chat([answer] if isinstance(answer, dict) else answer, tools, f"{where} {side}")
    asked, turns = drop_empty_system(asked), drop_empty_system(turns)
    heard, said = ([(turn["role"], turn["content"]) for turn in part] for part in (asked, turns))
    whole = said[: len(heard)] == heard or (len(heard) == 1 and heard[0] in said)
    return _chat(turns if whole else [*asked, *turns], {**row, "tools": tools}, f"{where} {side}")


PREFERENCE_KEYS = ("chosen", "rejected")
HH_TURN = "\n\nHuman:"
NO_PROMPT: list[dict] = []  # of rows whose answers begin with it

# What has more in it comes first: a conversation may stand beside a chosen and a rejected answer to it, a text beside either.
SCHEMAS = {
    shape.name: shape
    for shape in (
        RowSchema("trl preference", "preference", ("prompt", "chosen", "rejected"), _preference_pair(_prompt)),
        RowSchema("sharegpt preference", "preference", ("conversations", "chosen", "rejected"), _preference_pair(lambda row, where: row["conversations"])),
        RowSchema("alpaca preference", "preference", ("instruction", "chosen", "rejected"), _preference_pair(_alpaca_prompt)),
        RowSchema("openai preference", "preference", ("input", "preferred_output", "non_preferred_output"), _openai_pair),
        RowSchema("minimind preference", "preference", ("chosen", "rejected"), _preference_pair(lambda row, where: NO_PROMPT), lambda row: not _is_hh(row)),
        RowSchema("hh-rlhf", "preference", ("chosen", "rejected"), _hh_pair, _is_hh),
        RowSchema("openai messages", "chat", ("messages",), _openai),
        RowSchema("minimind chat", "chat", ("conversations",), _messages("conversations"), _spoken_by("role")),
        RowSchema("sharegpt", "chat", ("conversations",), _messages("conversations"), _spoken_by("from")),
        RowSchema("alpaca", "chat", ("instruction", "output"), _alpaca),
        RowSchema("dolly", "chat", ("instruction", "context", "response"), _dolly),
        RowSchema("prompt completion", "chat", ("prompt", "completion"), _completed("completion")),
        RowSchema("prompt response", "chat", ("prompt", "response"), _completed("response")),
        RowSchema("text", "text", ("text",), _text),
    )
}
