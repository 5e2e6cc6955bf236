"""Hostile JSON and YAML: refused by name before anything large is built, within milliseconds."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from common.filesystem import load_sealed_json, read_json_object
from common.limits import MAX_JSON_VALUES, MAX_NESTING, check_nesting, parse_json, parse_yaml

HOSTILE_JSON = {
    "nested lists": "[" * 100_000,
    "nested objects": '{"a":' * 100_000,
    "one level too many": "[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1),
    "many values": "[" + "[]," * MAX_JSON_VALUES + "[]]",
    "a name twice": '{"status": "new", "status": "completed"}',
    "NaN": '{"a": NaN}',
    "infinity": '{"a": -Infinity}',
    "a float beyond the range": '{"a": 1e400}',
    "an integer of 5000 digits": '{"a": ' + "9" * 5000 + "}",
    "not UTF-8": b'{"a": "\xff"}',
    "cut off": '{"a": ',
    "empty": "",
}
HOSTILE_YAML = {
    "nested lists": "[" * 100_000,
    "nested mappings": "".join(" " * level + "a:\n" for level in range(2000)),
    "aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "many values": "- x\n" * 30_000,
    "a key twice": "seed: 1\nseed: 2",
    "a tag": "a: !!python/object/apply:os.system [echo]",
    "infinity": "a: .inf",
    "a float beyond the range": "a: 1.0e+400",
    "an integer of 5000 digits": "a: " + "9" * 5000,
    "a number to the base 60": "a: " + "1:" * 100_000 + "1",
    "a list as a key": "? [a]\n: 1",
    "two documents": "a: 1\n---\nb: 2",
    "a control character": "a: \x07",
    "cut off": "a: [1, ",
}


@pytest.mark.parametrize("text", HOSTILE_JSON.values(), ids=HOSTILE_JSON)
def test_json_beyond_the_limits_is_a_value_error_and_allocates_little(text: str | bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            parse_json(text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", HOSTILE_YAML.values(), ids=HOSTILE_YAML)
def test_yaml_beyond_the_limits_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_yaml(text)


def test_json_within_the_limits_is_that_of_the_json_module(tmp_path: Path) -> None:
    value = {
        "a": [1, -2.5, 1e-300, None, True, "\u00e9", {"b": {}}],
        "model_max_length": 1000000000000000019884624838656,
    }
    assert parse_json(json.dumps(value)) == parse_json(json.dumps(value).encode()) == value
    check_nesting(json.loads("[" * MAX_NESTING + "]" * MAX_NESTING))
    assert parse_yaml("a: [1, 1.5, true, null, x]\nb: {c: 2}\n") == {"a": [1, 1.5, True, None, "x"], "b": {"c": 2}}


def test_json_files_beyond_the_limits_count_as_damaged(tmp_path: Path) -> None:
    for name, text in HOSTILE_JSON.items():
        content = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "run.json").write_bytes(content)
        assert read_json_object(tmp_path / "run.json") == {}, name
        with pytest.raises(ValueError, match="not a manifest"):
            load_sealed_json(content)
