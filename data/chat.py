"""Conversations through a Jinja chat template into token ids, and which of them the assistant wrote.

What the template writes may become control tokens; what people write never does. So that the two can be told apart
in the rendered text, control tokens inside contents are broken by a private character before rendering, and it is
taken out again before that text is encoded as plain text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.formats import check_chat
from data.tokenizer import Tokenizer

CHATML = Path(__file__).with_name("chatml.jinja")
# Unicode noncharacters: set aside for use inside programs, so no text that is exchanged holds them.
BREAK, BEGIN, END = "\ufdd0", "\ufdd1", "\ufdd2"
Encoded = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered conversation: one control token, or plain text."""

    text: str
    control: bool
    learn: bool


class ChatTemplate:
    """Any chat template with `{% generation %}` marks around what the assistant writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            where = f"{tokenizer.folder}/chat_template.jinja"
            raise ValueError("the tokenizer has no chat template", where, f"put one there, e.g. a copy of data/{CHATML.name}")
        self.tokenizer = tokenizer
        self._template = _compiled(tokenizer.chat_template)
        self._marked = re.search(r"{%[-+]?\s*generation\b", tokenizer.chat_template) is not None
        longest_first = sorted(tokenizer.control_ids, key=len, reverse=True)
        self._seams = re.compile("|".join([BEGIN, END, *map(re.escape, longest_first)]))

    def encode(self, messages: Any, tools: Any = None, where: str = "messages") -> Encoded:
        """(ids, learn): learn[t] where token t is the assistant's, which includes the token that ends the turn."""
        return self.encode_batch([(messages, tools, where)])[0]

    def encode_batch(self, chats: Iterable[tuple[Any, Any, str]]) -> list[Encoded]:
        """`encode` of many (messages, tools, where), in one call of the tokenizer."""
        if not self._marked:
            raise ValueError(
                "the chat template does not mark what the assistant writes",
                f"{self.tokenizer.folder}/chat_template.jinja",
                "put {% generation %} ... {% endgeneration %} around the assistant's words and their end token",
            )
        return self._assemble([self._pieces(messages, tools, where, add_generation_prompt=False) for messages, tools, where in chats])

    def prompt(self, messages: Any, tools: Any = None, where: str = "messages") -> list[int]:
        """The conversation up to where the assistant's next words begin."""
        return self._assemble([self._pieces(messages, tools, where, add_generation_prompt=True)])[0][0]

    def _pieces(self, messages: Any, tools: Any, where: str, add_generation_prompt: bool) -> list[Piece]:
        messages, tools = check_chat(messages, tools, where)
        try:
            rendered = self._template.render(
                messages=[self._shield(message, where, self._breakable(message)) for message in messages],
                tools=self._shield(tools, where, self._breakable({})),
                add_generation_prompt=add_generation_prompt,
                **self.tokenizer.named,
            )
        except TemplateError as error:
            fix = f"change the conversation, or {self.tokenizer.folder}/chat_template.jinja"
            raise ValueError(f"the chat template refuses the conversation: {error}", where, fix) from error
        return self._cut(rendered)

    def _breakable(self, message: dict) -> Iterable[str]:
        """The assistant may write its own tags (<think>), but nobody ends or opens a turn from inside one."""
        return self.tokenizer.special if message.get("role") == "assistant" else self.tokenizer.control_ids

    def _shield(self, value: Any, where: str, control: Iterable[str]) -> Any:
        if isinstance(value, dict):
            return {self._shield(key, where, control): self._shield(item, where, control) for key, item in value.items()}
        if isinstance(value, list):
            return [self._shield(item, where, control) for item in value]
        if not isinstance(value, str):
            return value
        if any(mark in value for mark in (BREAK, BEGIN, END)):
            raise ValueError("the text holds one of U+FDD0 to U+FDD2, noncharacters that Unicode sets aside for programs", where, "take them out")
        for token in control:
            value = value.replace(token, token[0] + BREAK + token[1:])
        return value

    def _cut(self, rendered: str) -> list[Piece]:
        pieces, learn, start = [], False, 0
        for seam in [*self._seams.finditer(rendered), None]:
            stop = seam.start() if seam else len(rendered)
            if text := rendered[start:stop].replace(BREAK, ""):
                pieces.append(Piece(text, False, learn))
            if seam is None:
                break
            start = seam.end()
            if seam[0] in (BEGIN, END):
                learn = seam[0] == BEGIN
            else:
                pieces.append(Piece(seam[0], True, learn))
        return pieces

    def _assemble(self, chats: list[list[Piece]]) -> list[Encoded]:
        texts = list({piece.text: None for pieces in chats for piece in pieces if not piece.control})  # each once: "user\n" comes often
        known = dict(zip(texts, self.tokenizer.encode_batch(texts), strict=True))
        encoded: list[Encoded] = []
        for pieces in chats:
            ids: list[int] = []
            learn: list[bool] = []
            for piece in pieces:
                piece_ids = [self.tokenizer.control_ids[piece.text]] if piece.control else known[piece.text]
                ids += piece_ids
                learn += [piece.learn] * len(piece_ids)
            encoded.append((ids, learn))
        return encoded


class _Generation(Extension):
    """`{% generation %}` as in transformers: leaves a mark before and after what stands inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
        return [begin, *body, end]


@functools.lru_cache
def _compiled(source: str) -> Any:
    """A template comes with a tokenizer somebody else made: it runs sandboxed, with the helpers templates expect and no others."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template does not compile: {error}", "chat_template.jinja", "mend the template of the tokenizer") from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """JSON for a model, not for a web page: jinja's own filter would write < as \\u003c."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent).replace(json.dumps(BREAK)[1:-1], BREAK)


def _raise(message: str) -> None:
    raise TemplateError(message)
