"""What of a damaged metrics.jsonl or samples.jsonl can be kept: the checkpoint that a run resumes from knows size, checksum and the last losses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.limits.parsers import parse_json

RECORD_ORDER = {"train": 0, "eval": 1}  # of records in metrics.jsonl, in the order of one step


@dataclass(frozen=True)
class LogProof:
    """What a checkpoint knows about the logs up to its step. `losses`: of the last training steps, the newest last; None: not finite."""

    step: int = 0
    losses: Sequence[float | None] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)  # log name -> checksum of its bytes up to the checkpoint; {}: of an earlier version

    @classmethod
    def of_state(cls, saved: Mapping[str, Any]) -> LogProof:
        """Return what a checkpoint with the state.json `saved` knows."""
        return cls(saved["progress"]["step"], saved["progress"]["recent_losses"], saved.get("log_sha256", {}))

    def loss_at(self, step: int) -> tuple[bool, float | None]:
        """Return (whether the loss of `step` is known, the loss)."""
        index = step - self.step - 1
        return (True, self.losses[index]) if -len(self.losses) <= index < 0 else (False, None)


@dataclass(frozen=True)
class LogDamage:
    """A log that is not what the checkpoint has recorded. `kept`, `later` and `dropped` are its lines, in their order."""

    state: str  # missing, short or changed, with numbers
    kept: list[bytes]  # readable records up to the checkpoint
    later: list[bytes]  # readable records after it
    dropped: list[bytes]  # the others

    def consequence(self, copy: str) -> str:
        """Return what is kept and what is lost; `copy`: name of the copy of the damaged file, if lines were dropped."""
        text = f"{_count(self.kept)} up to the checkpoint kept, the others are lost"
        return text + (f"; {_count(self.dropped, 'damaged or foreign line')} in {copy}" if self.dropped else "")


def inspect_log(name: str, content: bytes | None, position: int, proof: LogProof) -> LogDamage | None:
    """Return what is wrong with the first `position` bytes of the log `name` (metrics, samples), None if nothing is. `content` None: no such file."""
    size = len(content or b"")
    expected = proof.sha256.get(name)
    if size >= position and (content is None or _is_intact(content[:position], expected)):
        return None
    if content is None:
        state = "missing"
    elif size < position:
        state = f"{size:,} bytes, but {position:,} when the checkpoint was saved"
    else:
        state = "changed since the checkpoint was saved"
    return LogDamage(state, *_sort_lines(name, content or b"", proof))


def _is_intact(prefix: bytes, expected: str | None) -> bool:
    return hashlib.sha256(prefix).hexdigest() == expected if expected else not prefix or prefix.endswith(b"\n")


def _sort_lines(name: str, content: bytes, proof: LogProof) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Divide the lines into readable records up to the checkpoint, readable ones after it, and the rest.

    A record whose loss is not that of the checkpoint's step is not of this run. If no loss agrees, none of the records counts.
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
        is_known, loss = proof.loss_at(order[0])
        if is_known and order[1] == RECORD_ORDER["train"] and name == "metrics":
            if parse_json(line).get("loss") != loss:
                differed += 1
                dropped.append(line)
                continue
            agreed += 1
        newest = order
        (kept if order[0] <= proof.step else later).append(line)
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
