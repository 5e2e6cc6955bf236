"""Chat templates in a process with limits: what ends them, what they cost, and that the process neither survives nor is
shared.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from data.tokenize.templates import renderer
from data.tokenize.templates.renderer import ConversationRenderer, KnownTemplate, RenderProcess, open_template

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
SOURCE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '>' if add_generation_prompt }}"
NESTED = "{% for a in range(100000) %}{% for b in range(100000) %}{{ ('x ' * 100000) | wordwrap(1) | length }}{% endfor %}{% endfor %}"


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(renderer, "MAX_SECONDS", 0.3)
    renderer.open_process.cache_clear()
    yield
    renderer.open_process.cache_clear()


def conversation(
    template: RenderProcess | KnownTemplate, messages: list[dict[str, Any]] = MESSAGES, **variables: Any
) -> ConversationRenderer:
    return ConversationRenderer(template, {"messages": messages, **variables})


def test_rendering_in_a_process_gives_the_same_texts() -> None:
    known, process = open_template(SOURCE, is_known=True), open_template(SOURCE, is_known=False)
    assert isinstance(known, KnownTemplate) and isinstance(process, RenderProcess)
    messages = [{"role": "user", "content": "é\u4f60\ud800\n\ufdd0\x00"}, *MESSAGES]
    for count, prompt in ((3, False), (2, True), (0, True)):
        texts = [conversation(each, messages).render(count, add_generation_prompt=prompt) for each in (known, process)]
        assert texts[0] == texts[1] and texts[0].endswith(">" if prompt else "]")


def test_conversations_rendered_together_are_not_exchanged() -> None:
    process = RenderProcess(SOURCE)
    both = [
        ConversationRenderer(process, {"messages": [{"role": "user", "content": text}]}, [(1, {}), (0, {})])
        for text in "ab"
    ]
    ConversationRenderer.render_together(both)
    pid = process._process.pid if process._process else 0
    os.kill(pid, signal.SIGKILL)  # the texts have been rendered
    assert [(each.render(1), each.render(0)) for each in both] == [("[a]", ""), ("[b]", "")]


@pytest.mark.parametrize(
    "source, reason",
    [
        (NESTED, "too long"),
        ("{{ '%0999999999d' % 1 }}", "memory"),
        (
            "{% set n = namespace(x=[]) %}{% for a in range(1000) %}{% set n.x = n.x + [('x ' * 1000000).split()] %}{% endfor %}",
            "memory|too long",
        ),
        ("{{ 'x' * 9000000 }}", "9,000,007 characters"),
    ],
    ids=["time", "memory of a constant", "memory of a list", "text"],
)
def test_rendering_is_ended_at_a_limit_and_the_next_one_works(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        conversation(RenderProcess(source + SOURCE)).render(1)
    process = RenderProcess("{% if messages[0].content == 'slow' %}" + NESTED + "{% endif %}" + SOURCE)
    with pytest.raises(TemplateError, match="too long"):
        conversation(process, [{"role": "user", "content": "slow"}]).render(1)
    process._budget = renderer.MAX_SECONDS
    assert conversation(process).render(1) == "[hello]"


def test_slow_template_is_ended_sooner_at_each_row() -> None:
    process = RenderProcess(NESTED)
    for _ in range(3):
        with pytest.raises(TemplateError, match="too long"):
            conversation(process).render(1)
    assert process._budget < 0.1 * renderer.MAX_SECONDS


def test_large_conversation_of_a_known_template_is_rendered_in_a_process() -> None:
    known = open_template(SOURCE, is_known=True)
    assert isinstance(conversation(known, MESSAGES * 600)._template, RenderProcess)
    assert isinstance(conversation(known, [{"role": "user", "content": "x" * 2_000_000}])._template, RenderProcess)
    assert conversation(known)._template is known


def test_render_process_ends_with_its_template_and_survives_no_fork() -> None:
    process = RenderProcess(SOURCE)
    child = process._process
    assert child is not None and conversation(process).render(1) == "[hello]"
    if not (pid := os.fork()):
        is_right = conversation(process).render(2) == "[hello][hi]" and process._process is not child
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert conversation(process).render(2) == "[hello][hi]" and child.poll() is None
    del process
    gc.collect()
    assert child.poll() is not None


def test_render_process_ends_when_the_one_that_started_it_is_killed(tmp_path: Path) -> None:
    if not (pid := os.fork()):
        process = RenderProcess(SOURCE)
        assert process._process is not None
        (tmp_path / "pid").write_text(str(process._process.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 300
    while Path(f"/proc/{child}/stat").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_render_process_gets_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    process = RenderProcess(SOURCE)
    assert (
        process._process is not None and b"HF_TOKEN" not in Path(f"/proc/{process._process.pid}/environ").read_bytes()
    )
