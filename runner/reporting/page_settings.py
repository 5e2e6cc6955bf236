"""Settings of a saved config as the text that a page shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten_settings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each setting, values as they are typed: null, true, 0.001."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flatten_settings(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
