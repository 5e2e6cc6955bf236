import time

import pytest
from jinja2 import TemplateError

from data.tokenize.jinja_sandbox import MAX_CHARACTERS, compile_template

HOSTILE = {
    "loops in loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops in loops that write": "{% for a in range(100000) %}{% for b in range(100000) %}spam{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro that calls itself for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop that calls itself": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "much text from little": "{{ 'spam' * 1000000000 }}",
    "a long list": "{{ [0] * 1000000000 }}",
    "text that doubles by +": "{% set n = namespace(x='spam') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "text that doubles by ~": "{% set n = namespace(x='spam') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "a text made wide": "{{ 'spam' | center(1000000000) }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "a long range": "{{ range(1000000000) | list }}",
    "itself from inside": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "its own counter": "{% for a in range(100000) %}{% set _steps = 0 %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "a file": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_ends_soon_and_with_a_refusal(source):
    began = time.monotonic()
    with pytest.raises(TemplateError):
        compile_template(source)()
    assert time.monotonic() - began < 20  # a second or two on a quiet machine


@pytest.mark.parametrize("source", ["{{ lipsum() }}", "{{ [1, 2, 3] | random }}"])
def test_a_template_cannot_throw_dice(source):
    with pytest.raises(TemplateError):
        compile_template(source)()


def test_what_public_templates_use_is_there():
    source = (
        "{%- set state = namespace(n=0) -%}{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}"
        "{%- set state.n = state.n + 1 -%}{{ loop.index ~ m.content | trim | upper }}{%- if state.n == 2 -%}{%- break -%}{%- endif -%}{%- endfor -%}"
        "{{ messages[1:] | map(attribute='role') | join(',') }}{{ tools | tojson(indent=2, separators=(',', ':'), sort_keys=true) }}"
        "{{ 'on' if enable_thinking is defined else 'off' }}{{ documents is none }}{{ dict(a=1).items() | list }}{{ strftime_now('%d %B %Y') }}{{ 3 * 2 + 1 }}"
    )
    messages = [{"role": role, "content": f" {role} "} for role in ("system", "user", "assistant", "user")]
    rendered = compile_template(source)(messages=messages, tools={"b": "<é>", "a": 1}, documents=None)
    assert rendered == '2USER3ASSISTANTuser,assistant,user{\n  "a":1,\n  "b":"<é>"\n}offTrue[(\'a\', 1)]26 July 20247'


def test_a_conversation_of_ten_thousand_turns_renders():
    messages = [{"role": "user", "content": "x" * 100}] * 10_000
    assert (
        len(compile_template("{% for m in messages[::-1] %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}")(messages=messages))
        == 1_000_000
        < MAX_CHARACTERS
    )
