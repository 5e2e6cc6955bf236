"""Files of rows: which there are, of what kind each is, and its rows one after another. What rows mean stands in shapes.py."""

from __future__ import annotations

import difflib
import glob
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.schemas.errors import BadRowError, parse_row, raise_bad_row, type_name
from data.sources.byte_stream import BOM, READ_BYTES, open_stream
from data.sources.json_text import TEXT_READERS

# .json holds an array or lines: the first byte tells, also where somebody named an array .jsonl.
EXTENSIONS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".txt": "text", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow"}
COMPRESSED = (".gz", ".zst")
KNOWN_EXTENSIONS = f"{', '.join(EXTENSIONS)}, each also with {' or '.join(COMPRESSED)}"
LINE_FORMATS = ("jsonl", "text", "csv")  # where people count from 1; items of arrays and tables are counted from 0


def ignore_progress(consumed: int) -> None: ...


@dataclass(frozen=True)
class Source:
    """One file of rows."""

    path: Path
    kind: str  # of data.sources.json_text.TEXT_READERS
    name: str  # what messages call it

    @classmethod
    def open(cls, path: str | Path) -> Source:
        """Looks at the file's name and first bytes. Raises the refusal of a path that cannot be read as rows."""
        path = Path(path)
        if not os.path.exists(path):  # unlike Path.exists, this takes any string for an answer
            raise _missing(path)
        if path.is_dir():
            raise UserError("a folder, where one file is meant", str(path), f"name a file in it; files end in {KNOWN_EXTENSIONS}")
        if not path.is_file():
            raise UserError("not a file: a pipe or a device cannot be read twice", str(path), "write what comes out of it into a file first")
        return cls(path, _detect_format(path), str(path))

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size

    def where(self, place: int) -> str:
        return f"{self.name}:{place}" if self.kind in LINE_FORMATS else f"{self.name}[{place}]"

    def items(self, progress: Callable[[int], None] = ignore_progress) -> Iterator[tuple[int, Any]]:
        """(place, raw) in file order, as a stream; `row` makes a row of it, in any process.

        raw is a BadRow where an item cannot be read and later ones can. `progress` hears, now and then, how many bytes
        of the file on disk are behind us. Raises a ValueError where nothing after can be read.
        """
        consumed, place = 0, 0
        with open_stream(self.path, seekable=self.kind == "parquet") as (disk, file):
            try:
                for number, (place, raw) in enumerate(TEXT_READERS[self.kind](file, self.where)):
                    if number % 64 == 0:
                        consumed = max(consumed, disk.tell())
                        progress(consumed)
                    yield place, raw
            except OSError as error:
                if file is disk:
                    raise
                what = f"the file cannot be unpacked any further: {error}"
                yield place + 1, BadRowError("file cut off", what, self.where(place + 1), "copy it again")
        progress(self.size)

    def row(self, place: int, raw: Any) -> dict:
        """The JSON object that an item is. Raises BadRow."""
        if isinstance(raw, BadRowError):
            raise raw
        where = self.where(place)
        try:
            value = parse_row(raw, where, self.kind == "jsonl" and not raw.endswith(b"\n")) if isinstance(raw, bytes) else raw
        except BadRowError as error:
            raise _with_hint(error, raw.strip(), where) if self.kind == "jsonl" else error from error
        if not isinstance(value, dict):
            raise BadRowError("not an object", f"a row is a JSON object, found {type_name(value)}", where, 'write e.g. {"text": "..."}')
        return value

    def rows(self, on_bad: Callable[[BadRowError], Any] = raise_bad_row) -> Iterator[tuple[int, dict]]:
        """(place, row) in file order; a bad row goes to `on_bad`, which may let reading go on."""
        for place, raw in self.items():
            try:
                row = self.row(place, raw)
            except BadRowError as error:
                on_bad(error)
            else:
                yield place, row


def _with_hint(error: BadRowError, line: bytes, where: str) -> BadRowError:
    """What is wrong with a line, where it is one of the two usual mistakes."""
    if error.reason not in ("broken JSON", "file cut off"):
        return error
    if error.reason == "broken JSON" and line.endswith((b"{", b"[")):
        fix = "is it one object over several lines? A row stands on one line, and so it does after: jq -c . FILE"
        return BadRowError("broken JSON", "broken JSON: the line ends where an object begins", where, fix)
    try:
        json.loads(line.removesuffix(b","))
    except (ValueError, RecursionError):
        return error
    return BadRowError("broken JSON", "broken JSON: a comma stands behind the row", error.args[1], "take the comma away: between lines stands none")


