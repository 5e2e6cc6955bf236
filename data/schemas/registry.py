"""Registry of row schemas: what a row of a data file looks like, and how it becomes a text, a conversation or a
preference.

A schema is a function from a row (a dict) to an example, registered with its name and the keys by which its rows are
detected:

    @register_schema("question answer", "chat", keys=("question", "answer"))
    def parse_question(row, where):
        return chat_example([chat_message("user", row["question"]), chat_message("assistant", row["answer"])], row, where)

The modules of this folder register the built-in schemas (data/schemas/__init__.py imports them), modules named in
`plugins=[...]` their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import UserError, did_you_mean
from common.registry import cached_with_plugins
from data.schemas.columns import (
    HIDE_MEDIA,
    check_no_ignored_content,
    check_no_media,
    columns_override,
    columns_setting,
    has_verdict,
)
from data.schemas.messages import TURNS_OF_ROW
from data.types import BadRowError

if TYPE_CHECKING:
    from data.sources.files import Source

# most specific format first
STAGE_OF_FORMAT = {"preference": "stage=dpo", "chat": "stage=sft", "text": "stage=pretrain"}
DETECTION_ROWS = 100  # rows of a file that are read to detect its schema
SHARED_FIELDS = ("weight",)  # of rows of every schema


@dataclass(frozen=True)
class TextExample:
    text: str

    chats = ()


@dataclass(frozen=True)
class ChatExample:
    """A conversation.

    Messages have role (system, user, assistant, tool), content, and optionally reasoning_content and tool_calls.
    """

    messages: list[dict]
    tools: list[dict] | None

    @property
    def chats(self) -> tuple[ChatExample, ...]:
        """The conversations of an example."""
        return (self,)


@dataclass(frozen=True)
class PreferencePair:
    """Two complete conversations that differ; both begin with the prompt."""

    chosen: ChatExample
    rejected: ChatExample

    @property
    def chats(self) -> tuple[ChatExample, ...]:
        return self.chosen, self.rejected


Example = TextExample | ChatExample | PreferencePair
Parse = Callable[[dict, str], Example]


@dataclass(frozen=True)
class RowSchema:
    name: str
    data_format: str  # text | chat | preference
    keys: tuple[str, ...]  # a row must have all of them
    parse: Parse
    detect: Callable[[dict], bool]  # distinguishes schemas with the same keys
    fields: frozenset[str]  # all fields that are read; training ignores others

    def read(self, row: dict, where: str, turns: str = "strict") -> Example:
        """Return the example in `row`. `turns`: data.turns.

        Raises BadRowError if the row does not have this schema or cannot be trained on.
        """
        check_no_ignored_content(row, self.data_format, where)
        if any(key not in row for key in self.keys):
            raise _unmatched_keys(
                row,
                f"rows of the schema {self.name} have {' and '.join(self.keys)}",
                self.data_format,
                self.keys,
                where,
            )
        TURNS_OF_ROW.set(turns)
        return self.parse(row, where)

    def matches(self, row: dict) -> bool:
        return all(row.get(key) is not None for key in self.keys) and self.detect(row)


SCHEMAS: dict[str, RowSchema] = {}


def register_schema(
    name: str,
    data_format: str,
    keys: Iterable[str],
    detect: Callable[[dict], bool] = lambda row: True,
    optional: Iterable[str] = (),
) -> Callable[[Parse], Parse]:
    """Register the decorated function `parse(row, where)` as a row schema.

    `where` is the position of the row for errors (`file:line`). `optional` are the fields that `parse` reads beside
    `keys`: all others of a file are listed as unused before the first step. Where several schemas match a row, the last
    registered one is used.
    """
    if data_format not in STAGE_OF_FORMAT:
        raise UserError(
            f"data_format must be one of {', '.join(STAGE_OF_FORMAT)}, got {data_format}",
            f'data.schema="{name}"',
            'e.g. data_format="chat"',
        )

    required = tuple(keys)

    def register(parse: Parse) -> Parse:
        if name in SCHEMAS:
            raise UserError(
                f"data.schema {name!r} is registered twice",
                f'data.schema="{name}"',
                "give the plugin's schema another name",
            )
        SCHEMAS[name] = RowSchema(
            name, data_format, required, parse, detect, frozenset((*required, *optional, *SHARED_FIELDS))
        )
        return parse

    return register


def schemas_of(data_format: str) -> list[RowSchema]:
    """Return the schemas of a data format, the preferred one first."""
    return [schema for schema in reversed(SCHEMAS.values()) if schema.data_format == data_format]


def detect_schema(row: dict, data_format: str, where: str) -> RowSchema:
    """Return the schema of `row`.

    Raises BadRowError if no schema of `data_format` (text, chat or preference) matches.
    """
    check_no_media(row, where, HIDE_MEDIA)
    candidates = schemas_of(data_format)
    if data_format == "chat" and "chosen" in row and "rejected" in row and "messages" not in row:
        candidates = []  # a conversation beside chosen and rejected is their prompt, without an answer
    with_keys = [schema for schema in candidates if all(key in row for key in schema.keys)]
    if matching := [schema for schema in with_keys if schema.matches(row)] or with_keys:
        check_no_ignored_content(row, data_format, where)
        return matching[0]
    wanted = dict.fromkeys(" and ".join(schema.keys) for schema in schemas_of(data_format))
    message = f"{STAGE_OF_FORMAT[data_format]} reads {', or '.join(wanted)}"
    raise _unmatched_keys(row, message, data_format, schemas_of(data_format)[0].keys, where)


@cached_with_plugins
def schema_of_source(source: Source, data_format: str) -> str:
    """Return the name of the schema of a file: that of the first row with a schema of `data_format`.

    It is detected once, until the file changes. Raises UserError if there is none.
    """
    error: BadRowError | None = None
    for position, raw in itertools.islice(source.items(), DETECTION_ROWS):
        try:
            return detect_schema(source.parse(position, raw), data_format, source.where(position)).name
        except BadRowError as bad:
            error = error or bad
    if error and error.reason == "wrong keys" and "csv" in source.file_format:
        error.fix += "; if its first line is a row, write a line with the names of the columns before it"
    columns = first_columns(source)
    missing = [
        column
        for field, column in source.columns
        if column is not None and columns and not {field, column} & columns.keys()
    ]
    if missing:
        fix = did_you_mean(missing[0], columns, "name one of these columns")
        raise UserError(
            f"the file has no column {missing[0]}, which data.columns names; its columns are {', '.join(columns)}",
            source.name,
            fix,
        )
    raise error or UserError("the file has no rows", source.name, "write rows into it, or leave it out")


def first_columns(source: Source) -> dict[str, None]:
    """Return the columns of the first rows of a file, as they are called there."""
    source, columns = dataclasses.replace(source, columns=()), dict[str, None]()
    for position, raw in itertools.islice(source.items(), DETECTION_ROWS):
        with contextlib.suppress(BadRowError):
            columns |= dict.fromkeys(source.parse(position, raw))
    return columns


def missing_columns(sources: Iterable[Source]) -> list[str]:
    """Return a warning for the columns that data.columns names and that the first rows of no file have: where a file
    has the field itself, it is read.
    """
    wanted: set[str] = set()
    found: dict[str, None] = {}
    for source in sources:
        wanted = {column for _, column in source.columns if column is not None} - found.keys()
        if not wanted:
            return []
        found |= first_columns(source)
    names = ", ".join(sorted(wanted - found.keys()))
    return (
        [
            f"data.columns names {names}, which the first {DETECTION_ROWS} rows of no file have; their columns are {', '.join(found)}"
        ]
        if names
        else []
    )


def check_columns(columns: Any) -> None:
    """Raise UserError unless data.columns is an object of fields that schemas have, and columns."""
    if not isinstance(columns, dict) or not all(
        column is None or isinstance(column, str) for column in columns.values()
    ):
        message = f"data.columns must name the column of each field, got {columns}"
        raise UserError(
            message, f"data.columns={columns}", "e.g. 'data.columns={prompt: question, completion: answer}'"
        )
    known = {field: None for schema in SCHEMAS.values() for field in (*schema.keys, *sorted(schema.fields))}
    for field, column in columns.items():
        if column is None or field in known:
            continue
        fix = (
            f"the column comes second: {columns_setting({column: field})}"
            if column in known
            else did_you_mean(field, known, "e.g. {prompt: question}")
        )
        message = f"data.columns names a field that no row schema has: {field}; the fields are {', '.join(known)}"
        raise UserError(message, columns_setting(columns).strip("'"), fix)


def _unmatched_keys(row: dict, message: str, data_format: str, keys: tuple[str, ...], where: str) -> BadRowError:
    """Return the error of a row without the required keys; its fix names the stage or the schema that fits the row."""
    other = _matching_schema(row)
    fix = f"write rows as {{{', '.join(f'{json.dumps(key)}: ...' for key in keys)}}}"
    if data_format == "preference" and has_verdict(row):
        fix = "a row with a label is no pair: write a good and a bad answer of one prompt as chosen and rejected; or train on the good ones: stage=sft"
    elif other and other.data_format != data_format:
        fix = f"the row matches {STAGE_OF_FORMAT[other.data_format]}"
    elif nested := next((key for key, value in row.items() if _is_list_of_rows(value)), None):
        fix = f"the field {json.dumps(nested)} contains the rows; extract them, e.g. with: jq -c '.[{json.dumps(nested)}][]' FILE"
    elif other:
        fix = f'the row matches the schema {other.name}: data.schema="{other.name}", or a file of its own if other rows do not'
    elif guess := columns_override(row, data_format):
        fix = f"name your columns, a guess is {guess}"
    elif guess := next(
        (f"{STAGE_OF_FORMAT[name]} {columns}" for name in STAGE_OF_FORMAT if (columns := columns_override(row, name))),
        "",
    ):
        fix = f"name your columns and the stage that fits them, a guess is {guess}"
    return BadRowError("wrong keys", f"{message}; found {', '.join(map(str, row)) or 'no keys'}", where, fix)


def _matching_schema(row: dict) -> RowSchema | None:
    return next(
        (schema for data_format in STAGE_OF_FORMAT for schema in schemas_of(data_format) if schema.matches(row)), None
    )


def _is_list_of_rows(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and _matching_schema(first) is not None
