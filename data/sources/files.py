"""Data files: which files a path names, the format of each, and its rows one after another."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError, did_you_mean_path
from data.errors import BadRowError, parse_json_row, type_name
from data.sources.byte_stream import BOM, READ_BYTES, Items, Locate, open_stream
from data.sources.json_text import read_json_array, read_jsonl, read_text
from data.sources.tables import read_arrow, read_csv, read_parquet

# By file format. Whether a JSON file has lines or one array is read from its first byte, whatever the file is called.
READERS: dict[str, Callable[[BinaryIO, Locate], Items]] = {
    "jsonl": read_jsonl,
    "json array": read_json_array,
    "text": read_text,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
}
EXTENSIONS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".txt": "text", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow"}
COMPRESSED = (".gz", ".zst")
KNOWN_EXTENSIONS = f"{', '.join(EXTENSIONS)}, each also with {' or '.join(COMPRESSED)}"
LINE_FORMATS = ("jsonl", "text", "csv")  # positions are line numbers from 1; in arrays and tables they are indices from 0


def _ignore_progress(consumed: int) -> None: ...


def _raise_error(error: BadRowError) -> None:
    raise error


@dataclass(frozen=True)
class Source:
    """One file of rows."""

    path: Path
    file_format: str  # key of READERS
    name: str  # for messages

    @classmethod
    def open(cls, path: str | Path) -> Source:
        """Detect the format by the file's name and first bytes. Raises UserError if the file cannot be read as rows."""
        path = Path(path)
        if not os.path.exists(path):  # Path.exists raises an error for a name that is too long
            raise UserError("no such file or folder", f"data.path={path}", did_you_mean_path(path))
        if path.is_dir():
            raise UserError("a file is needed, got a folder", str(path), f"name a file in it, with the extension {KNOWN_EXTENSIONS}")
        if not path.is_file():
            raise UserError("a regular file is needed, got a pipe or a device, which can be read once only", str(path), "write its content to a file first")
        return cls(path, _detect_format(path), str(path))

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size

    def where(self, position: int) -> str:
        """Return `file:line` or `file[index]`, for messages."""
        return f"{self.name}:{position}" if self.file_format in LINE_FORMATS else f"{self.name}[{position}]"

    def items(self, progress: Callable[[int], None] = _ignore_progress) -> Items:
        """Yield (position, raw) in file order; `parse` makes a row of `raw`, in any process.

        `raw` is a BadRowError if the row cannot be read but later ones can. `progress` is called now and then with the number of
        bytes read from disk. Raises UserError if the rest of the file cannot be read.
        """
        consumed, position = 0, 0
        with open_stream(self.path, seekable=self.file_format == "parquet") as (disk, file):
            try:
                for number, (position, raw) in enumerate(READERS[self.file_format](file, self.where)):
                    if number % 64 == 0:
                        consumed = max(consumed, disk.tell())
                        progress(consumed)
                    yield position, raw
            except OSError as error:
                if file is disk:
                    raise
                message = f"the rest of the file cannot be decompressed: {error}"
                yield position + 1, BadRowError("truncated file", message, self.where(position + 1), "copy the file again")
        progress(self.size)

    def parse(self, position: int, raw: Any) -> dict:
        """Return the row in `raw`, a JSON object. Raises BadRowError."""
        if isinstance(raw, BadRowError):
            raise raw
        where = self.where(position)
        try:
            value = parse_json_row(raw, where, self.file_format == "jsonl" and not raw.endswith(b"\n")) if isinstance(raw, bytes) else raw
        except BadRowError as error:
            raise _with_hint(error, raw.strip(), where) if self.file_format == "jsonl" else error from error
        if not isinstance(value, dict):
            raise BadRowError("not an object", f"a row must be a JSON object, found {type_name(value)}", where, 'write e.g. {"text": "..."}')
        return value

    def rows(self, on_bad: Callable[[BadRowError], Any] = _raise_error) -> Iterator[tuple[int, dict]]:
        """Yield (position, row) in file order; skips a bad row if `on_bad` returns."""
        for position, raw in self.items():
            try:
                row = self.parse(position, raw)
            except BadRowError as error:
                on_bad(error)
            else:
                yield position, row


