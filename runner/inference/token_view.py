"""Print token sequences: tokens with loss are marked, and control characters of the text cannot affect the terminal."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import numpy as np

from common.errors import strip_control
from runner.tracking.lines import LineConsole

if TYPE_CHECKING:
    from data.tokenize.tokenizer import Tokenizer

ROLE_COLORS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
MAX_CHARACTER_BYTES = 4  # of UTF-8, so also the most tokens of a character
INDENT = "    "


@dataclass(frozen=True)
class TokenSpan:
    """The fewest tokens that decode to complete characters."""

    text: str
    ids: list[int]
    loss_weight: float  # 0: no loss
    role: str  # "" for plain text

    @property
    def has_loss(self) -> bool:
        return self.loss_weight > 0


def token_spans(
    tokenizer: Tokenizer, ids: np.ndarray, loss_mask: np.ndarray, turn_ends: list[tuple[int, str]]
) -> Iterator[TokenSpan]:
    """Split a sequence into spans. ids: (T,); loss_mask: (T,) as of a TokenSequence; turn_ends: see
    ChatTemplate.turn_ends.
    """
    turns, characters, start = list(turn_ends), 0, 0
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:stop].tolist(), skip_special=False)
        is_incomplete = text.endswith("\ufffd") and stop - start < MAX_CHARACTER_BYTES
        if is_incomplete and stop < len(ids) and loss_mask[stop] == loss_mask[start]:
            continue
        while turns and characters >= turns[0][0]:
            turns.pop(0)
        yield TokenSpan(text, ids[start:stop].tolist(), float(loss_mask[start]), turns[0][1] if turns else "")
        characters, start = characters + len(text), stop


def escape_whitespace(text: str) -> str:
    r"""Print tabs as \t and newlines as \n and a line break; escape other control characters."""
    return strip_control(text.replace("\t", "\\t").replace("\n", "\\n\n"))


class TokenView:
    r"""Prints tokens: on a terminal with one colour per role, tokens with loss bold, others dim.

    If `plain`, or without a terminal: tokens with loss are in [brackets], brackets of the text are \[escaped\].
    """

    def __init__(self, plain: bool, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self._out = LineConsole(stream)
        self._terminal = None
        if not plain and stream.isatty() and not os.environ.get("NO_COLOR"):
            from rich.console import Console

            self._terminal = Console(file=stream, highlight=False, soft_wrap=True)

    def print(self, text: str = "") -> None:
        self._out.print(strip_control(text))

    def print_legend(self) -> None:
        if self._terminal is None:
            self.print(
                "[tokens with loss] and tokens without; [tokens]x0.5 have that weight in the loss; \\n is a line break"
            )
        else:
            roles = ", ".join(f"[{color}]{role}[/]" for role, color in ROLE_COLORS.items())
            self._terminal.print(
                f"[bold]tokens with loss[/], [dim]tokens without[/]; x0.5 behind tokens: their weight in the loss; {roles}; \\n is a line break"
            )

    def print_spans(self, spans: Iterable[TokenSpan]) -> None:
        self._print_marked((span, escape_whitespace(span.text)) for span in spans)

    def print_ids(self, spans: Iterable[TokenSpan]) -> None:
        self._print_marked(((span, str(token)) for span in spans for token in span.ids), "ids: ", " ")

    def _print_marked(self, parts: Iterable[tuple[TokenSpan, str]], head: str = "", separator: str = "") -> None:
        from rich.text import Text

        text, line_break = Text(INDENT + head), "\n" + INDENT
        for number, ((weight, style), group) in enumerate(itertools.groupby(parts, lambda part: self._mark(part[0]))):
            marked = separator.join(part for _, part in group)
            if self._terminal is None:
                marked = marked.replace("[", "\\[").replace("]", "\\]")
                marked = f"[{marked}]" if weight else marked
            factor = "" if weight in (0, 1) else f"x{weight:g}"
            text.append(separator if number else "").append((marked + factor).replace("\n", line_break), style)
        if text.plain.endswith(line_break):
            text.right_crop(len(line_break))
        if self._terminal is None:
            self._out.print(text.plain)
        else:
            self._terminal.print(text)

    def _mark(self, span: TokenSpan) -> tuple[float, str]:
        """Return what tokens that are printed together share: their weight in the loss, and their style."""
        if self._terminal is None:
            return span.loss_weight, ""
        return span.loss_weight, f"{'bold' if span.has_loss else 'dim'} {ROLE_COLORS.get(span.role, '')}".strip()
