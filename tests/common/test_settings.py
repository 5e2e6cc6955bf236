"""Limits of settings: declared with their fields, checked when a config dataclass is created."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from common.errors import UserError
from common.settings import (
    IGNORED,
    CheckedSettings,
    at_least,
    check_at_least,
    field_comments,
    one_of,
    resume_rules,
    settings_class,
    within,
)

ROOT = Path(__file__).parents[2]
DECLARATION = re.compile(r"^    \w+: .* = (at_least|within|one_of)\(", re.MULTILINE)


@settings_class
class Section(CheckedSettings):
    SECTION = "section"

    steps: int = at_least(1, 8, resume=IGNORED)  # optimizer steps
    share: float = within("(0, 1]", 0.5)
    rate: float = within("(0, inf)", "5e-4", "a positive number")
    kind: str = one_of("one", "two")  # one or two
    limit: Optional[int] = at_least(2, default=None)


@dataclass
class PluginSection(Section):
    """As a plugin writes it: `@dataclass`, a default for a setting of the base class, and a check of its own."""

    limit: Optional[int] = 3
    depth: int = at_least(0, default=1)
    width: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("section.width", self.width, 1, 4)


def section(**changes: Any) -> PluginSection:
    return PluginSection(**{"steps": 1, "share": 0.5, "rate": 1.0, "kind": "one"} | changes)


@pytest.mark.parametrize(
    ("key", "value", "limit", "fix"),
    [
        ("steps", 0, "at least 1", "e.g. section.steps=8"),
        ("steps", math.nan, "at least 1", "e.g. section.steps=8"),
        ("steps", -math.inf, "at least 1", "e.g. section.steps=8"),
        ("share", 0, "in (0, 1]", "e.g. section.share=0.5"),
        ("share", False, "in (0, 1]", "e.g. section.share=0.5"),
        ("share", 1.01, "in (0, 1]", "e.g. section.share=0.5"),
        ("share", math.nan, "in (0, 1]", "e.g. section.share=0.5"),
        ("rate", math.inf, "a positive number", "e.g. section.rate=5e-4"),
        ("kind", "oen", "one of one, two", "did you mean one?"),
        ("kind", 7, "one of one, two", "e.g. section.kind=one"),
        ("limit", 1, "at least 2", "e.g. section.limit=2"),
        ("depth", -1, "at least 0", "e.g. section.depth=0"),
        ("width", 0, "at least 1", "e.g. section.width=4"),
    ],
)
def test_limit_refuses_a_value_with_an_example(key: str, value: object, limit: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        section(**{key: value})
    message = f"section.{key} must be {limit}, got {value}"
    assert (error.value.message, error.value.setting, error.value.fix) == (message, f"section.{key}={value}", fix)


def test_limit_allows_its_ends_and_null_where_the_type_does() -> None:
    allowed = [{"steps": 1}, {"share": 1}, {"share": 5e-324}, {"rate": 1e308}, {"limit": None}, {"limit": 2}]
    assert [section(**changes).width for changes in allowed] == [1] * 6
    with pytest.raises(TypeError):
        section(steps=None)


def test_limit_and_resume_rule_of_a_field_are_declared_together() -> None:
    rules = resume_rules(section())
    assert (rules["steps"], rules["kind"]) == ("ignored", "incompatible")
    assert field_comments(Section) == {
        "steps": "optimizer steps; at least 1",
        "share": "; in (0, 1]",
        "rate": "; a positive number",
        "kind": "one or two",
        "limit": "; at least 2",
    }


def test_infinite_epsilon_and_nan_as_penalty_are_refused() -> None:
    from runner.engine.optim.config import AdamWConfig
    from runner.inference.chat import ChatConfig

    adamw = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0, "grad_clip": 1.0, "layer_decay": 1.0}
    with pytest.raises(UserError, match="optimizer.eps must be a positive number, got inf"):
        AdamWConfig(**adamw, betas=[0.9, 0.95], eps=math.inf)
    with pytest.raises(UserError, match=r"repetition_penalty must be in \[1e-5, inf\), got nan"):
        ChatConfig("last", None, "auto", None, 0.7, 0, 0.9, math.nan, 256, 0, "auto", "auto")


def config_classes() -> Iterator[type]:
    """Yield the classes of this checkout whose fields have limits."""
    for folder in ("data", "models", "runner"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if DECLARATION.search(file.read_text(encoding="utf-8")):
                module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
                for cls in vars(module).values():
                    if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__:
                        yield cls


def test_limits_of_each_config_class_are_checked_and_allow_their_example() -> None:
    classes = [cls for cls in config_classes() if any("limit" in f.metadata for f in dataclasses.fields(cls))]
    assert len(classes) > 25 and [cls.__name__ for cls in classes if not issubclass(cls, CheckedSettings)] == []
    assert [
        cls.__name__
        for cls in classes
        if "__post_init__" in vars(cls) and "super().__post_init__()" not in inspect.getsource(cls.__post_init__)
    ] == []
    refused, parser = [], OverridesParser.create()
    for cls in classes:
        for setting in dataclasses.fields(cls):
            if limit := setting.metadata.get("limit"):
                example = limit.example if limit.choices else parser.parse_override(f"x={limit.example}").value()
                refused += [f"{cls.__name__}.{setting.name}"] if not limit.allows(example) else []
    assert refused == []
