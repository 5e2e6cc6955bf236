"""Rows as files hold them: JSONL or one JSON array, in MiniMind's shapes. What cannot be used is refused by file and line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

BOM = b"\xef\xbb\xbf"
SHAPES = {"text": ("text",), "chat": ("conversations",), "preference": ("chosen", "rejected")}
STAGES = {"text": "stage=pretrain", "chat": "stage=sft", "preference": "stage=dpo"}  # what to say to a file of another shape
ROLES = ("system", "user", "assistant", "tool")


def refuse(error: ValueError) -> NoReturn:
    raise error


@dataclass(frozen=True)
class Source:
    """One file of rows. Rows are counted as the file's reader counts: lines from 1, items of a JSON array from 0."""

    path: Path
    is_array: bool

    @classmethod
    def open(cls, path: Path) -> Source:
        path = Path(path)
        if not path.is_file():
            if path.exists():
                raise ValueError("not a file", str(path), "give one .jsonl or .json file")
            near = difflib.get_close_matches(path.name, sorted(file.name for file in path.parent.glob("*")), n=3)
            fix = f"did you mean {' or '.join(near)}?" if near else "check the path; a relative one starts where you stand"
            raise ValueError("there is no such file", str(path), fix)
        with open(path, "rb") as file:
            first = next((line for line in file if line.strip().removeprefix(BOM).strip()), None)
        if first is None:
            raise ValueError("the file is empty", str(path), "give a file with one JSON object a line")
        return cls(path, first.removeprefix(BOM).lstrip().startswith(b"["))

    def where(self, place: int) -> str:
        return f"{self.path}[{place}]" if self.is_array else f"{self.path}:{place}"

    def rows(self, on_bad: Callable[[ValueError], None] = refuse) -> Iterator[tuple[int, dict]]:
        """(place, JSON object) in file order; a line that holds none goes to `on_bad`, which may let reading go on."""
        for place, raw in self._items():
            try:
                value = _parse(raw, self.where(place)) if isinstance(raw, bytes) else raw
                if not isinstance(value, dict):
                    raise ValueError(f"a row is a JSON object, found {kind(value)}", self.where(place), 'write e.g. {"text": "..."}')
            except ValueError as error:
                on_bad(error)
            else:
                yield place, value

    def _items(self) -> Iterator[tuple[int, Any]]:
        if self.is_array:
            yield from enumerate(_parse(self.path.read_bytes().removeprefix(BOM), str(self.path)))
            return
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):  # bytes: only \n ends a line, U+2028 inside a text does not
                line = line.removeprefix(BOM) if number == 1 else line
                if line.strip():
                    yield number, line


def _parse(raw: bytes, where: str) -> Any:
    try:
        value = json.loads(raw.decode("utf-8"))
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason}", where, "save the file as UTF-8, e.g. with: iconv -f LATIN1 -t UTF-8") from error
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair stands for no character", where, "write the whole pair, or take the \\ud... out") from error
    except json.JSONDecodeError as error:
        if not raw.endswith(b"\n"):
            fix = "is the file cut off? Copy it again, or delete the last line"
            raise ValueError(f"broken JSON at the end of the file: {error.msg}", f"{where}:{error.colno}", fix) from error
        raise ValueError(f"broken JSON: {error.msg}", f"{where}:{error.colno}", "mend or delete the line") from error
    except (RecursionError, ValueError) as error:  # nested a thousand deep, a number of five thousand digits
        raise ValueError(f"JSON beyond reason: {error}", where, "mend or delete the line") from error


def kind(value: Any) -> str:
    """A JSON value's type in JSON's own words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def fields(row: dict, shape: str, where: str) -> list[Any]:
    """The values of a row of `shape`, after checking that it is one."""
    wanted = SHAPES[shape]
    if all(key in row for key in wanted):
        return [row[key] for key in wanted]
    other = next((name for name, keys in SHAPES.items() if all(key in row for key in keys)), None)
    fix = f"the file looks made for {STAGES[other]}" if other else f"write rows as {{{', '.join(f'{json.dumps(key)}: ...' for key in wanted)}}}"
    raise ValueError(f"{STAGES[shape]} reads {' and '.join(wanted)}; found {', '.join(map(str, row)) or 'nothing'}", where, fix)


def check_text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, found {kind(text)}", where, 'write {"text": "..."}')
    if not text.strip():
        raise ValueError("the text is empty", where, "delete the row")
    return text


def check_chat(messages: Any, tools: Any, where: str) -> tuple[list[dict], list[dict] | None]:
    """Messages and tools with what MiniMind stores as JSON strings parsed. Tools may stand beside the messages or on one of them."""
    if not isinstance(messages, list) or not messages:
        found = "an empty one" if messages == [] else kind(messages)
        raise ValueError(f"a conversation is a list of messages, found {found}", where, 'write [{"role": "user", "content": "..."}, ...]')
    turns = [_turn(message, f"{where}[{place}]") for place, message in enumerate(messages)]
    for place, turn in enumerate(turns):
        tools = _objects(turn.pop("tools", None), f"{where}[{place}].tools") or tools
    return turns, _objects(tools, f"{where} tools")


def _turn(message: Any, where: str) -> dict:
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, found {kind(message)}", where, 'write {"role": "user", "content": "..."}')
    if message.get("role") not in ROLES:
        role = json.dumps(message.get("role"), ensure_ascii=False)
        near = difflib.get_close_matches(role, ROLES, n=1)
        raise ValueError(f"unknown role {role}", f"{where}.role", f"did you mean {near[0]}?" if near else f"use one of {', '.join(ROLES)}")
    turn = dict(message)
    turn["tool_calls"] = _objects(message.get("tool_calls"), f"{where}.tool_calls")
    for call in turn["tool_calls"] or []:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), (dict, str)):
            raise ValueError("a tool call has a name and arguments", f"{where}.tool_calls", 'write {"name": "...", "arguments": {...}}')
    for field in ("content", "reasoning_content"):
        if message.get(field) is None and (field != "content" or message["role"] == "assistant"):
            turn[field] = ""
        elif not isinstance(message.get(field), str):
            raise ValueError(f"{field} must be a string, found {kind(message.get(field))}", f"{where}.{field}", "write the words as one string")
    if message["role"] == "assistant" and not (turn["content"] or turn["reasoning_content"] or turn["tool_calls"]):
        raise ValueError("the assistant says nothing", f"{where}.content", "give the turn a content, or delete it")
    return turn


def _objects(value: Any, where: str) -> list[dict] | None:
    """A list of objects, also where it is stored as a JSON string; None where there is nothing."""
    if isinstance(value, str):
        value = _parse(value.encode(), where) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"expected a list of objects, found {kind(value)}", where, "write a JSON list of objects")
    return value
