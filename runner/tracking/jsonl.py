"""Append-only JSON Lines files: truncated to a saved position, or repaired after damage.

The checkpoint that a run resumes from knows size, checksum and the last losses of metrics.jsonl and samples.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.filesystem import write_all, write_atomic_file
from common.guarded_files import keep_damaged, open_append, read_from
from common.limits import parse_json


class JsonlLog:
    """One JSON object per line, written without buffering: kill -9 loses no appended record.

    A record that cannot be written is kept in memory and retried with the next one, so a full disk leaves no gap once
    there is space again.
    """

    def __init__(self, path: Path, attempt: int, saved: SavedLogs) -> None:
        """Continue `path` at the byte of the checkpoint; later records are moved to `<stem>.attempt<N>.jsonl`, N being
        the attempt that wrote them.

        If the bytes before are not those of the checkpoint, their readable records are kept, a copy of the file is kept
        in `damaged/`, and `recovered` names what was lost.
        """
        self.path = path
        self.recovered: str | None = None
        self._pending = b""
        found = read_from(path, 0) if os.path.lexists(path) else None
        content = found or b""
        position = saved.positions.get(path.stem, 0)
        kept, later = content[:position], content[position:]
        self._file = open_append(path)  # open as long as the run
        damage = inspect_log(path.stem, found, saved) if position else None
        if damage:
            kept, later = b"".join(damage.kept), b"".join(damage.later)
            copy = keep_damaged(path.parent, path.name, content) if damage.dropped else ""
            self.recovered = f"{path.name} is {damage.state}: {damage.consequence(copy)}"
        self._hash = hashlib.sha256(kept)
        for writer, lines in _by_attempt(later, attempt - 1).items() if later else ():
            _archive(path.with_name(f"{path.stem}.attempt{writer}.jsonl"), lines)
        if damage:
            self._replace(kept)
        elif later:
            self._file.truncate(position)
            os.fsync(self._file.fileno())

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
        """Write the file again if it was deleted or replaced while it was open here; return a message then.

        Records of this process go to the open file.
        """
        try:
            if os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._file.fileno())):
                return None
            copy = keep_damaged(self.path.parent, self.path.name, read_from(self.path, 0))
        except FileNotFoundError:
            copy = ""
        content = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        self._replace(content)
        change = f"replaced by another file, which is kept in {copy}" if copy else "deleted"
        return f"{self.path.name} was {change} while the run wrote to it: its records are written again"

    def _replace(self, content: bytes) -> None:
        write_atomic_file(self.path, content)
        self._file.close()
        self._file = open_append(self.path)

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


RECORD_ORDER = {"train": 0, "eval": 1}  # of records in metrics.jsonl, in the order of one step


@dataclass(frozen=True)
class SavedLogs:
    """What a checkpoint knows about the logs up to its step; the defaults are those of a new run.

    `losses`: of the last training steps, the newest last; None: not finite.
    """

    step: int = 0
    losses: Sequence[float | None] = ()
    # log name -> checksum of its bytes up to the checkpoint
    sha256: Mapping[str, str] = field(default_factory=dict)
    positions: Mapping[str, int] = field(default_factory=dict)  # log name -> length of these bytes

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> SavedLogs:
        """Return what a checkpoint with this state.json knows."""
        progress = state["progress"]
        return cls(progress["step"], progress["recent_losses"], state["log_sha256"], state["log"])

    def loss_at(self, step: int) -> tuple[bool, float | None]:
        """Return (whether the loss of `step` is known, the loss)."""
        index = step - self.step - 1
        return (True, self.losses[index]) if -len(self.losses) <= index < 0 else (False, None)


@dataclass(frozen=True)
class LogDamage:
    """A log that is not what the checkpoint has recorded.

    `kept`, `later` and `dropped` are its lines, in their order.
    """

    state: str  # missing, short or changed, with numbers
    kept: list[bytes]  # readable records up to the checkpoint
    later: list[bytes]  # readable records after it
    dropped: list[bytes]  # the others

    def consequence(self, copy: str) -> str:
        """Return what is kept and what is lost; `copy`: name of the copy of the damaged file, if lines were dropped."""
        text = f"{_count(self.kept)} up to the checkpoint kept, the others are lost"
        return text + (f"; {_count(self.dropped, 'damaged or foreign line')} in {copy}" if self.dropped else "")


def inspect_log(name: str, content: bytes | None, saved: SavedLogs) -> LogDamage | None:
    """Return what is wrong with the bytes of the log `name` (metrics, samples) up to the checkpoint, None if nothing is.
    `content` None: no such file. Where the checkpoint has no checksum of the log, its size alone counts.
    """
    size, position = len(content or b""), saved.positions.get(name, 0)
    expected = saved.sha256.get(name)
    prefix = (content or b"")[:position]
    if size >= position and (expected is None or hashlib.sha256(prefix).hexdigest() == expected):
        return None
    if content is None:
        state = "missing"
    elif size < position:
        state = f"{size:,} bytes, but {position:,} when the checkpoint was saved"
    else:
        state = "changed since the checkpoint was saved"
    return LogDamage(state, *_sort_lines(name, content or b"", saved))


def _sort_lines(name: str, content: bytes, saved: SavedLogs) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Divide the lines into readable records up to the checkpoint, readable ones after it, and the rest.

    A record whose loss is not that of the checkpoint's step is not of this run. If no loss agrees, none of the records
    counts.
    """
    kept: list[bytes] = []
    later: list[bytes] = []
    dropped: list[bytes] = []
    newest, agreed, differed = (0, -1), 0, 0
    for line in content.splitlines(keepends=True):
        order = _order(name, line)
        if order is None or (order <= newest if name == "metrics" else order < newest):
            dropped.append(line)
            continue
        is_known, loss = saved.loss_at(order[0])
        if is_known and order[1] == RECORD_ORDER["train"] and name == "metrics":
            if parse_json(line).get("loss") != loss:
                differed += 1
                dropped.append(line)
                continue
            agreed += 1
        newest = order
        (kept if order[0] <= saved.step else later).append(line)
    if differed and not agreed:
        return [], [], content.splitlines(keepends=True)
    return kept, later, dropped


def _order(name: str, line: bytes) -> tuple[int, int] | None:
    """Return (step, position within the step) of a complete record, None for anything else."""
    try:
        record: Any = parse_json(line)
        step = record["step"]
        position = RECORD_ORDER[record["kind"]] if name == "metrics" else 0
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    is_complete = line.endswith(b"\n") and type(step) is int and step > 0 and type(record.get("attempt")) is int
    return (step, position) if is_complete else None


def _count(lines: Sequence[bytes], noun: str = "record") -> str:
    return f"{len(lines):,} {noun}{'s' * (len(lines) != 1)}"