def resolve_sources(path: str | list[str]) -> list[list[Source]]:
    """The files meant by each word: a file, a glob, all files of a folder, or hub:owner/name[@config][:split].

    Files of a glob or a folder come in the order of their names. Raises the refusal of a word that means none.
    """
    return [_resolve_entry(word) for word in ([path] if isinstance(path, str) else path)]


def _resolve_entry(word: str) -> list[Source]:
    if word.startswith("hub:"):
        from data.sources.huggingface import load_hub_dataset

        return [Source(file, "arrow", name) for file, name in load_hub_dataset(word)]
    if "://" in word:
        raise UserError("not a path: nothing is read over the network", word, "download it first; a data set of Hugging Face is named hub:owner/name")
    path = Path(word).expanduser()
    if os.path.isdir(path):
        return [Source.open(file) for file in _files_in(path)]
    if not os.path.exists(path) and glob.has_magic(word):
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        if not files:
            raise UserError("no file matches", word, "look with: ls " + word)
        return [Source.open(file) for file in files]
    return [Source.open(path)]


def _files_in(folder: Path) -> list[Path]:
    """Files with a known ending, in this folder and those in it; what is hidden stays out."""
    shown = (file for file in folder.rglob("*") if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts))
    files = sorted(file for file in shown if _extension(file) in EXTENSIONS)
    if not files:
        raise UserError("no file of rows in this folder", str(folder), f"files end in {KNOWN_EXTENSIONS}")
    return files


def _extension(path: Path) -> str:
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def _detect_format(path: Path) -> str:
    begin, head = _read_head(path)
    _check_encoding(path, begin)
    kind = EXTENSIONS.get(_extension(path)) or ("json" if head[:1] in b"[{" else "parquet" if head.startswith(b"PAR1") else None)
    if kind is None:
        raise UserError("neither the name nor the first byte says what kind of file this is", str(path), f"give it one of the endings {KNOWN_EXTENSIONS}")
    return kind if kind != "json" else "array" if _is_array(head) else "jsonl"


def _read_head(path: Path) -> tuple[bytes, bytes]:
    """The first bytes, and the first that are not blank."""
    begin = b""
    try:
        with open_stream(path) as (_, file):
            while chunk := file.read(READ_BYTES):
                begin = begin or chunk
                if head := chunk.removeprefix(BOM).lstrip():
                    return begin, head
    except PermissionError as error:
        raise UserError("this file may not be read", str(path), f"give yourself the right: chmod u+r {path}") from error
    except OSError as error:
        raise UserError(f"the file cannot be read: {error}", str(path), "copy it again") from error
    raise UserError("the file is empty", str(path), "give a file with one JSON object a line")


def _check_encoding(path: Path, begin: bytes) -> None:
    """UTF-16 and UTF-32 show in a byte order mark, and where JSON is expected in the zeros of its first characters."""
    known = EXTENSIONS.get(_extension(path), "json")
    encoding = json.detect_encoding(begin[:4])
    if encoding.startswith("utf-8") or known in ("parquet", "arrow") or (known != "json" and encoding not in ("utf-16", "utf-32")):
        return
    name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    raise UserError(f"the file is {name}, and only UTF-8 is read", str(path), f"save it as UTF-8, e.g. with: iconv -f {name} -t UTF-8")


def _is_array(head: bytes) -> bool:
    """A file that begins with a list is one, except where that list is a (wrong) row on a line of its own."""
    first, _, rest = head.partition(b"\n")
    try:
        return head.startswith(b"[") and not (rest.strip() and isinstance(json.loads(first), list))
    except (ValueError, RecursionError):
        return True


def _missing(path: Path) -> ValueError:
    near = difflib.get_close_matches(path.name, sorted(file.name for file in path.parent.glob("*")), n=3)
    fix = f"did you mean {' or '.join(near)}?" if near else "check the path; a relative one starts where you stand"
    return UserError("there is no such file", str(path), fix)
