"""Renders conversations with a chat template: one that this program knows in this process, any other one in a process
with limits.

An unknown template may compute for years or fill the memory within one filter. Templates of this program, known by
their sha256, do neither; a conversation that is unusually large is rendered in a process with limits nevertheless,
because its text is not known.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import IO, Any

from jinja2 import TemplateError

from common.paths import REPO_ROOT
from data.tokenize.templates.jinja_sandbox import MAX_CHARACTERS, compile_template

MAX_SECONDS = 3.0  # processor time of one conversation, and of all that exceed the rate below
# several times those of public templates
SECONDS_PER_RENDERING, SECONDS_PER_MESSAGE, SECONDS_PER_CHARACTER = 1e-3, 5e-6, 1e-7
TOGETHER_SECONDS = 0.5  # of several conversations; if they take longer, each is rendered by itself
WALL_SECONDS = 30.0  # until a process that does not compute is given up
MAX_REPLY = 8 * MAX_CHARACTERS  # bytes; JSON writes up to six bytes per character
MAX_TEXT, MAX_TEXT_RATIO = 1 << 20, 4  # characters of a rendering: MAX_TEXT and this multiple of the conversation
MAX_KNOWN_MESSAGES, MAX_KNOWN_CHARACTERS = 1000, 1 << 20  # of a conversation that is rendered in this process
TOO_SLOW = "it takes too long: more than {seconds:g} seconds of processor time"
PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH")
SHIPPED = ("data/tokenize/chatml.jinja", "data/samples/tokenizer/chat_template.jinja")
Rendering = tuple[int, dict[str, Any]]  # (number of messages, options: add_generation_prompt, ...)
Rendered = list[str | None]  # [text, None], or [None, error]
# (variables, None: those of the request before; what to render)
Request = tuple[dict[str, Any] | None, Sequence[Rendering]]


class TemplateLimitError(TemplateError):
    """A rendering was ended at a limit of time or memory."""


class ConversationRenderer:
    """Renders prefixes of one conversation, each once. Raises TemplateError.

    `expected`: the renderings that will be asked for, which a process with limits is asked for at once.
    """

    def __init__(
        self, template: RenderProcess | KnownTemplate, variables: dict[str, Any], expected: Sequence[Rendering] = ()
    ) -> None:
        self._template, self._variables, self._expected = template, variables, expected
        messages = variables["messages"]
        self.characters = characters = sum(len(message["content"] or "") for message in messages)
        self._allowance = (
            SECONDS_PER_RENDERING + SECONDS_PER_MESSAGE * len(messages) + SECONDS_PER_CHARACTER * characters
        )
        if isinstance(template, KnownTemplate) and (
            len(messages) > MAX_KNOWN_MESSAGES or characters > MAX_KNOWN_CHARACTERS
        ):
            self._template = open_process(template.source)
        self._rendered: dict[Any, Rendered] = {}
        self._seconds, self._is_sent = 0.0, False

    def render(self, count: int, **options: Any) -> str:
        """Return the text of the first `count` messages."""
        key = _key(count, options)
        if key not in self._rendered:
            self._render([(count, options), *(each for each in self._expected if _key(*each) != key)])
            self._expected = ()
        text, error = self._rendered[key]
        if text is None:
            raise TemplateError(error)
        if len(text) > MAX_TEXT and len(text) > MAX_TEXT + MAX_TEXT_RATIO * self._count_characters():
            raise TemplateError(
                f"it writes {len(text):,} characters for a conversation of {self._count_characters():,}"
            )
        return text

    def _count_characters(self) -> int:
        """Return the number of characters of the conversation, with its tools and calls."""
        return len(json.dumps(self._variables, default=str))

    def _render(self, renderings: list[Rendering]) -> None:
        if isinstance(self._template, KnownTemplate):
            return self._rendered.update(
                {_key(*each): self._template.render(self._variables, *each) for each in renderings[:1]}
            )
        conversation = None if self._is_sent else self._variables
        seconds, [texts] = self._template.render(
            [(conversation, renderings)], self._allowance * len(renderings), MAX_SECONDS - self._seconds
        )
        self._seconds, self._is_sent = self._seconds + seconds, True
        self._add(renderings, texts)

    def _add(self, renderings: Sequence[Rendering], texts: list[Rendered]) -> None:
        self._rendered.update({_key(*each): rendered for each, rendered in zip(renderings, texts, strict=True)})

    @staticmethod
    def render_together(conversations: Sequence[ConversationRenderer]) -> None:
        """Render what is expected of several conversations by one request.

        What fails here is rendered again when it is asked for.
        """
        processes = [each._template for each in conversations if isinstance(each._template, RenderProcess)]
        if not processes or len({id(process) for process in processes}) > 1 or len(processes) < len(conversations):
            return
        allowance = sum(each._allowance * len(each._expected) for each in conversations)
        requests: list[Request] = [(each._variables, each._expected) for each in conversations]
        with suppress(TemplateError):
            _, texts = processes[0].render(requests, allowance, TOGETHER_SECONDS, is_charged=False)
            for each, rendered in zip(conversations, texts, strict=True):
                each._add(each._expected, rendered)


class KnownTemplate:
    """A template of this program, rendered in this process."""

    def __init__(self, source: str) -> None:
        self.source, self._compiled = source, compile_template(source)

    def render(self, variables: dict[str, Any], count: int, options: dict[str, Any]) -> Rendered:
        try:
            return [self._compiled(**{**variables, "messages": variables["messages"][:count]}, **options), None]
        except TemplateError as error:
            return [None, str(error)]


class RenderProcess:
    """One template in a process with limits (render_process.py), which is started again after it was ended at a limit."""

    def __init__(self, source: str) -> None:
        self.source = source
        # seconds that the renderings of all conversations may take, refilled by each of them
        self._budget = MAX_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._conversation = os.getpid(), 0
        self._start()

    def render(
        self, requests: list[Request], allowance: float, seconds_left: float, is_charged: bool = True
    ) -> tuple[float, list[list[Rendered]]]:
        """Return (seconds of processor time, the texts or errors of each request).

        `allowance`: seconds that are usual for them. `is_charged`: whether time counts that was spent up to a limit.
        """
        self._budget = min(MAX_SECONDS, self._budget + allowance)
        if self._process is None or self._owner != os.getpid():  # a forked process must not share the pipes
            self._start()
        before = self._budget
        try:
            reply = self._ask({"conversations": requests}, min(self._budget, seconds_left))
        except TemplateLimitError:
            self._budget = self._budget if is_charged else before
            raise
        return reply["seconds"], reply["texts"]

    def _start(self) -> None:
        """Start the process and compile the template in it."""
        self._owner = os.getpid()
        # No secret of the environment is passed on.
        env = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        arguments = [sys.executable, "-P", "-m", "data.tokenize.templates.render_process"]
        # A process group of its own: Ctrl-C goes to this process, which closes the pipe.
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            process_group=0,
            bufsize=0,
        )
        weakref.finalize(self, _kill, self._process, self._owner)
        self._ask({"source": self.source}, MAX_SECONDS)

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, (
            "the process was started with pipes"
        )
        try:
            line = json.dumps({**request, "seconds": max(seconds, 0.001)}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:  # e.g. a date of a Parquet file
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        deadline = time.monotonic() + WALL_SECONDS
        answer = _write_line(process.stdin, line, deadline) and _read_line(process.stdout, deadline)
        if not answer:
            raise self._end_process(seconds)
        reply: dict[str, Any] = json.loads(answer)
        self._budget -= reply["seconds"]
        if "error" in reply:
            raise TemplateError(reply["error"])
        return reply

    def _end_process(self, seconds: float) -> TemplateLimitError:
        """Return why the process does not answer; the next request starts another one."""
        process = self._process
        assert process is not None
        _kill(process, self._owner)
        self._process = None
        self._budget = max(0.0, self._budget - seconds)
        if process.returncode == -signal.SIGPROF:
            return TemplateLimitError(TOO_SLOW.format(seconds=MAX_SECONDS))
        if process.returncode == -signal.SIGKILL:
            return TemplateLimitError(
                f"the process that renders it was killed, or has not answered for {WALL_SECONDS:g} seconds"
            )
        return TemplateLimitError(
            f"the process that renders it has ended with exit code {process.returncode}: it exceeds the stack or the memory"
        )


def _write_line(pipe: IO[bytes], line: bytes, deadline: float) -> bool:
    """Write to a process that reads whenever it has nothing to answer; return whether all was written."""
    os.set_blocking(pipe.fileno(), False)
    view = memoryview(line)
    with suppress(BrokenPipeError):
        while view:
            if not select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))[1]:
                return False
            view = view[os.write(pipe.fileno(), view) :]
        return True
    return False


def _read_line(pipe: IO[bytes], deadline: float) -> bytes:
    """Return a line; empty if the process ended, answers too much, or not in time."""
    parts, size = [], 0
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe.fileno(), 1 << 20)
        parts.append(part)
        size += len(part)
        if part.endswith(b"\n"):
            return b"".join(parts)
        if not part or size > MAX_REPLY:
            break
    return b""


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process, if this is the process that started it."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def open_template(source: str, is_known: bool) -> RenderProcess | KnownTemplate:
    """Return the template, compiled. Raises TemplateError if it cannot be compiled."""
    return _known_template(source) if is_known or is_shipped(source) else open_process(source)


@lru_cache(8)
def open_process(source: str) -> RenderProcess:
    return RenderProcess(source)


@lru_cache(8)
def _known_template(source: str) -> KnownTemplate:
    return KnownTemplate(source)


@cache
def shipped_templates() -> frozenset[str]:
    """Return the sha256 of the templates that come with this program."""
    return frozenset(
        _sha256((REPO_ROOT / name).read_text(encoding="utf-8")) for name in SHIPPED if (REPO_ROOT / name).is_file()
    )


def is_shipped(source: str) -> bool:
    return _sha256(source) in shipped_templates()


def _sha256(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()


def _key(count: int, options: dict[str, Any]) -> tuple[Any, ...]:
    return count, *options.items()
