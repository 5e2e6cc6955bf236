"""Sandbox for chat templates: Jinja with the helpers that templates expect, and limits on the steps and the size of a
rendering.

A template comes with a third-party tokenizer. It cannot access anything outside (Jinja's sandbox), it renders the same
text on every day and in every process (no clock, no random numbers), and it can neither loop without end nor fill the
memory. Control tokens in the texts of messages are masked before rendering; `appears_in` checks that a text is in the
rendered output.
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

from data.errors import BadRowError

# Unicode noncharacters are reserved for use within programs, so exchanged text does not have them.
BREAK, BEGIN, END = PRIVATE_USE = ("\ufdd0", "\ufdd1", "\ufdd2")
# tags and switches in contents, which templates parse, rewrite or drop
THINK_TAGS = re.compile(r"</?think>|/(?:no_)?think\b")
MAX_STEPS = 1_000_000  # loop iterations and macro calls of a rendering, about one second
MAX_CHARACTERS = 2**25  # of a rendering, and of any text that is built for it
TODAY = date(2024, 7, 26)  # the date of a rendering: the one that Llama 3's template uses without a clock


class _Generation(Extension):
    """`{% generation %}` as in transformers: writes a mark before and after its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
        return [begin, *body, end]


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Counts loop iterations and macro calls as steps of the rendering, and limits the size of texts."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        repeated: list[Any] = [
            node for kind in (nodes.For, nodes.Macro, nodes.CallBlock) for node in source.find_all(kind)
        ]
        for node in repeated:
            step = nodes.Filter(nodes.ContextReference(), "step", [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
        for concat in source.find_all(nodes.Concat):
            concat.nodes = [
                nodes.Filter(node, "bounded", [], [], None, None, lineno=concat.lineno) for node in concat.nodes
            ]
        for number in source.find_all(nodes.Const):
            _check_size(number.value if isinstance(number.value, int) else 0)
        return super()._generate(source, *rest, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            return _bounded(left + right)
        if operator == "**":
            raise TemplateError("the operator ** is not supported")
        _check_size(_size(left) * _size(right))
        return left * right


def _step(context: Context) -> None:
    if next(context.parent["_steps"], None) is None:
        raise TemplateError(f"it takes more than {MAX_STEPS:,} steps")


def _size(value: Any) -> float:
    return value if isinstance(value, (int, float)) else len(value)


def _check_size(size: float) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateError(f"it produces a text of more than {MAX_CHARACTERS:,} characters")


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list)):
        _check_size(len(value))
    return value


@functools.lru_cache
def compile_template(source: str) -> Callable[..., str]:
    """Return a function from the template's variables to the rendered text.

    Any error in the template is raised as TemplateError.
    """
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters |= {"tojson": tojson, "bounded": _bounded, "step": _step}
    environment.globals |= {"raise_exception": _raise, "strftime_now": TODAY.strftime}
    del environment.globals["lipsum"], environment.filters["random"]  # random text
    try:
        template = environment.from_string(source)
    except Exception as error:
        raise TemplateError(str(error)) from error

    def render(**variables: Any) -> str:
        parts, size = [], 0
        try:
            for part in template.generate(**variables, _steps=iter(range(MAX_STEPS))):
                size += len(part)
                _check_size(size)
                parts.append(part)
        except TemplateError:
            raise
        except Exception as error:  # a template is a program: it may raise any exception
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return "".join(parts)

    return render


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model, not for a web page: Jinja's own filter writes < as \\u003c."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(json.dumps(BREAK)[1:-1], BREAK)


def _raise(message: str) -> None:
    raise TemplateError(message)


def mask_control_tokens(value: Any, control: re.Pattern[str], where: str) -> Any:
    """Return `value` with a private character inside every `control` token of its strings.

    Raises BadRowError if a string has one already.
    """
    if isinstance(value, dict):
        return {
            mask_control_tokens(key, control, where): mask_control_tokens(item, control, where)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [mask_control_tokens(item, control, where) for item in value]
    if not isinstance(value, str):
        return value
    if any(mark in value for mark in PRIVATE_USE):
        message = "the text has one of U+FDD0 to U+FDD2, noncharacters that Unicode reserves for programs"
        raise BadRowError("private characters", message, where, "delete them")
    while control.search(value):  # again, if a masked token still ends in another one
        value = control.sub(lambda token: token[0][0] + BREAK + token[0][1:], value)
    return value


def unmask_control_tokens(text: str) -> str:
    """Return the text without private characters."""
    return text.translate(dict.fromkeys(map(ord, PRIVATE_USE)))


def appears_in(text: str, rendered: str, with_reasoning: bool = True) -> bool:
    """Return whether `text` is in `rendered`, apart from white space at its ends, or as a JSON string.

    Without `with_reasoning`, the part before the last think tag may be missing.
    """
    if text.strip() in rendered:
        return True
    parts = [part.strip() for part in THINK_TAGS.split(text)][0 if with_reasoning else -1 :]
    return all(
        part in rendered or any(tojson(part, ensure_ascii=ascii_only)[1:-1] in rendered for ascii_only in (False, True))
        for part in parts
    )
