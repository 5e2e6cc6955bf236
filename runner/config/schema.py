"""FIXME runner.config.schema."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from common.paths import CONF_DIR
from runner.engine.config import Config


@cache
def config_schema() -> dict[str, Any]:
    """Every dotted word and its type; a section stands there too, with its dataclass."""
    return dict(iter_fields(Config, ""))


def iter_fields(section: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, kind in typing.get_type_hints(section).items():
        inner = strip_optional(kind)
        yield prefix + name, inner
        if dataclasses.is_dataclass(inner):
            yield from iter_fields(typing.cast(type, inner), f"{prefix}{name}.")


def strip_optional(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


@cache
def config_groups(conf: Path = CONF_DIR) -> dict[str, list[str]]:
    """{"precision": ["bf16", "fp16", "fp32"], ...}: the folders of conf/ and their files."""
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in sorted(conf.iterdir()) if folder.is_dir() and folder.name != "hydra"}
