"""JSON and YAML that another may have written: values and nesting are limited, and numbers are finite.

`parse_json` and `parse_yaml` raise nothing but ValueError. The size of a file is limited where it is read (common/filesystem.py).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from typing import Any

MAX_NESTING = 100  # levels of lists and objects
MAX_JSON_VALUES = 4_000_000  # commas and opening brackets; the largest tokenizer.json in use has 1.5 million
MAX_YAML_VALUES = 20_000  # a saved config has 300
MAX_DIGITS = 100  # of a whole number; larger ones are no finite float, and PyYAML needs quadratic time for `1:1:1:...`
NUMBER = re.compile(r"[-+.\d][-+.:_\w]*")
TOO_DEEP = f"nested deeper than {MAX_NESTING} levels"


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for one that is invalid or beyond the limits: also for an object with a name twice, NaN, and a
    number that is infinite as a float.
    """
    check_json_size(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_float=_finite_float,
            parse_int=_bounded_int,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    check_nesting(value)
    return value


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line of a log; {} if it is none."""
    try:
        record = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def check_json_size(text: bytes | str) -> None:
    """Raise ValueError if a JSON text has more than MAX_JSON_VALUES values.

    Commas and brackets in strings count, too.
    """
    symbols: Any = b",[{" if isinstance(text, bytes) else ",[{"
    count = sum(map(text.count, symbols))
    if count > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES:,} values")


def check_nesting(value: Any) -> None:
    """Raise ValueError if a JSON value is nested deeper than MAX_NESTING levels."""
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(TOO_DEEP)
        level = [
            item
            for parent in level
            for item in (parent.values() if type(parent) is dict else parent)
            if type(item) in (dict, list)
        ]


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name[:100]!r} is given twice in one object")
    return value


def _bounded_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} characters")
    return int(text)


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document.

    Raises ValueError for one that is invalid or beyond the limits: also for an anchor, an alias, a tag, a mapping with
    a key twice, NaN and infinity.
    """
    import yaml

    try:
        _check_yaml(text)
        loader = _yaml_loader()(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
    # TypeError: a list as a key; AttributeError: `!!` forms
    except (yaml.YAMLError, RecursionError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(str(error) or TOO_DEEP) from error
    return value


def _check_yaml(text: str) -> None:
    """Raise ValueError for what would take much time or memory to construct.

    Reads events one by one, and builds nothing.
    """
    import yaml

    depth = count = 0
    for event in yaml.parse(text, Loader=_yaml_loader()):
        count += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_NESTING:
            raise ValueError(TOO_DEEP)
        if count > MAX_YAML_VALUES:
            raise ValueError(f"more than {MAX_YAML_VALUES:,} values")
        if getattr(event, "anchor", None) is not None:  # of an AliasEvent, too
            raise ValueError("YAML anchors and aliases are not allowed")  # a few lines of them expand to gigabytes
        if (tag := getattr(event, "tag", None)) is not None:
            raise ValueError(f"YAML tags are not allowed, got {tag[:40]}")
        if (
            isinstance(event, yaml.ScalarEvent)
            and not event.style
            and len(event.value) > MAX_DIGITS
            and NUMBER.fullmatch(event.value)
        ):
            raise ValueError(f"a number of more than {MAX_DIGITS} characters")


@cache
def _yaml_loader() -> Any:
    """Return a class of loaders with the types of SafeLoader."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # PyYAML may be built without libyaml
        """Refuses a key that is given twice, and numbers that are not finite."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(names)) < len(names):
                raise ValueError(f"a key is given twice: {next(name for name in names if names.count(name) > 1)[:100]}")
            return super().construct_mapping(node, deep)

        def construct_yaml_float(self, node: Any) -> float:
            number = super().construct_yaml_float(node)
            if not math.isfinite(number):
                raise ValueError(f"{node.value} is no finite number")
            return number

    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    return Loader
