"""Append-only JSON Lines file that can be truncated to the position a checkpoint has saved."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO

from common.filesystem import write_all, write_atomic_file
from common.guarded_files import keep_damaged, open_append, read_from
from common.limits.parsers import parse_json
from runner.tracking.log_recovery import LogDamage, LogProof, inspect_log


class JsonlLog:
    """One JSON object per line, written without buffering: kill -9 loses no appended record.

    A record that cannot be written is kept in memory and retried with the next one, so a full disk leaves no gap once there is space again.
    """

    def __init__(self, path: Path, position: int, attempt: int, proof: LogProof | None = None) -> None:
        """Continue `path` at byte `position`; later records are moved to `<stem>.attempt<N>.jsonl`, N being the attempt that wrote them.

        `proof`: what the checkpoint knows of the log. If the first `position` bytes are not those of the checkpoint, their readable records are
        kept, a copy of the file is kept in `damaged/`, and `recovered` names what was lost.
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

    def restore_path(self) -> str | None:
        """Write the file again if it was deleted or replaced while it was open here; return a message then. Records of this process go to the open file."""
        try:
            if os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._file.fileno())):
                return None
            copy = keep_damaged(self.path.parent, self.path.name, read_from(self.path, 0))
        except FileNotFoundError:
            copy = ""
        content = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        write_atomic_file(self.path, content)
        self._file.close()
        self._file = open_append(self.path)
        change = f"replaced by another file, which is kept in {copy}" if copy else "deleted"
        return f"{self.path.name} was {change} while the run wrote to it: its records are written again"

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
        copy = keep_damaged(self.path.parent, self.path.name, content) if damage.dropped else ""
        self._archive_tail(b"".join(damage.later), attempt)
        kept = b"".join(damage.kept)
        write_atomic_file(self.path, kept)
        self.recovered = f"{self.path.name} is {damage.state}: {damage.consequence(copy)}"
        return open_append(self.path), hashlib.sha256(kept)


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
