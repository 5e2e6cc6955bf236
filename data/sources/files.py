"""Data files: which files a path names, the format of each, and its rows one after another."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError, did_you_mean_path
from data.sources.byte_stream import (
    UTF8,
    Items,
    Locate,
    check_encoding,
    encoding_hint,
    open_stream,
    read_jsonl,
    utf8_stream,
)
from data.sources.detect import CSV_FORMATS, EXTENSIONS, KNOWN_EXTENSIONS, detect_format, extension_of
from data.sources.json_text import read_json_array, read_text, read_text_lines
from data.sources.tables import load_hub_dataset, read_arrow, read_csv, read_parquet
from data.types import BadRowError, parse_json_row, type_name

# By file format. Whether a JSON file has lines or one array is read from its first byte, whatever the file is called.
READERS: dict[str, Callable[[BinaryIO, Locate], Items]] = {
    "jsonl": read_jsonl,
    "json array": read_json_array,
    "text": read_text,
    "text lines": read_text_lines,
    **{name: partial(read_csv, arguments=arguments) for name, arguments in CSV_FORMATS.items()},
    "parquet": read_parquet,
    "arrow": read_arrow,
}
# positions are indices from 0 in INDEXED formats, line numbers from 1 in others
TABLES, INDEXED = ("parquet", "arrow"), ("json array", "parquet", "arrow")
JSON_NAMES = {"jsonl": "JSON Lines", "json array": "a JSON array"}
HIDDEN = " (hidden by data.columns)"  # end of the name of a field that data.columns replaces
NOT_DATA = re.compile(
    r"(readme|license|licence|changelog|contributing|citation)(\b.*\.(md|txt|rst|cff))?|readme_\w{2,5}\.(md|txt|rst)|requirements([-_](dev|tests?|docs?))?\.txt|dataset_infos?\.json|dataset_dict\.json|cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ReadOptions:
    """Settings of data that decide how files are read."""

    encoding: str | None = None  # of text files that are not UTF-8; None: detected
    text_unit: str = "file"  # what a row of a text file is: file or line
    # (field of a row schema, column of the file that it is; None: the column of this name is not read)
    columns: tuple[tuple[str, str | None], ...] = ()
    turns: str = "strict"  # of a conversation: strict or merge

    @classmethod
    def of(cls, section: Any) -> ReadOptions:
        """Return the options of a section of settings with encoding, text_unit, columns and turns.

        Raises UserError for an unknown encoding.
        """
        encoding = section.encoding if section.encoding is None else check_encoding(section.encoding)
        return cls(encoding, section.text_unit, tuple(sorted((section.columns or {}).items())), section.turns)


DETECTED = ReadOptions()  # everything is detected


def _raise_error(error: BadRowError) -> None:
    raise error


@dataclass(frozen=True)
class Source:
    """One file of rows."""

    path: Path
    file_format: str  # key of READERS
    name: str  # for messages
    encoding: str = UTF8  # of text formats
    columns: tuple[tuple[str, str | None], ...] = ()  # ReadOptions.columns
    turns: str = "strict"  # ReadOptions.turns
    changed: int = 0  # modification time of the file (ns): what is cached of a Source is that of this content
    val_set: str = ""  # name of the validation set that it is in, if that has one

    @classmethod
    def open(cls, path: str | Path, options: ReadOptions = DETECTED) -> Source:
        """Detect the format by the file's name and first bytes.

        Raises UserError if the file cannot be read as rows.
        """
        path = Path(path)
        if not os.path.exists(path):  # Path.exists raises an error for a name that is too long
            raise UserError("no such file or folder", f"data.path={path}", did_you_mean_path(path))
        if path.is_dir():
            raise UserError(
                "a file is needed, got a folder", path, f"name a file in it, with the extension {KNOWN_EXTENSIONS}"
            )
        if not path.is_file():
            raise UserError(
                "a regular file is needed, got a pipe or a device, which can be read once only",
                path,
                "write its content to a file first",
            )
        file_format, encoding = detect_format(path, options.encoding, options.text_unit)
        return cls(path, file_format, str(path), encoding, options.columns, options.turns, path.stat().st_mtime_ns)

    @property
    def reading(self) -> list:
        """What decides the rows beside the bytes of the file, as JSON values."""
        return [self.file_format, self.encoding, self.columns, *[self.turns] * (self.turns != "strict")]

    @property
    def detected(self) -> str:
        """What was detected beyond the extension of the file, for a message: "encoding gb18030, columns separated by
        ;".
        """
        arguments = CSV_FORMATS.get(self.file_format, {})
        parts = [f"encoding {self.encoding}"] if self.encoding != UTF8 else []
        if arguments and extension_of(self.path) != f".{self.file_format}":
            delimiter = arguments["delimiter"].replace("\t", "tabs")
            parts.append(f"columns separated by {delimiter}")
        if EXTENSIONS.get(extension_of(self.path)) == "text" and self.file_format in JSON_NAMES:
            parts.append(f"read as {JSON_NAMES[self.file_format]}, which its content is")
        if "quoting" in arguments:
            parts.append("quotes are text")
        return ", ".join(parts)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size

    def where(self, position: int) -> str:
        """Return `file:line` or `file[index]`, for messages."""
        return f"{self.name}:{position}" if self.file_format not in INDEXED else f"{self.name}[{position}]"

    def items(self, progress: Callable[[int], None] = lambda consumed: None) -> Items:
        """Yield (position, raw) in file order; `parse` makes a row of `raw`, in any process.

        `raw` is a BadRowError if the row cannot be read but later ones can. `progress` is called now and then with the
        number of bytes read from disk. Raises UserError if the rest of the file cannot be read.
        """
        consumed, position = 0, 0
        with open_stream(self.path, seekable=self.file_format in TABLES) as (disk, file):
            try:
                for number, (position, raw) in enumerate(
                    READERS[self.file_format](utf8_stream(file, self.encoding), self.where)
                ):
                    if number % 64 == 0:
                        consumed = max(consumed, disk.tell())
                        progress(consumed)
                    yield position, raw
            except OSError as error:
                if file is disk:
                    raise
                message = f"the rest of the file cannot be decompressed: {error}"
                yield (
                    position + 1,
                    BadRowError("truncated file", message, self.where(position + 1), "copy the file again"),
                )
        progress(self.size)

    def parse(self, position: int, raw: Any) -> dict:
        """Return the row in `raw`, a JSON object. Raises BadRowError."""
        where = self.where(position)
        try:
            if isinstance(raw, BadRowError):
                raise raw
            value = (
                parse_json_row(raw, where, self.file_format == "jsonl" and not raw.endswith(b"\n"))
                if isinstance(raw, bytes)
                else raw
            )
        except BadRowError as error:
            raise self._with_hint(error, raw, where) from error
        if not isinstance(value, dict):
            raise BadRowError(
                "not an object",
                f"a row must be a JSON object, found {type_name(value)}",
                where,
                'write e.g. {"text": "..."}',
            )
        return self._with_columns(value) if self.columns else value

    def _with_columns(self, row: dict) -> dict:
        """Return the row with the fields that data.columns names."""
        fields = {field: row[column] for field, column in self.columns if column is not None and column in row}
        hidden = [field for field, column in self.columns if column is None or field in fields]
        used = {column for _, column in self.columns}
        return {
            f"{name}{HIDDEN}" if name in hidden else name: value for name, value in row.items() if name not in used
        } | fields

    def _with_hint(self, error: BadRowError, raw: Any, where: str) -> BadRowError:
        """Return the error with a fix for this file, or for two frequent mistakes in JSON Lines."""
        if error.reason == "not UTF-8" and self.file_format not in TABLES:
            message = error.message if self.encoding == UTF8 else f"not valid in the encoding {self.encoding}"
            return BadRowError(error.reason, message, error.setting, encoding_hint(self.path, self.encoding))
        if self.file_format != "jsonl" or error.reason not in ("invalid JSON", "truncated file"):
            return error
        line = raw.strip() if isinstance(raw, bytes) else b""
        if error.reason == "invalid JSON" and line.endswith((b"{", b"[")):
            fix = "write each row on one line; for objects over several lines: jq -c . FILE"
            return BadRowError("invalid JSON", "invalid JSON: the line ends within an object", where, fix)
        text = line.decode(UTF8, "replace")
        try:
            rest = text[json.JSONDecoder().raw_decode(text)[1] :].lstrip()
        except (ValueError, RecursionError):
            return error
        if rest == ",":
            fix = "remove the comma: JSON Lines has none between rows"
            return BadRowError("invalid JSON", "invalid JSON: a comma after the row", error.setting, fix)
        if not rest.startswith(("{", ",")):
            return error
        fix = "jq -c . FILE > NEW.jsonl" if rest[0] == "{" else "sed '$!s/,*$/,/; $s/,*$/]/; 1s/^/[/' FILE > NEW.json"
        return BadRowError("invalid JSON", "invalid JSON: several rows on one line", error.setting, fix)

    def rows(self, on_bad: Callable[[BadRowError], Any] = _raise_error) -> Iterator[tuple[int, dict]]:
        """Yield (position, row) in file order; skips a bad row if `on_bad` returns."""
        for position, raw in self.items():
            try:
                row = self.parse(position, raw)
            except BadRowError as error:
                on_bad(error)
            else:
                yield position, row


def open_entry(entry: str, options: ReadOptions = DETECTED, splits: Sequence[str] = ("train",)) -> list[Source]:
    """Return the files of one entry of data.path: a file, a glob, all files of a folder, or
    hub:owner/name[@config][:split].

    The files of a glob or a folder are sorted by name. `splits`: of a data set of the Hub without a typed split, the
    first of these that it has. Raises UserError if the entry names no file.
    """
    if entry.startswith("hub:"):
        return [
            Source(file, "arrow", name, UTF8, options.columns, options.turns)
            for file, name in load_hub_dataset(entry, splits)
        ]
    return [Source.open(file, options) for file in find_files(entry)]


def find_files(entry: str) -> list[Path]:
    """Return the files of a path, a glob or a folder. Raises UserError if there is none."""
    if "://" in entry:
        raise UserError(
            "URLs are not supported",
            entry,
            "download the file first, or name a data set of Hugging Face: hub:owner/name",
        )
    path = Path(entry).expanduser()
    if os.path.isdir(path):
        files = [file for file in _visible_files(path) if file.is_file() and extension_of(file) in EXTENSIONS]
        if not files:
            raise UserError("the folder has no data files", path, f"data files have the extension {KNOWN_EXTENSIONS}")
        return files
    if not os.path.exists(path) and glob.has_magic(entry):
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        if not files:
            raise UserError("no file matches the pattern", entry, f"list the files: ls {entry}")
        return files
    return [path]


def _visible_files(folder: Path) -> list[Path]:
    """Return the files and links in `folder` and its subfolders, without hidden ones and those that describe a data set
    (README.md).
    """
    found = list[Path]()
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in folders + names if not name.startswith(".")]
    return sorted(file for file in found if (file.is_symlink() or not file.is_dir()) and not _is_description(file))


def unread_files(folder: Path) -> list[Path]:
    """Return the files with an unknown extension, the linked folders and the broken links of a folder with data files."""
    return [file for file in _visible_files(folder) if not file.is_file() or extension_of(file) not in EXTENSIONS]


def _is_description(file: Path) -> bool:
    return NOT_DATA.fullmatch(file.name) is not None or (
        file.name == "state.json" and file.with_name("dataset_info.json").exists()
    )
