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
from runner.tracking.console.plain import LineConsole

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


class PlainTokenView:
    r"""Plain text, for pipes and files: tokens with loss are in [brackets], brackets of the text are \[escaped\]."""

    def __init__(self, stream: TextIO) -> None:
        self._out = LineConsole(stream)

    def print(self, text: str = "") -> None:
        self._out.print(strip_control(text))

    def print_legend(self) -> None:
        self.print(
            "[tokens with loss] and tokens without; [tokens]x0.5 have that weight in the loss; \\n is a line break"
        )

    def print_spans(self, spans: Iterable[TokenSpan]) -> None:
        self._out.print(
            _indented(
                _bracketed(
                    (
                        (span.loss_weight, escape_whitespace(span.text).replace("[", "\\[").replace("]", "\\]"))
                        for span in spans
                    ),
                    "",
                )
            )
        )

    def print_ids(self, spans: Iterable[TokenSpan]) -> None:
        self._out.print(
            _indented(
                "ids: " + _bracketed(((span.loss_weight, str(token)) for span in spans for token in span.ids), " ")
            )
        )


class RichTokenView(PlainTokenView):
    """For a terminal: one colour per role, tokens with loss bold, others dim."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        super().__init__(stream)
        self._console = Console(file=stream, highlight=False, soft_wrap=True)

    def print_legend(self) -> None:
        roles = ", ".join(f"[{color}]{role}[/]" for role, color in ROLE_COLORS.items())
        self._console.print(
            f"[bold]tokens with loss[/], [dim]tokens without[/]; x0.5 behind tokens: their weight in the loss; {roles}; \\n is a line break"
        )

    def print_spans(self, spans: Iterable[TokenSpan]) -> None:
        self._print_styled(((_style(span), _factor(span.loss_weight)), escape_whitespace(span.text)) for span in spans)

    def print_ids(self, spans: Iterable[TokenSpan]) -> None:
        ids = (
            ((_style(span), _factor(span.loss_weight)), "".join(f" {token}" for token in span.ids)) for span in spans
        )
        self._print_styled([(("", ""), "ids:"), *ids])

    def _print_styled(self, parts: Iterable[tuple[tuple[str, str], str]]) -> None:
        """parts: ((style, text behind the parts that share both), text)"""
        from rich.text import Text

        text = Text(INDENT)
        for (style, factor), group in itertools.groupby(parts, lambda part: part[0]):
            text.append(("".join(part for _, part in group) + factor).replace("\n", "\n" + INDENT), style)
        text.rstrip()
        self._console.print(text)


def open_token_view(plain: bool, stream: TextIO | None = None) -> PlainTokenView:
    stream = stream or sys.stdout
    return (
        PlainTokenView(stream) if plain or not stream.isatty() or os.environ.get("NO_COLOR") else RichTokenView(stream)
    )


def _style(span: TokenSpan) -> str:
    return f"{'bold' if span.has_loss else 'dim'} {ROLE_COLORS.get(span.role, '')}".strip()


def _factor(loss_weight: float) -> str:
    """Return e.g. x0.5 for a weight that is not 0 or 1."""
    return "" if loss_weight in (0, 1) else f"x{loss_weight:g}"


def _bracketed(parts: Iterable[tuple[float, str]], separator: str) -> str:
    groups = [
        (weight, separator.join(text for _, text in group))
        for weight, group in itertools.groupby(parts, lambda part: part[0])
    ]
    return separator.join(f"[{text}]{_factor(weight)}" if weight else text for weight, text in groups)


def _indented(text: str) -> str:
    return INDENT + text.removesuffix("\n").replace("\n", "\n" + INDENT)
