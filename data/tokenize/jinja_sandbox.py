"""Sandbox for chat templates, and the process with limits that renders those of unknown origin.

A template comes with a third-party tokenizer. In Jinja's sandbox it cannot access anything outside, and it renders the
same text on every day and in every process (no clock, no random numbers).

It may still compute for years, or fill the memory, within a single filter or number format. So an unknown template runs
in a process of its own (`python -m data.tokenize.jinja_sandbox`), which the operating system ends: at
RLIMIT_AS bytes of memory, and by SIGPROF after the seconds of processor time that each request grants. The process can
start no process and write no file. The requests come from renderer.py; each line of JSON is answered with one line of
JSON.

Control tokens in the texts of messages are masked before rendering; `appears_in` checks that a text is in the rendered
output.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.limits import limit_process
from data.types import BadRowError

# Unicode noncharacters are reserved for use within programs, so exchanged text does not have them.
BREAK, BEGIN, END = PRIVATE_USE = ("\ufdd0", "\ufdd1", "\ufdd2")
# tags and switches in contents, which templates parse, rewrite or drop
THINK_TAGS = re.compile(r"</?think>|/(?:no_)?think\b")
TODAY = date(2024, 7, 26)  # the date of a rendering: the one that Llama 3's template uses without a clock
MAX_MEMORY = 512 << 20  # bytes of the process; Python and Jinja need 40 MB of them
MAX_ERROR_CHARACTERS = 500
OUT_OF_MEMORY = f"it needs more than {MAX_MEMORY >> 20} MiB of memory"
Rendered = list[str | None]  # [text, None], or [None, error]
CompiledTemplate = Callable[..., str]  # from the variables to the text; raises TemplateError


class _Generation(Extension):
    """`{% generation %}` as in transformers: writes a mark before and after its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
        return [begin, *body, end]


@functools.lru_cache
def compile_template(source: str) -> CompiledTemplate:
    """Compile a template. Any error in it is raised as TemplateError, here and when it renders."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": TODAY.strftime}
    del environment.globals["lipsum"], environment.filters["random"]  # random text
    try:
        template = environment.from_string(source)
    except Exception as error:
        raise TemplateError(str(error)) from error

    def render(**variables: Any) -> str:
        try:
            return template.render(**variables)
        except TemplateError:
            raise
        except Exception as error:  # a template is a program: it may raise any exception
            raise TemplateError(f"{type(error).__name__}: {error}") from error

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


def render_prefix(
    template: CompiledTemplate, variables: dict[str, Any], count: int, prompt: bool, *options: tuple[str, bool]
) -> Rendered:
    """Render the first `count` messages, with the generation prompt if `prompt`.

    The error is returned: what a template refuses may be a rendering that is not needed.
    """
    changed = {"messages": variables["messages"][:count], "add_generation_prompt": prompt, **dict(options)}
    try:
        return [template(**{**variables, **changed}), None]
    except TemplateError as error:
        return [None, _describe(error)]


def _describe(error: TemplateError) -> str:
    return OUT_OF_MEMORY if isinstance(error.__cause__, MemoryError) else str(error)[:MAX_ERROR_CHARACTERS]


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


def answer_requests() -> None:
    """Answer the requests on stdin until it is closed: compile a template, render conversations with it."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that prints can garble the replies
    limit_process(MAX_MEMORY)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    template: Any = None
    for line in requests:
        started = time.process_time()
        try:
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
            if "source" in request:
                template = compile_template(request["source"])
            texts = [
                [render_prefix(template, variables, *rendering) for rendering in renderings]
                for variables, renderings in request.get("conversations", ())
            ]
            answer = _encode({"texts": texts}, started)
        except TemplateError as error:
            answer = _encode({"error": _describe(error)}, started)
        except MemoryError:
            answer = _encode({"error": OUT_OF_MEMORY}, started)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(answer)
        replies.flush()


def _encode(reply: dict[str, Any], started: float) -> bytes:
    return json.dumps({**reply, "seconds": time.process_time() - started}).encode() + b"\n"


if __name__ == "__main__":
    answer_requests()
