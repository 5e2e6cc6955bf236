import pytest
from jinja2 import TemplateError

from data.tokenize.templates import jinja_sandbox
from data.tokenize.templates.jinja_sandbox import MAX_CHARACTERS, compile_template

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
    "power": "{{ 9 ** 9 ** 9 }}",
    "long range": "{{ range(1000000000) | list }}",
    "access to classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "overwritten step counter": "{% for a in range(100000) %}{% set _steps = 0 %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "include of a file": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_sandbox_stops_a_hostile_template(source, monkeypatch):
    monkeypatch.setattr(jinja_sandbox, "MAX_STEPS", 20_000)
    monkeypatch.setattr(jinja_sandbox, "MAX_CHARACTERS", 2**20)
    with pytest.raises(TemplateError):
        compile_template(source)()


@pytest.mark.parametrize("source", ["{{ lipsum() }}", "{{ [1, 2, 3] | random }}"])
def test_sandbox_has_no_random_numbers(source):
    with pytest.raises(TemplateError):
        compile_template(source)()


def test_sandbox_has_what_public_templates_use():
    source = (
        "{%- set state = namespace(n=0) -%}{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}"
        "{%- set state.n = state.n + 1 -%}{{ loop.index ~ m.content | trim | upper }}{%- if state.n == 2 -%}{%- break -%}{%- endif -%}{%- endfor -%}"
        "{{ messages[1:] | map(attribute='role') | join(',') }}{{ tools | tojson(indent=2, separators=(',', ':'), sort_keys=true) }}"
        "{{ 'on' if enable_thinking is defined else 'off' }}{{ documents is none }}{{ dict(a=1).items() | list }}{{ strftime_now('%d %B %Y') }}{{ 3 * 2 + 1 }}"
    )
    messages = [{"role": role, "content": f" {role} "} for role in ("system", "user", "assistant", "user")]
    rendered = compile_template(source)(messages=messages, tools={"b": "<é>", "a": 1}, documents=None)
    assert rendered == '2USER3ASSISTANTuser,assistant,user{\n  "a":1,\n  "b":"<é>"\n}offTrue[(\'a\', 1)]26 July 20247'


def test_sandbox_renders_a_conversation_of_ten_thousand_turns():
    source = "{% for m in messages[::-1] %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    rendered = compile_template(source)(messages=[{"role": "user", "content": "x" * 100}] * 10_000)
    assert len(rendered) == 1_000_000 < MAX_CHARACTERS
