"""Tokens on paper: what carries loss stands out, and nothing in a text can move the cursor of who reads it."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import numpy as np

from runner.tracking.console import PlainConsole, strip_control

if TYPE_CHECKING:
    from data.tokenize.tokenizer import Tokenizer

ROLE_COLORS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
MAX_CHARACTER_BYTES = 4  # bytes, so tokens at most
INDENT = "    "


@dataclass(frozen=True)
class TokenSpan:
    """The fewest tokens that are whole characters."""

    text: str
    ids: list[int]
    learn: bool
    role: str  # "" where nobody is known to speak


def token_spans(tokenizer: Tokenizer, ids: np.ndarray, learn: np.ndarray, turns: list[tuple[int, str]]) -> Iterator[TokenSpan]:
    """A sequence cut into whole characters; `turns` as ChatTemplate.turns tells them."""
    turns, characters, start = list(turns), 0, 0
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:stop].tolist(), skip_special=False)
        broken = text.endswith("\ufffd") and stop - start < MAX_CHARACTER_BYTES
        if broken and stop < len(ids) and learn[stop] == learn[start]:
            continue
        while turns and characters >= turns[0][0]:
            turns.pop(0)
        yield TokenSpan(text, ids[start:stop].tolist(), bool(learn[start]), turns[0][1] if turns else "")
        characters, start = characters + len(text), stop


def escape_whitespace(text: str) -> str:
    """Line ends and tabs can be seen, and a line end still ends the line; other control characters are escaped."""
    return strip_control(text.replace("\t", "\\t").replace("\n", "\\n\n"))


class PlainTokenView:
    """Plain text, for pipes, files and tests: learned tokens stand in [brackets], brackets of the text are \\[escaped\\]."""

    def __init__(self, stream: TextIO) -> None:
        self._out = PlainConsole(stream)

    def say(self, text: str = "") -> None:
        self._out.say(strip_control(text))

    def legend(self) -> None:
        self.say("[tokens that carry loss] and others; \\n is a line end")

    def sequence(self, parts: Iterable[TokenSpan]) -> None:
        self._out.say(_indented(_bracketed(((part.learn, escape_whitespace(part.text).replace("[", "\\[").replace("]", "\\]")) for part in parts), "")))

    def ids(self, parts: Iterable[TokenSpan]) -> None:
        self._out.say(_indented("ids: " + _bracketed(((part.learn, str(number)) for part in parts for number in part.ids), " ")))


class RichTokenView(PlainTokenView):
    """For a terminal: a colour for each role, learned tokens bold, others dim."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        super().__init__(stream)
        self._console = Console(file=stream, highlight=False, soft_wrap=True)

    def legend(self) -> None:
        roles = ", ".join(f"[{colour}]{role}[/]" for role, colour in ROLE_COLORS.items())
        self._console.print(f"[bold]tokens that carry loss[/], [dim]others[/]; {roles}; \\n is a line end")

    def sequence(self, parts: Iterable[TokenSpan]) -> None:
        self._print((_style(part), escape_whitespace(part.text)) for part in parts)

    def ids(self, parts: Iterable[TokenSpan]) -> None:
        self._print([("", "ids:"), *((_style(part), "".join(f" {number}" for number in part.ids)) for part in parts)])

    def _print(self, styled: Iterable[tuple[str, str]]) -> None:
        from rich.text import Text

        whole = Text(INDENT)
        for style, group in itertools.groupby(styled, lambda part: part[0]):
            whole.append("".join(text for _, text in group).replace("\n", "\n" + INDENT), style)
        whole.rstrip()
        self._console.print(whole)


def _style(part: TokenSpan) -> str:
    return f"{'bold' if part.learn else 'dim'} {ROLE_COLORS.get(part.role, '')}".strip()


def _bracketed(parts: Iterable[tuple[bool, str]], between: str) -> str:
    groups = [(learn, between.join(text for _, text in group)) for learn, group in itertools.groupby(parts, lambda part: part[0])]
    return between.join(f"[{text}]" if learn else text for learn, text in groups)


def open_token_view(plain: bool, stream: TextIO | None = None) -> PlainTokenView:
    stream = stream or sys.stdout
    return PlainTokenView(stream) if plain or not stream.isatty() or os.environ.get("NO_COLOR") else RichTokenView(stream)


def _indented(text: str) -> str:
    return INDENT + text.removesuffix("\n").replace("\n", "\n" + INDENT)
