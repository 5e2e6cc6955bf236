"""Rows that cannot be used: their exception, and the JSON parser that raises nothing else."""

from __future__ import annotations

import json
from typing import Any

from common.errors import UserError
from common.limits import MAX_NESTING, check_json_size, check_nesting


class BadRowError(UserError):
    """One row of a file cannot be used; the rows around it may be usable.

    `reason` is a short constant phrase by which bad rows are counted; message, setting (where it is) and fix are those
    of UserError.
    """

    def __init__(self, reason: str, message: str, where: str, fix: str) -> None:
        super().__init__(message, where, fix)
        self.reason = reason

    def __reduce__(self) -> tuple:  # workers send it to their parent; the default would pass `args` only
        return type(self), (self.reason, *self.args)


def type_name(value: Any) -> str:
    """Return the JSON type of a value, for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def parse_json_row(raw: bytes, where: str, last_line: bool = False) -> Any:
    """Return the JSON value in `raw`.

    `last_line`: `raw` ends at the end of the file, without a line end. Raises BadRowError.
    """
    try:
        check_json_size(raw)
        value = json.loads(raw.decode("utf-8"))
        if raw.count(b"[") + raw.count(b"{") > MAX_NESTING:
            check_nesting(value)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()  # refuses a lone surrogate
        return value
    except UnicodeDecodeError as error:
        raise not_utf8(f"{where}, byte {error.start + 1}", error.reason) from error
    except UnicodeEncodeError as error:
        message = "a \\ud... escape is half of a surrogate pair, which is not a character"
        raise BadRowError(
            "lone surrogate", message, where, "write both halves of the pair, or delete the escape"
        ) from error
    except json.JSONDecodeError as error:
        where = f"{where}:{error.colno}"
        if last_line:
            fix = "the file may be truncated: copy it again, or delete the last line"
            raise BadRowError(
                "truncated file", f"invalid JSON at the end of the file: {error.msg}", where, fix
            ) from error
        fix = "correct or delete the row; a file has one JSON object per line, or one JSON array of objects"
        raise BadRowError("invalid JSON", f"invalid JSON: {error.msg}", where, fix) from error
    except (RecursionError, ValueError) as error:  # nested too deep, or a number with thousands of digits
        raise BadRowError(
            "JSON beyond limits", f"JSON beyond the limits of the parser: {error}", where, "correct or delete the row"
        ) from error


def not_utf8(where: str, reason: str = "") -> BadRowError:
    return BadRowError("not UTF-8", f"not UTF-8{': ' * bool(reason)}{reason}", where, "write the text as UTF-8")
