"""Append-only JSON Lines file that can be truncated to the position a checkpoint has saved."""

from __future__ import annotations

import hashlib
import json
import os
from itertools import count
from pathlib import Path
from typing import BinaryIO

from common.filesystem import read_bounded, write_all, write_atomic_file
from common.guarded_files import open_append, read_from
from common.limits.parsers import parse_json
from runner.tracking.log_recovery import LogDamage, LogProof, inspect_log

MAX_LOG_BYTES = 4 << 30  # of an archive that is compared with a damaged log


class JsonlLog:
    """One JSON object per line, written without buffering: kill -9 loses no appended record.

    A record that cannot be written is kept in memory and retried with the next one, so a full disk leaves no gap once there is space again.
    """

    def __init__(self, path: Path, position: int, attempt: int, proof: LogProof | None = None) -> None:
        """Continue `path` at byte `position`; later records are moved to `<stem>.attempt<N>.jsonl`, N being the attempt that wrote them.

        `proof`: what the checkpoint knows of the log. If the first `position` bytes are not those of the checkpoint, their readable records are
        kept, a copy of the file is archived as `<stem>.damaged<N>.jsonl`, and `recovered` says what was lost.
        """
        self.path = path
        self.recovered: str | None = None
        self._pending = b""
        content = read_from(path, 0) if os.path.lexists(path) else None
        if damage := inspect_log(path.stem, content, position, proof or LogProof()):
            self._file, self._hash = self._repair(damage, content or b"", attempt)
            return
        self._file = open_append(path)  # open as long as the run
        self._hash = hashlib.sha256((content or b"")[:position])
        self._truncate_to(position, (content or b"")[position:], attempt)

    def append(self, record: dict[str, object]) -> None:
        """Raises OSError if the record cannot be written; it is then kept and retried."""
        # A lone surrogate has no UTF-8 form; as a backslash escape it is valid JSON again.
        self._pending += json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._write()

    def position(self) -> int:
        """Return the length in bytes, all of them synced to disk. Raises OSError if that fails."""
        self._write()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def checksum(self) -> str:
        """Return the sha256 of the file as far as it is written."""
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _write(self) -> None:
        while self._pending:
            written = self._file.write(self._pending) or 0  # an unbuffered write may take a part only
            self._hash.update(self._pending[:written])
            self._pending = self._pending[written:]

    def _truncate_to(self, position: int, tail: bytes, attempt: int) -> None:
        if tail:
            self._archive_tail(tail, attempt)
            self._file.truncate(position)
            os.fsync(self._file.fileno())

    def _archive_tail(self, tail: bytes, attempt: int) -> None:
        for writer, lines in _by_attempt(tail, attempt - 1).items():
            _archive(self.path.with_name(f"{self.path.stem}.attempt{writer}.jsonl"), lines)

    def _repair(self, damage: LogDamage, content: bytes, attempt: int) -> tuple[BinaryIO, hashlib._Hash]:
        """Replace the file by the records that are kept; the others are archived first."""
        archive = damaged_copy(self.path, content) if damage.dropped else self.path
        self._archive_tail(b"".join(damage.later), attempt)
        kept = b"".join(damage.kept)
        write_atomic_file(self.path, kept)
        self.recovered = f"{self.path.name} is {damage.state}: {damage.consequence(archive.name)}"
        return open_append(self.path), hashlib.sha256(kept)


def damaged_copy(path: Path, content: bytes) -> Path:
    """Write `content`, that of the damaged file `path`, to `<stem>.damaged<N><suffix>`; return its path. A copy that exists already is not repeated."""
    for number in count(1):
        copy = path.with_name(f"{path.stem}.damaged{number}{path.suffix}")
        if not os.path.lexists(copy):
            write_atomic_file(copy, content)
            return copy
        try:
            if read_bounded(copy, MAX_LOG_BYTES) == content:
                return copy
        except OSError:  # a link or a folder: it is not ours
            continue
    raise AssertionError("count() ends never")


def _archive(path: Path, lines: bytes) -> None:
    with open_append(path) as archive:
        archive.seek(0)
        # After a kill between this write and the truncation, the next attempt archives the same lines again.
        if not archive.read().endswith(lines):
            write_all(archive.fileno(), lines)
        os.fsync(archive.fileno())


def _by_attempt(tail: bytes, last: int) -> dict[int, bytes]:
    """Group the lines of `tail` by their field `attempt`; a line cut off in the middle belongs to attempt `last`."""
    groups: dict[int, bytes] = {}
    for line in tail.splitlines(keepends=True):
        try:
            writer = int(parse_json(line)["attempt"])
        except (ValueError, KeyError, TypeError):
            writer = last
        groups[writer] = groups.get(writer, b"") + line
    return groups
