"""An append-only JSONL file that can be cut back to where a checkpoint left it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from common.errors import UserError


class JsonlLog:
    """One JSON object a line, handed to the operating system at once: kill -9 loses nothing that was appended.

    A line the disk refuses is kept in memory and tried again with the next one, so a full disk leaves no gap once there is room.
    """

    def __init__(self, path: Path, position: int, attempt: int) -> None:
        """Continue `path` at byte `position`; what stands behind it is moved to `<stem>.attempt<N>.jsonl`, N being the attempt that wrote it.

        Raises ValueError(what, where, fix) where the file ends before `position`.
        """
        self.path = path
        self._pending = b""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # open as long as the run
        self._cut_back(position, attempt)

    def append(self, record: dict[str, object]) -> None:
        """Raises OSError where the disk refuses; the line is then still in hand."""
        # A lone surrogate has no UTF-8 form; written as a backslash escape it is valid JSON again.
        self._pending += json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._write()

    def position(self) -> int:
        """Length in bytes, all of it on the disk. Raises OSError where it cannot be brought there."""
        self._write()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def _write(self) -> None:
        while self._pending:
            # An unbuffered write may take only a part of what it is given.
            written = self._file.write(self._pending) or 0
            self._pending = self._pending[written:]

    def _cut_back(self, position: int, attempt: int) -> None:
        content = self.path.read_bytes()
        if len(content) < position:
            raise UserError(
                f"{self.path.name} ends at byte {len(content)}, the checkpoint was saved at byte {position}",
                str(self.path),
                "put the file back as it was, or begin a new run from these weights with init_from=",
            )
        if len(content) == position:
            return
        for writer, lines in _by_attempt(content[position:], attempt - 1).items():
            self._keep_aside(self.path.with_name(f"{self.path.stem}.attempt{writer}.jsonl"), lines)
        self._file.truncate(position)
        os.fsync(self._file.fileno())

    def _keep_aside(self, path: Path, lines: bytes) -> None:
        with open(path, "a+b") as aside:
            aside.seek(0)
            # Killed between this write and the truncation, the next attempt comes here with the same lines.
            if not aside.read().endswith(lines):
                aside.write(lines)
            aside.flush()
            os.fsync(aside.fileno())


def _by_attempt(tail: bytes, last: int) -> dict[int, bytes]:
    """The lines of a tail under the attempt each names; a line torn in mid-write names none and was the last to be written."""
    groups: dict[int, bytes] = {}
    for line in tail.splitlines(keepends=True):
        try:
            writer = int(json.loads(line)["attempt"])
        except (ValueError, KeyError, TypeError):
            writer = last
        groups[writer] = groups.get(writer, b"") + line
    return groups
