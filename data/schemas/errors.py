"""Rows that cannot be used: what is raised for one, and JSON read so that nothing else is."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from common.errors import UserError


class BadRowError(UserError):
    """One row that cannot be used, where the rows around it may be.

    `reason` is a short fixed phrase, by which such rows are counted; `args` are what is wrong, where, and how to mend it.
    """

    def __init__(self, reason: str, what: str, where: str, fix: str) -> None:
        super().__init__(what, where, fix)
        self.reason = reason

    def __reduce__(self) -> tuple:  # args alone would not make another one: these travel between processes
        return type(self), (self.reason, *self.args)


def raise_bad_row(error: BadRowError) -> NoReturn:
    raise error


def type_name(value: Any) -> str:
    """A JSON value's type in JSON's own words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def parse_row(raw: bytes, where: str, last_line: bool = False) -> Any:
    """The JSON value that `raw` holds. `last_line`: raw ends where the file does, without a line end."""
    try:
        value = json.loads(raw.decode("utf-8"))
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        fix = "save the file as UTF-8, e.g. with: iconv -f LATIN1 -t UTF-8"
        raise BadRowError("not UTF-8", f"not UTF-8: {error.reason}", f"{where}, byte {error.start + 1}", fix) from error
    except UnicodeEncodeError as error:
        fix = "write the whole pair, or take the \\ud... out"
        raise BadRowError("half a surrogate pair", "half of a surrogate pair stands for no character", where, fix) from error
    except json.JSONDecodeError as error:
        where = f"{where}:{error.colno}"
        if last_line:
            fix = "is the file cut off? Copy it again, or delete the last line"
            raise BadRowError("file cut off", f"broken JSON at the end of the file: {error.msg}", where, fix) from error
        raise BadRowError("broken JSON", f"broken JSON: {error.msg}", where, "mend or delete the row; rows stand one a line, or in one JSON array") from error
    except (RecursionError, ValueError) as error:  # nested a thousand deep, a number of five thousand digits
        raise BadRowError("JSON beyond reason", f"JSON beyond reason: {error}", where, "mend or delete the row") from error
