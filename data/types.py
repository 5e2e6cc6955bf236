"""What the folders of data/ share: how examples are encoded, encoded examples as the batches read them, and rows that
cannot be used: their exception, and the JSON parser that raises nothing else.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import UserError
from common.filesystem import sha256_of_json
from common.limits import MAX_NESTING, check_json_size, check_nesting, unique_names

if TYPE_CHECKING:
    import numpy as np


def sequences_per_row(data_format: str) -> int:
    """Return how many token sequences an encoded row has: 2 (chosen, rejected) for a preference, else 1."""
    return 2 if data_format == "preference" else 1


@dataclass(frozen=True)
class EncodingConfig:
    """All settings that decide which token ids the rows of a file become.

    Part of the key of the token store.
    """

    data_format: str  # text | chat | preference
    schema: str  # name in data.schemas.registry.SCHEMAS
    tokenizer: Path
    max_length: int
    too_long: str  # truncate | drop | split
    loss_on: str  # assistant | last_assistant | all
    on_bad_row: str  # error | skip
    system_prompts: tuple[str, ...] = ()
    system_prob: float = 0.0
    empty_think_prob: float = 0.0
    seed: int = 0  # of the two probabilities; 0 where both are 0, so that the seed of the run does not change the key

    def key(self, tokenizer_fingerprint: str) -> str:
        parts = dataclasses.asdict(self) | {"tokenizer": tokenizer_fingerprint}
        return sha256_of_json(parts)


class TokenSequence(NamedTuple):
    ids: np.ndarray  # int32 (n,), n <= max_length + 1: ids[:-1] is the model's input, ids[1:] are its targets
    # bool (n,): whether the prediction of ids[t] has loss, [0] is False; or float32: its weight in the loss, if one is
    # not 0 or 1
    loss_mask: np.ndarray


class EncodedRow(NamedTuple):
    sequences: tuple[TokenSequence, ...]  # one; (chosen, rejected) for a preference
    name: str  # file:line


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
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null", bytes: "bytes"}
    return names.get(type(value), "a number")


def parse_json_row(raw: bytes, where: str, last_line: bool = False) -> Any:
    """Return the JSON value in `raw`.

    `last_line`: `raw` ends at the end of the file, without a line end. Raises BadRowError.
    """
    try:
        check_json_size(raw)
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_names)
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
    except (RecursionError, ValueError) as error:  # nested too deep, a number with thousands of digits, or a name twice
        raise BadRowError(
            "JSON beyond limits", f"JSON that is not read: {error}", where, "correct or delete the row"
        ) from error


def not_utf8(where: str, reason: str = "") -> BadRowError:
    return BadRowError("not UTF-8", f"not UTF-8{': ' * bool(reason)}{reason}", where, "write the text as UTF-8")
