"""Process that compiles one chat template and renders conversations with it, within limits that the kernel holds.

The sandbox counts steps and characters, but one step may take any time: a single filter or number format runs in C. So
the operating system ends this process: at RLIMIT_AS bytes of memory, and by SIGPROF after the seconds of processor time
that each request grants. It can start no process and write no file. The requests come from renderer.py; each line of
JSON is answered with one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from typing import Any

from jinja2 import TemplateError

from data.tokenize.templates.jinja_sandbox import compile_template

MAX_MEMORY = 512 << 20  # bytes of the process; Python and Jinja need 40 MB of them
MAX_ERROR_CHARACTERS = 500
OUT_OF_MEMORY = f"it needs more than {MAX_MEMORY >> 20} MiB of memory"


def answer_requests() -> None:
    """Answer the requests on stdin until it is closed."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that prints can garble the replies
    set_limits()
    render: Any = None
    conversation: dict[str, Any] = {}
    for line in requests:
        started = time.process_time()
        try:
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
            if "source" in request:
                render = compile_template(request["source"])
            reply: dict[str, Any] = {"texts": []}
            for variables, renderings in request.get("conversations", ()):
                conversation = variables or conversation  # null: that of the request before
                reply["texts"].append([_render(render, conversation, count, options) for count, options in renderings])
        except TemplateError as error:
            reply = {"error": _describe(error)}
        except MemoryError:
            reply = {"error": OUT_OF_MEMORY}
        answer = _encode(reply, started)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(answer)
        replies.flush()


def set_limits() -> None:
    """Limit memory; allow no core dump, no file and no process."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))


def _render(render: Any, conversation: dict[str, Any], count: int, options: dict[str, Any]) -> list[str | None]:
    """Return [text, None] or [None, error]: what a template refuses may be a rendering that is not needed."""
    try:
        return [render(**{**conversation, "messages": conversation["messages"][:count]}, **options), None]
    except TemplateError as error:
        return [None, _describe(error)]


def _describe(error: TemplateError) -> str:
    return OUT_OF_MEMORY if isinstance(error.__cause__, MemoryError) else str(error)[:MAX_ERROR_CHARACTERS]


def _encode(reply: dict[str, Any], started: float) -> bytes:
    reply["seconds"] = time.process_time() - started
    try:
        return json.dumps(reply).encode() + b"\n"
    except MemoryError:
        return json.dumps({"error": OUT_OF_MEMORY, "seconds": reply["seconds"]}).encode() + b"\n"


if __name__ == "__main__":
    answer_requests()
