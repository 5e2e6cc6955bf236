"""Text schema, and the fields that rows of all schemas share: strings and the row's weight."""

from __future__ import annotations

import json
import math
from typing import Any

from data.schemas.messages import MAX_WEIGHT, MIN_WEIGHT, NUMBERS
from data.schemas.registry import TextExample, register_schema
from data.types import BadRowError, type_name


@register_schema("text", "text", keys=("text",))
def parse_text(row: dict, where: str) -> TextExample:
    text = row["text"]
    if not isinstance(text, str):
        raise BadRowError(
            "wrong type", f"text must be a string, found {type_name(text)}", where, 'write {"text": "..."}'
        )
    if not text.strip():
        raise BadRowError("empty text", "the text is empty", where, "delete the row")
    return TextExample(text)


def optional_text(row: dict, key: str, where: str) -> str:
    """Return the string in `row[key]`, "" if the key is missing or null. Raises BadRowError."""
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRowError(
            "wrong type", f"{key} must be a string, found {type_name(value)}", f"{where} {key}", "write one string"
        )
    return value or ""


def required_text(row: dict, key: str, where: str) -> str:
    """Return the string in `row[key]`, an answer of the assistant.

    Raises BadRowError if it is null or blank.
    """
    if row[key] is None:
        raise BadRowError("wrong type", f"{key} must be a string, found null", f"{where} {key}", "write one string")
    text = optional_text(row, key, where)
    if not text.strip():
        raise BadRowError(
            "empty assistant turn", f"{key} is empty", f"{where} {key}", "add an answer, or delete the row"
        )
    return text


def example_weight(row: dict, where: str) -> float:
    """Return how often the row counts relative to others: its field `weight`, 1.0 by default.

    Raises BadRowError.
    """
    value: Any = row.get("weight")
    if value is None or value == "":
        return 1.0
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        message = f"the weight of a row must be {NUMBERS[-1]}, found {json.dumps(value, default=str)}"
        raise BadRowError("wrong weight", message, f"{where} weight", "correct the weight, or delete the row")
    return weight
