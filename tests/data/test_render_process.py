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

from data.tokenize import renderer
from data.tokenize.renderer import Conversation, RenderProcess, Template, open_process
from data.types import BadRowError

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
SOURCE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '>' if add_generation_prompt }}"
# with a variable: Jinja computes a constant when it compiles, in most of the short limit
NESTED = "{% for a in range(100000) %}{% for b in range(100000) %}{{ ('x ' * (100000 + b)) | wordwrap(1) | length }}{% endfor %}{% endfor %}"


HOSTILE = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "nested loops with output": "{% for a in range(100000) %}{% for b in range(100000) %}spam{% endfor %}{% endfor %}",
    "macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion of a macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless recursion of a loop": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "repeated text": "{{ 'spam' * 1000000000 }}",
    "repeated list": "{{ [0] * 1000000000 }}",
    "text doubled by +": "{% set n = namespace(x='spam') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "text doubled by ~": "{% set n = namespace(x='spam') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "padded text": "{{ 'spam' | center(1000000000) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "long range": "{{ range(1000000000) | list }}",
    "access to classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "include of a file": "{% include '/etc/passwd' %}",
}


def pid_of(process: RenderProcess) -> int:
    assert process._process is not None
    return process._process.pid


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(renderer, "MAX_SECONDS", 0.3)
    renderer.open_process.cache_clear()
    yield
    renderer.open_process.cache_clear()


def conversation(
    source: str,
    messages: list[dict[str, Any]] = MESSAGES,
    is_known: bool = False,
) -> Conversation:
    template = Template(source, "chat_template.jinja", is_known)
    return Conversation(template, messages, None, {"messages": messages}, "row")


@pytest.mark.slow
def test_rendering_in_a_process_gives_the_same_texts() -> None:
    messages = [{"role": "user", "content": "é\u4f60\ud800\n\ufdd0\x00"}, *MESSAGES]
    known, process = conversation(SOURCE, messages, is_known=True), conversation(SOURCE, messages)
    assert known.process is None and isinstance(process.process, RenderProcess)
    for count, prompt in ((3, False), (2, True), (0, True)):
        texts = [each.render(count, prompt=prompt) for each in (known, process)]
        assert texts[0] == texts[1] and texts[0].endswith(">" if prompt else "]")


def test_conversations_rendered_together_are_not_exchanged() -> None:
    both = [conversation(SOURCE, [{"role": "user", "content": text}]) for text in "ab"]
    Conversation.render_together(both, [[(1, False), (0, True)]] * 2)
    os.kill(pid_of(open_process(SOURCE)), signal.SIGKILL)  # the texts have been rendered
    assert [(each.text, each.render(0, prompt=True)) for each in both] == [("[a]", ">"), ("[b]", ">")]


@pytest.mark.slow
def test_failed_rendering_of_several_conversations_costs_no_time() -> None:
    slow = "{% if messages[0].content == 'slow' %}" + NESTED + "{% endif %}" + SOURCE
    both = [conversation(slow), conversation(slow, [{"role": "user", "content": "slow"}])]
    budget = open_process(slow)._budget
    Conversation.render_together(both, [[(1, False)] * 100] * 2)
    assert open_process(slow)._budget == budget and both[0].render(1) == "[hello]"


@pytest.mark.parametrize(
    "source, reason",
    [
        (NESTED, "too long"),
        pytest.param("{{ '%0999999999d' % 1 }}", "memory", marks=pytest.mark.slow),
        pytest.param(
            "{% set n = namespace(x=[]) %}{% for a in range(1000) %}{% set n.x = n.x + [('x ' * 1000000).split()] %}{% endfor %}",
            "memory|too long",
            marks=pytest.mark.slow,
        ),
        pytest.param("{{ 'x' * 9000000 }}", "9,000,007 characters", marks=pytest.mark.slow),
    ],
    ids=["time", "memory of a constant", "memory of a list", "text"],
)
def test_rendering_is_ended_at_a_limit_and_the_next_one_works(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((BadRowError, TemplateError), match=reason):  # TemplateError: while it is compiled
        conversation(source + SOURCE).render(1)
    slow = "{% if messages[0].content == 'slow' %}" + NESTED + "{% endif %}" + SOURCE
    with pytest.raises(BadRowError, match="too long"):
        conversation(slow, [{"role": "user", "content": "slow"}]).render(1)
    monkeypatch.setattr(renderer, "MAX_SECONDS", 60.0)  # of a busy machine
    open_process(slow)._budget = renderer.MAX_SECONDS
    assert conversation(slow).render(1) == "[hello]"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name, marks=() if number % 2 else pytest.mark.slow)
        for number, (name, source) in enumerate(HOSTILE.items())
    ],
)
def test_hostile_template_is_refused(source: str) -> None:
    with pytest.raises((BadRowError, TemplateError)):
        conversation(source).render(1)


@pytest.mark.slow
def test_slow_template_is_ended_sooner_at_each_row() -> None:
    for _ in range(3):
        with pytest.raises(BadRowError, match="too long"):
            conversation(NESTED).render(1)
    assert open_process(NESTED)._budget < 0.1 * renderer.MAX_SECONDS


def test_large_conversation_of_a_known_template_is_rendered_in_a_process() -> None:
    for messages in (MESSAGES * 600, [{"role": "user", "content": "x" * 2_000_000}]):
        assert isinstance(conversation(SOURCE, messages, is_known=True).process, RenderProcess)
    assert conversation(SOURCE, is_known=True).process is None


def test_render_process_ends_with_its_template_and_survives_no_fork() -> None:
    process = open_process(SOURCE)
    child = process._process
    assert child is not None and conversation(SOURCE).render(1) == "[hello]"
    if not (pid := os.fork()):
        is_right = conversation(SOURCE).render(2) == "[hello][hi]" and process._process is not child
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert conversation(SOURCE).render(2) == "[hello][hi]" and child.poll() is None
    del process
    open_process.cache_clear()
    gc.collect()
    assert child.poll() is not None


def test_render_process_ends_when_the_one_that_started_it_is_killed(tmp_path: Path) -> None:
    if not (pid := os.fork()):
        (tmp_path / "pid").write_text(str(pid_of(open_process(SOURCE))))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 300
    while Path(f"/proc/{child}/stat").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_render_process_gets_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    environment = Path(f"/proc/{pid_of(open_process(SOURCE))}/environ").read_bytes()
    assert b"PATH" in environment and b"HF_TOKEN" not in environment
