"""Names of the user in overrides, such as paths and columns: taken literally, and quoted for Hydra's grammar, which
refuses `=`, `数` and `(`.
"""

from __future__ import annotations

import glob
import os
import re
from typing import Any

from common.errors import UserError, did_you_mean_path

COLUMNS_KEY = "data.columns"
# values of settings of paths; a file of such a name is written ./auto
NOT_PATHS = ("", "null", "auto", "scratch", "???")
LIST_ITEM = re.compile(r"""\s*'[^']*'\s*|\s*"[^"]*"\s*|[^,]+""")
PAIR = re.compile(r"""(?:'[^']*'|"[^"]*"|[^,])+""")
# a key of a mapping, which Hydra's grammar takes without quotes only
MAPPING_KEY = re.compile(r"[\w .+$%*?@|/-]+", re.ASCII)
QUOTED_ITEM = re.compile(r"\A(['\"])(.*)\1\Z", re.DOTALL)


def literal_path(override: str) -> str:
    """Return the override of an input path quoted for Hydra, and absolute where it exists, so that it means the same
    wherever the run is resumed.

    A file of the literal name comes first; otherwise brackets are a list, and commas separate the values of a sweep.
    """
    key, _, value = override.partition("=")
    if value in NOT_PATHS:
        return override
    is_list = value.startswith(("[", "{", "choice(")) or "," in value
    if not _exists(value) and (is_list or value.startswith(("'", '"')) or "${" in value):
        return f"{key}={_absolutize_items(_parse_paths(override))}" if is_list or "${" not in value else override
    return f"{key}={quote_path(_absolute_path(value))}"


def literal_output(override: str) -> str:
    """Return the override of a folder that may not exist yet, quoted for Hydra.

    It is one folder, whatever characters its name has.
    """
    key, _, value = override.partition("=")
    return (
        override
        if value in NOT_PATHS or "${" in value or QUOTED_ITEM.match(value)
        else f"{key}={quote_path(os.path.expanduser(value))}"
    )


def _parse_paths(override: str) -> Any:
    """Return the paths of an override as Hydra parses them.

    What its grammar refuses, such as `[数据.jsonl,b.jsonl]`, is split at the commas.
    """
    from hydra.core.override_parser.types import ChoiceSweep

    try:
        return parse_value(override)
    except UserError as error:
        key, _, value = override.partition("=")
        if value.startswith("{"):
            return parse_value(quote_columns(override))
        is_list = value.startswith("[") and value.endswith("]")
        items = [QUOTED_ITEM.sub(r"\2", item.strip()) for item in LIST_ITEM.findall(value[1:-1] if is_list else value)]
        missing = [item for item in items if not (_exists(item) or item.startswith("hub:") or glob.has_magic(item))]
        if missing:
            name = value if missing == items and not is_list else missing[0]
            fix = f"{did_you_mean_path(name)}; in a list, a name with commas is quoted: '{key}=[\"a, b\",c]'"
            raise UserError(f"no such file or folder: {name}", override, fix) from error
        return items if is_list else ChoiceSweep(list=[*items])


def _absolutize_items(value: Any) -> str:
    """Return a list, an object, the values of a sweep, or one path, as the value of an override."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}: {_absolutize_items(path)}' for name, path in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_absolutize_items, value))}]"
    if hasattr(value, "list"):
        return ",".join(map(_absolutize_items, value.list))
    if isinstance(value, str) and value.startswith("${"):
        return value
    if value is None:
        return "null"
    text = str(getattr(value, "text", value))
    return f"'{text}'" if "${" in text else quote_path(_absolute_path(text))


def quote_columns(override: str) -> str:
    """Return `data.columns={prompt: 问题}` with quoted values where Hydra's grammar refuses them without."""
    key, _, value = override.partition("=")
    try:
        parse_value(override)
        return override
    except UserError:
        pairs = [pair.partition(":") for pair in PAIR.findall(value.strip().removeprefix("{").removesuffix("}"))]
        if not value.startswith("{") or not all(colon and column.strip() for _, colon, column in pairs):
            fix = 'write {name: value, other: value}; a value with commas is quoted: {name: "a, b"}'
            raise UserError(f"{key} must have a value for each name", override, fix) from None
        if invalid := [name for name, _, _ in pairs if not MAPPING_KEY.fullmatch(name.strip())]:
            message = (
                f"{key} is a mapping, whose names have letters a-z, digits, spaces and any of _-+., without quotes"
            )
            raise UserError(f"{message}: got {invalid[0].strip()}", override, f"'{key}={{NAME: value}}'") from None
        items = (f"{field.strip()}: {_quote_column(column.strip())}" for field, _, column in pairs)
        return f"{key}={{{', '.join(items)}}}"


def _quote_column(column: str) -> str:
    return column if column == "null" or QUOTED_ITEM.match(column) else hydra_quote(column)


def quote_path(path: str) -> str:
    return (
        path
        if re.fullmatch(r"[A-Za-z0-9_./:@+-]+", path) and not re.fullmatch(r"[\d.e+-]+|true|false|null|nan|inf", path)
        else hydra_quote(path)
    )


def _exists(path: str) -> bool:
    """Whether there is such a path, or the run directory of a checkpoint that is named `RUN@step-100`."""
    return os.path.exists(path) or os.path.isdir(path.rpartition("@")[0])


def _absolute_path(path: str) -> str:
    """Return an existing path, or a pattern in an existing folder, as absolute; anything else as it is."""
    expanded = os.path.expanduser(path)
    is_pattern = glob.has_magic(expanded) and os.path.isdir(os.path.dirname(expanded) or ".")
    return os.path.abspath(expanded) if is_pattern or os.path.exists(expanded) else path


def parse_value(override: str) -> Any:
    """Return the value of an override as Hydra parses it: a list, the values of a sweep, a string."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException as error:
        raise UserError(
            "this list cannot be parsed", override, "quote what holds commas, spaces or brackets: 'key=[\"a, b\",c]'"
        ) from error


def hydra_quote(value: str) -> str:
    """Return a quoted string of Hydra's grammar whose value is `value`.

    Backslashes are doubled only before a special character.
    """
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not an interpolation
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", value) + "'"
