import pytest
from jinja2 import TemplateError

from data.tokenize.jinja_sandbox import compile_template


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}", "{{ range(1000000000) | list }}"],
)
def test_sandbox_refuses_access_and_long_ranges(source):
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
    assert len(rendered) == 1_000_000
