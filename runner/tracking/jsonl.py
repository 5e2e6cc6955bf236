"""Append-only JSON Lines file that can be truncated to the position a checkpoint has saved."""

from __future__ import annotations

import json
import os
from pathlib import Path

from common.errors import UserError
from common.filesystem import write_all
from common.guarded_files import open_append, read_from


class JsonlLog:
    """One JSON object per line, written without buffering: kill -9 loses no appended record.

    A record that cannot be written is kept in memory and retried with the next one, so a full disk leaves no gap once there is space again.
    """

    def __init__(self, path: Path, position: int, attempt: int) -> None:
        """Continue `path` at byte `position`; later records are moved to `<stem>.attempt<N>.jsonl`, N being the attempt that wrote them.

        Raises UserError if the file is shorter than `position`.
        """
        self.path = path
        self._pending = b""
        self._file = open_append(path)  # open as long as the run
        self._truncate_to(position, attempt)

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

    def close(self) -> None:
        self._file.close()

    def _write(self) -> None:
        while self._pending:
            written = self._file.write(self._pending) or 0  # an unbuffered write may take a part only
            self._pending = self._pending[written:]

    def _truncate_to(self, position: int, attempt: int) -> None:
        content = read_from(self.path, 0)
        if len(content) < position:
            raise UserError(
                f"{self.path.name} has {len(content)} bytes, but had {position} when the checkpoint was saved",
                str(self.path),
                "restore the file, or start a new run from these weights with init_from=",
            )
        if len(content) == position:
            return
        for writer, lines in _by_attempt(content[position:], attempt - 1).items():
            _archive(self.path.with_name(f"{self.path.stem}.attempt{writer}.jsonl"), lines)
        self._file.truncate(position)
        os.fsync(self._file.fileno())


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
            writer = int(json.loads(line)["attempt"])
        except (ValueError, KeyError, TypeError):
            writer = last
        groups[writer] = groups.get(writer, b"") + line
    return groups
