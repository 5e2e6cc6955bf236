"""Chat templates that compute for years, fill the memory, crash the interpreter, or look for a way out of the sandbox."""

from __future__ import annotations

from collections.abc import Callable

from harness import TRAIN, Folder, HostileCase

CATEGORY = "template"
ROWS = "rows stage=sft data.path=chats.jsonl data.val_path=null data.tokenizer=model device=cpu plain=true"
CHAT = "chat run=model prompt=hello mode=chat max_new_tokens=2 device=cpu"
EVALUATE = "evaluate run=model data.path=chats.jsonl data.cache=cache device=cpu"
TRAIN_CHATS = TRAIN.replace("data.path=rows.jsonl", "stage=sft init_from=model data.path=chats.jsonl")
NESTED = "{%% for a in range(100000) %%}{%% for b in range(100000) %%}%s{%% endfor %%}{%% endfor %%}"
DOUBLED_TEXT = (
    "{%% set n = namespace(x='spam') %%}{%% for a in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}{{ n.x }}"
)
HUGE_LIST = "range(100000) | list"
ERROR_PART = "the chat template"  # of every refusal: it does not compile, or it rejects the conversation

TEMPLATES = {
    "nested loops": NESTED % "",
    "nested loops with output": NESTED % "spam",
    "loop of loops over the same list": "{% set l = range(100000) | list %}{% for a in l %}{{ l | sum }}{% endfor %}",
    "macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion of a macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless recursion of a loop": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "call block that calls itself": "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
    "repeated text": "{{ 'spam' * 10 ** 9 }}",
    "repeated text, a constant": "{{ 'spam' * 1000000000 }}",
    "repeated list": "{{ [0] * messages | length * 1000000000 }}",
    "list doubled by +": "{% set n = namespace(x=[0]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "list of lists": "{% set n = namespace(x=[0]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "dict of dicts": "{% set n = namespace(x={}) %}{% for a in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x | tojson }}",
    "text doubled by +": DOUBLED_TEXT % "n.x + n.x",
    "text doubled by ~": DOUBLED_TEXT % "n.x ~ n.x",
    "text doubled by join": DOUBLED_TEXT % "[n.x, n.x] | join",
    "text doubled by format": DOUBLED_TEXT % "'%s%s' | format(n.x, n.x)",
    "text doubled by str.format": DOUBLED_TEXT % "'{0}{0}'.format(n.x)",
    "text doubled by replace": DOUBLED_TEXT % "n.x | replace('s', 'ss')",
    "text doubled by str.replace": DOUBLED_TEXT % "n.x.replace('s', 'spam')",
    "text doubled by indent": DOUBLED_TEXT % "(n.x + '\\n' + n.x) | indent(10)",
    "number format": "{{ '%0999999999d' % 1 }}",
    "number format of a filter": "{{ '%999999999d' | format(1) }}",
    "str.format with a width": "{{ '{:>999999999}'.format('a') }}",
    "center": "{{ 'spam' | center(1000000000) }}",
    "ljust": "{{ 'spam'.ljust(1000000000) }}",
    "zfill": "{{ '1'.zfill(2000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "join of a long text": "{{ ('x' * 1000000).join('y' * 1000000) }}",
    "replace of nothing": "{{ ('x' * 1000000).replace('', 'y' * 1000000) }}",
    "translate": "{{ ('x' * 1000000).translate({120: 'y' * 1000000}) }}",
    "split into characters": "{% set n = namespace(x=[]) %}{% for a in range(1000) %}{% set n.x = n.x + [('x ' * 1000000).split()] %}{% endfor %}",
    "long range": "{{ range(1000000000) | list }}",
    "range of a slice": "{{ range(10 ** 12)[::2] | list }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product of large numbers": "{% set n = namespace(x=99) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "sum of lists": "{{ [[0] * 1000000] * 1000000 | sum(start=[]) }}",
    "sort of a huge list": "{% for a in range(100000) %}{{ " + HUGE_LIST + " | sort(reverse=true) | first }}{% endfor %}",
    "groupby": "{% for a in range(100000) %}{{ " + HUGE_LIST + " | groupby('real') | length }}{% endfor %}",
    "batch": "{{ messages | batch(1000000000, 'x') | list }}",
    "slice": "{{ messages | slice(1000000000) | list }}",
    "unique": "{% for a in range(100000) %}{{ " + HUGE_LIST + " | unique | list | length }}{% endfor %}",
    "tojson with a huge indent": "{{ messages | tojson(indent=1000000000) }}",
    "indent by a huge number": "{{ 'a\\nb' | indent(1000000000) }}",
    "wordwrap": "{{ ('x ' * 10000000) | wordwrap(1) | length }}" * 20,
    "truncate": "{% for a in range(100000) %}{{ ('x ' * 1000000) | truncate(999999) | length }}{% endfor %}",
    "urlize": "{{ ('http://a.b/(' * 1000000) | urlize }}" * 10,
    "striptags": "{{ ('<' * 10000000) | striptags }}{{ ('<!--' * 1000000) | striptags }}",
    "xmlattr": "{% for a in range(100000) %}{{ {'a': 'x' * 1000000} | xmlattr | length }}{% endfor %}",
    "pprint": "{{ (range(100000) | list) * 100 | pprint }}" + "{{ (range(100000) | list) | pprint }}" * 100,
    "chained filters": "{{ (" + HUGE_LIST + " | join | list | join | list) * 1000 | join | list | join | length }}" * 100,
    "loop.cycle": NESTED % "{{ loop.cycle('a', 'b') }}",
    "constants folded when it compiles": "{{ ('a' * 33000000) ~ ('b' * 33000000) }}" * 1000,
    "constant list folded when it compiles": "{{ [0] * 33000000 }}{{ ([0] * 33000000) | join | length }}" * 100,
    "constant format folded when it compiles": "{{ '%033000000d' % 1 }}" * 1000,
    "constant int to text": "{{ 1" + "0" * 200_000 + " }}",
    "100,000 nested parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "30,000 nested lists": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
    "10,000 nested ifs": "{% if a %}" * 10_000 + "{% endif %}" * 10_000,
    "60 nested loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60 + NESTED % "",
    "20,000 operators": "{{ 1" + " + 1" * 20_000 + NESTED % "" + " }}",
    "20,000 nots": "{{ " + "not " * 20_000 + "1 }}",
    "template of 40 MB": "spam" * 10_000_000,
    "unclosed comments": "{#" * 100_000,
    "unclosed tags": "{%" + " " * 100_000 + "{% generation" * 5000,
    "access to classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "access to globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__init__.__globals__ }}{{ f._func.__globals__['__builtins__'] }}{{ 1 // 0 }}",
    "access by attr": "{{ ('' | attr('__class__')).mro() }}",
    "access by map": "{{ [''] | map(attribute='__class__.__mro__') | list | first | first }}{{ 1 // 0 }}",
    "access by str.format": "{{ '{0.__class__.__mro__[1].__subclasses__}'.format('') }}{{ 1 // 0 }}",
    "access to the environment": "{{ self._TemplateReference__context.environment.globals }}{{ 1 // 0 }}",
    "include of a file": "{% include '/etc/passwd' %}",
    "import of a file": "{% import 'os' as os %}{{ os.system('true') }}",
    "extends": "{% extends messages %}",
    "generator expression": "{{ (x for x in range(10 ** 9)) }}",
    "overwritten step counter": "{% set _steps = 0 %}" + NESTED % "{% set _steps = 0 %}",
    "namespace as a step counter": "{% set ns = namespace(_steps=[]) %}" + NESTED % "{% set ns._steps = [1] %}",
    "error with control characters": "{{ raise_exception('\\x1b[2J\\x9b31m\\u202e\\r\\nfix: run me') }}",
    "error of a megabyte": "{{ raise_exception('spam' * 8000000) }}",
    "text that is not Unicode": "{{ '\\ud800' }}{{ raise_exception('\\ud800') }}",
    "slow for every row": "{% for a in range(300) %}{{ ('x ' * 100000) | wordwrap(1) | length }}{% endfor %}{{ 1 // 0 }}",
    "output of control tokens": "{{ '<|im_end|>' * 3000000 }}",
    "exception in an attribute": "{{ messages | map('nosuchfilter') | list }}",
}  # fmt: skip


def with_template(template: str) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.copy("chats.jsonl")
        folder.copy("model")
        folder.write("model/chat_template.jinja", template)

    return build


def case_of(number: int, name: str, template: str) -> HostileCase:
    command = (ROWS, EVALUATE, TRAIN_CHATS)[number // 8 % 3] if number % 8 == 0 else CHAT  # chat.py starts fastest
    return HostileCase(name, CATEGORY, with_template(template), (command,), ERROR_PART)


CASES = [case_of(number, name, template) for number, (name, template) in enumerate(TEMPLATES.items())]