def _with_hint(error: BadRowError, line: bytes, where: str) -> BadRowError:
    """Return a more specific error for two frequent mistakes in JSON Lines, else `error`."""
    if error.reason not in ("invalid JSON", "truncated file"):
        return error
    if error.reason == "invalid JSON" and line.endswith((b"{", b"[")):
        fix = "write each row on one line; for objects over several lines: jq -c . FILE"
        return BadRowError("invalid JSON", "invalid JSON: the line ends within an object", where, fix)
    try:
        json.loads(line.removesuffix(b","))
    except (ValueError, RecursionError):
        return error
    return BadRowError("invalid JSON", "invalid JSON: a comma after the row", error.setting, "remove the comma: JSON Lines has none between rows")


def resolve_sources(path: str | list[str]) -> list[list[Source]]:
    """Return the files of each entry of `path`: a file, a glob, all files of a folder, or hub:owner/name[@config][:split].

    The files of a glob or a folder are sorted by name. Raises UserError if an entry names no file.
    """
    return [_resolve_entry(entry) for entry in ([path] if isinstance(path, str) else path)]


def _resolve_entry(entry: str) -> list[Source]:
    if entry.startswith("hub:"):
        from data.sources.huggingface import load_hub_dataset

        return [Source(file, "arrow", name) for file, name in load_hub_dataset(entry)]
    if "://" in entry:
        raise UserError("URLs are not supported", entry, "download the file first, or name a data set of Hugging Face: hub:owner/name")
    path = Path(entry).expanduser()
    if os.path.isdir(path):
        return [Source.open(file) for file in _files_in(path)]
    if not os.path.exists(path) and glob.has_magic(entry):
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        if not files:
            raise UserError("no file matches the pattern", entry, f"list the files: ls {entry}")
        return [Source.open(file) for file in files]
    return [Source.open(path)]


def _files_in(folder: Path) -> list[Path]:
    """Return the files with a known extension in `folder` and its subfolders, without hidden ones."""
    visible = (file for file in folder.rglob("*") if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts))
    files = sorted(file for file in visible if _extension(file) in EXTENSIONS)
    if not files:
        raise UserError("the folder has no data files", str(folder), f"data files have the extension {KNOWN_EXTENSIONS}")
    return files


def _extension(path: Path) -> str:
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def _detect_format(path: Path) -> str:
    first_bytes, content = _read_head(path)
    _check_encoding(path, first_bytes)
    known = EXTENSIONS.get(_extension(path)) or ("json" if content[:1] in b"[{" else "parquet" if content.startswith(b"PAR1") else None)
    if known is None:
        raise UserError("the file format cannot be detected by name or first byte", str(path), f"use one of the extensions {KNOWN_EXTENSIONS}")
    return known if known != "json" else "json array" if _is_array(content) else "jsonl"


def _read_head(path: Path) -> tuple[bytes, bytes]:
    """Return (first chunk, first chunk that is not blank, without leading blanks) of the decompressed file."""
    first_bytes = b""
    try:
        with open_stream(path) as (_, file):
            while chunk := file.read(READ_BYTES):
                first_bytes = first_bytes or chunk
                if content := chunk.removeprefix(BOM).lstrip():
                    return first_bytes, content
    except PermissionError as error:
        raise UserError("no permission to read the file", str(path), f"chmod u+r {path}") from error
    except OSError as error:
        raise UserError(f"the file cannot be read: {error}", str(path), "copy it again") from error
    raise UserError("the file is empty", str(path), "write one JSON object per line into it")


def _check_encoding(path: Path, first_bytes: bytes) -> None:
    """Refuse UTF-16 and UTF-32: detected by a byte order mark, in JSON also by the zero bytes of its first characters."""
    known = EXTENSIONS.get(_extension(path), "json")
    encoding = json.detect_encoding(first_bytes[:4])
    if encoding.startswith("utf-8") or known in ("parquet", "arrow") or (known != "json" and encoding not in ("utf-16", "utf-32")):
        return
    name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    raise UserError(f"the encoding must be UTF-8, found {name}", str(path), f"save the file as UTF-8, e.g. with: iconv -f {name} -t UTF-8")


def _is_array(content: bytes) -> bool:
    """Whether the file is a JSON array. A list on the first line with more lines after it is a (wrong) row of JSON Lines."""
    first_line, _, rest = content.partition(b"\n")
    try:
        return content.startswith(b"[") and not (rest.strip() and isinstance(json.loads(first_line), list))
    except (ValueError, RecursionError):
        return True
