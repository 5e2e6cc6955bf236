"""Where a chat template runs: Jinja with the helpers that templates expect, and with an end to every rendering.

A template comes with a tokenizer somebody else made. It reaches nothing outside (Jinja's sandbox), it renders the same
text on every day and in every process (no clock, no dice), and it can neither turn in circles nor fill the memory.
What goes in is shielded first, so that words of people come out as words; that they came out at all is seen here, too.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from datetime import date
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.schemas.errors import BadRowError

# Unicode noncharacters: set aside for use inside programs, so no text that is exchanged holds them.
BREAK, BEGIN, END = PRIVATE_USE = ("\ufdd0", "\ufdd1", "\ufdd2")
PRIVATE_USE_CHARACTERS = re.compile(r"</?think>|/(?:no_)?think\b")  # tags and switches in contents, which templates read and write anew, or not at all
MAX_STEPS = 1_000_000  # turns of loops and calls of macros in one rendering, about a second's worth
MAX_CHARACTERS = 2**25  # of a rendering, and of any text that is put together on the way
TODAY = date(2024, 7, 26)  # what "today" is to a template: the day that Llama 3's names where it finds no clock


class _Generation(Extension):
    """`{% generation %}` as in transformers: leaves a mark before and after what stands inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
        return [begin, *body, end]


class _Bounded(ImmutableSandboxedEnvironment):
    """Each turn of a loop and each call of a macro takes one of the rendering's steps; text does not grow without end."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        circles: list[Any] = [node for kind in (nodes.For, nodes.Macro, nodes.CallBlock) for node in source.find_all(kind)]
        for circle in circles:
            step = nodes.Filter(nodes.ContextReference(), "step", [], [], None, None)
            circle.body.insert(0, nodes.ExprStmt(step).set_lineno(circle.lineno))
        for joined in source.find_all(nodes.Concat):
            joined.nodes = [nodes.Filter(node, "bounded", [], [], None, None, lineno=joined.lineno) for node in joined.nodes]
        for number in source.find_all(nodes.Const):
            _bound(number.value if isinstance(number.value, int) else 0)
        return super()._generate(source, *rest, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            return _bounded(left + right)
        if operator == "**":
            raise TemplateError("a template of words needs no powers")
        _bound(_size(left) * _size(right))
        return left * right


def _step(context: Context) -> None:
    if next(context.parent["_steps"], None) is None:
        raise TemplateError(f"it takes more than {MAX_STEPS:,} steps")


def _size(value: Any) -> float:
    return value if isinstance(value, (int, float)) else len(value)


def _bound(size: float) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list)):
        _bound(len(value))
    return value


@functools.lru_cache
def compile_template(source: str) -> Callable[..., str]:
    """A function of what the template may name, to the rendered text. Raises TemplateError whatever goes wrong in it."""
    environment = _Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters |= {"tojson": tojson, "bounded": _bounded, "step": _step}
    environment.globals |= {"raise_exception": _raise, "strftime_now": TODAY.strftime}
    del environment.globals["lipsum"], environment.filters["random"]  # text by chance
    try:
        template = environment.from_string(source)
    except Exception as error:
        raise TemplateError(str(error)) from error

    def render(**names: Any) -> str:
        parts, size = [], 0
        try:
            for part in template.generate(**names, _steps=iter(range(MAX_STEPS))):
                size += len(part)
                _bound(size)
                parts.append(part)
        except TemplateError:
            raise
        except Exception as error:  # a template is a program of its own: it may fail in any way there is
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return "".join(parts)

    return render


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON for a model, not for a web page: jinja's own filter would write < as \\u003c."""
    written = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return written.replace(json.dumps(BREAK)[1:-1], BREAK)


def _raise(message: str) -> None:
    raise TemplateError(message)


def mask_control_tokens(value: Any, control: re.Pattern[str], where: str) -> Any:
    """The value with every `control` token in its strings broken by a private character. Raises BadRow where one stands in them already."""
    if isinstance(value, dict):
        return {mask_control_tokens(key, control, where): mask_control_tokens(item, control, where) for key, item in value.items()}
    if isinstance(value, list):
        return [mask_control_tokens(item, control, where) for item in value]
    if not isinstance(value, str):
        return value
    if any(mark in value for mark in PRIVATE_USE):
        what = "the text holds one of U+FDD0 to U+FDD2, noncharacters that Unicode sets aside for programs"
        raise BadRowError("private characters", what, where, "take them out")
    while control.search(value):  # again where a broken token still ends in another one
        value = control.sub(lambda token: token[0][0] + BREAK + token[0][1:], value)
    return value


def unmask_control_tokens(text: str) -> str:
    """Without our private marks."""
    return text.translate(dict.fromkeys(map(ord, PRIVATE_USE)))


def appears_in(words: str, whole: str, thoughts: bool = True) -> bool:
    """Whether `words` are in the rendered text: but for the space at their ends, or as a JSON string. Without `thoughts`
    what comes before the last think tag may be missing."""
    if words.strip() in whole:
        return True
    parts = [part.strip() for part in PRIVATE_USE_CHARACTERS.split(words)][0 if thoughts else -1 :]
    return all(part in whole or any(tojson(part, ensure_ascii=ascii_only)[1:-1] in whole for ascii_only in (False, True)) for part in parts)
