"""Conversations as a chat template renders them: a template that this program knows in this process, any other one in a
process with limits.

An unknown template may compute for years or fill the memory within one filter. Templates of this program, known by
their sha256, do neither; a conversation that is unusually large is rendered in a process with limits nevertheless,
because its text is not known.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError

from common.paths import REPO_ROOT
from data.tokenize.jinja_sandbox import Rendered, compile_template, render_prefix
from data.tokenize.training_version import template_sha256
from data.types import BadRowError

MAX_SECONDS = 3.0  # processor time of one conversation, and of all that exceed the rate below
# several times those of public templates
SECONDS_PER_RENDERING, SECONDS_PER_MESSAGE, SECONDS_PER_CHARACTER = 1e-3, 5e-6, 1e-7
TOGETHER_SECONDS = 0.5  # of several conversations; if they take longer, each is rendered by itself
WALL_SECONDS = 30.0  # until a process that does not compute is given up
MAX_REPLY = 1 << 28  # bytes
MAX_TEXT, MAX_TEXT_RATIO = 1 << 20, 4  # characters of a rendering: MAX_TEXT and this multiple of the conversation
MAX_KNOWN_MESSAGES, MAX_KNOWN_CHARACTERS = 1000, 1 << 20  # of a conversation that is rendered in this process
TOO_SLOW = "it takes too long: more than {seconds:g} seconds of processor time"
PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH")
SHIPPED = ("data/tokenize/chatml.jinja", "data/samples/tokenizer/chat_template.jinja")
Rendering = tuple[Any, ...]  # (number of messages, whether with the generation prompt, *options: (name, value))
Request = tuple[dict[str, Any], Sequence[Rendering]]  # (variables, what to render)


class Template(NamedTuple):
    source: str
    path: str  # its file, for messages
    is_known: bool  # to this program, by its sha256

    def check(self) -> None:
        """Raise TemplateError if it does not compile."""
        if self.is_known:
            compile_template(self.source)
        else:
            open_process(self.source)


@dataclass(eq=False)
class Conversation:
    """One conversation as a template renders it: each of its prefixes once.

    `messages` and `tools` are those of the row; the template gets those of `variables`, where control tokens are masked.
    """

    template: Template
    messages: list[dict]
    tools: list[dict] | None
    variables: dict[str, Any]
    where: str

    def __post_init__(self) -> None:
        messages = self.messages
        characters = sum(len(message["content"] or "") for message in messages)
        is_small = len(messages) <= MAX_KNOWN_MESSAGES and characters <= MAX_KNOWN_CHARACTERS
        self.process = None if self.template.is_known and is_small else open_process(self.template.source)
        self._allowance = (
            SECONDS_PER_RENDERING + SECONDS_PER_MESSAGE * len(messages) + SECONDS_PER_CHARACTER * characters
        )
        self._rendered: dict[Rendering, Rendered] = {}
        self._seconds = 0.0

    @cached_property
    def text(self) -> str:
        """The text of all messages."""
        return self.render(len(self.messages))

    def render(self, count: int, prompt: bool = False, **options: bool) -> str:
        """Return the text of the first `count` messages, with the generation prompt if `prompt`.

        Raises BadRowError if the template refuses them.
        """
        rendering = (count, prompt, *options.items())
        try:
            if rendering not in self._rendered:
                self._rendered[rendering] = self._render(rendering)
            text, error = self._rendered[rendering]
            if text is None:
                raise TemplateError(error)
            if len(text) > MAX_TEXT and len(text) > MAX_TEXT + MAX_TEXT_RATIO * self._count_characters():
                message = f"it writes {len(text):,} characters for a conversation of {self._count_characters():,}"
                raise TemplateError(message)
        except TemplateError as error:
            part = (
                ""
                if count == len(self.messages)
                else f" when it gets the first {count} of {len(self.messages)} messages"
            )
            message = f"the chat template rejects the conversation{part}: {error}"
            fix = f"change the conversation, or {self.template.path}"
            raise BadRowError("rejected by the chat template", message, self.where, fix) from error
        return text

    def _count_characters(self) -> int:
        """Return the number of characters of the conversation, with its tools and calls."""
        return len(json.dumps(self.variables, default=str))

    def _render(self, rendering: Rendering) -> Rendered:
        if self.process is None:
            return render_prefix(compile_template(self.template.source), self.variables, *rendering)
        requests: list[Request] = [(self.variables, [rendering])]
        seconds, [[rendered]] = self.process.render(requests, self._allowance, MAX_SECONDS - self._seconds)
        self._seconds += seconds
        return rendered

    @staticmethod
    def render_together(conversations: Sequence[Conversation], expected: Sequence[Sequence[Rendering]]) -> None:
        """Render what is expected of each of several conversations, with one unknown template, by one request.

        If that fails, it is not charged to the budget, and each is rendered when it is asked for.
        """
        if not conversations or (process := conversations[0].process) is None:
            return
        pairs, budget = list(zip(conversations, expected, strict=True)), process._budget
        allowance = sum(each._allowance * len(renderings) for each, renderings in pairs)
        requests: list[Request] = [(each.variables, renderings) for each, renderings in pairs]
        try:
            _, texts = process.render(requests, allowance, TOGETHER_SECONDS)
        except TemplateError:
            process._budget = budget
            return
        for (each, renderings), rendered in zip(pairs, texts, strict=True):
            each._rendered.update(zip(renderings, rendered, strict=True))


class RenderProcess:
    """One template in a process with limits (jinja_sandbox.py), which is started again after it was ended at a limit."""

    def __init__(self, source: str) -> None:
        self.source = source
        # seconds that the renderings of all conversations may take, refilled by each of them
        self._budget = MAX_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def render(
        self, requests: list[Request], allowance: float, seconds_left: float
    ) -> tuple[float, list[list[Rendered]]]:
        """Return (seconds of processor time, the texts or errors of each request).

        `allowance`: seconds that are usual for them.
        """
        self._budget = min(MAX_SECONDS, self._budget + allowance)
        if self._process is None or self._owner != os.getpid():  # a forked process must not share the connection
            self._start()
        reply = self._ask({"conversations": requests}, min(self._budget, seconds_left))
        return reply["seconds"], reply["texts"]

    def _start(self) -> None:
        """Start the process and compile the template in it."""
        self._owner = os.getpid()
        self._connection, end = socket.socketpair()
        self._connection.settimeout(WALL_SECONDS)
        # A process group of its own: Ctrl-C goes to this process, which closes the connection.
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "data.tokenize.jinja_sandbox"],
                stdin=end.fileno(),
                stdout=end.fileno(),
                stderr=subprocess.DEVNULL,
                env=limited_environment(),
                process_group=0,
            )
        weakref.finalize(self, _kill, self._process, self._connection, self._owner)
        self._ask({"source": self.source}, MAX_SECONDS)

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            line = json.dumps({**request, "seconds": max(seconds, 0.001)}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:  # e.g. a date of a Parquet file
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        answer = bytearray()
        with suppress(OSError):  # it has ended, or does not answer for WALL_SECONDS
            self._connection.sendall(line)
            while not answer.endswith(b"\n") and len(answer) <= MAX_REPLY and (part := self._connection.recv(1 << 20)):
                answer += part
        if not answer.endswith(b"\n"):
            raise self._end_process(seconds)
        reply: dict[str, Any] = json.loads(answer)
        self._budget -= reply["seconds"]
        if "error" in reply:
            raise TemplateError(reply["error"])
        return reply

    def _end_process(self, seconds: float) -> TemplateError:
        """Return why the process does not answer; the next request starts another one."""
        process = self._process
        assert process is not None
        _kill(process, self._connection, self._owner)
        self._process = None
        self._budget = max(0.0, self._budget - seconds)
        if process.returncode == -signal.SIGPROF:
            return TemplateError(TOO_SLOW.format(seconds=MAX_SECONDS))
        if process.returncode == -signal.SIGKILL:
            return TemplateError(
                f"the process that renders it was killed, or has not answered for {WALL_SECONDS:g} seconds"
            )
        return TemplateError(
            f"the process that renders it has ended with exit code {process.returncode}: it exceeds the stack or the memory"
        )


def _kill(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    """End the process, if this is the process that started it."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
        connection.close()


def limited_environment() -> dict[str, str]:
    """Return the environment of a process with limits: no secret is passed on."""
    env = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return env | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


open_process = lru_cache(8)(RenderProcess)


@cache
def shipped_templates() -> frozenset[str]:
    """Return the sha256 of the templates that come with this program."""
    files = (REPO_ROOT / name for name in SHIPPED)
    return frozenset(template_sha256(file.read_text(encoding="utf-8")) for file in files if file.is_file())


def is_shipped(source: str) -> bool:
    return template_sha256(source) in shipped_templates()
