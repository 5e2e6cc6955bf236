"""Is run.json that of this run, and whole? Otherwise it is restored from the newest whole checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.filesystem import read_bounded, write_json
from common.guarded_files import keep_damaged, read_from
from common.limits.parsers import parse_json
from runner.recovery.evidence import CheckpointState
from runner.recovery.finding import Problem, Repair, Severity
from runner.recovery.run_record import recorded
from runner.run_dir.contents import DEFAULT_METADATA, MAX_JSON_BYTES, RUN_FILE, check_fields

ATTEMPT_FILE = re.compile(r"metrics\.attempt(\d{1,6})\.jsonl")
TAIL_BYTES = 1 << 16  # of metrics.jsonl, where its last record is
LOST_RECORD = "run.json was lost, and the checkpoint does not know whether earlier resumes were exact"


def check_run_json(evidence: CheckpointState) -> Iterator[Repair]:
    """Yield the finding about run.json, and about the checkpoint that it names."""
    folder = evidence.folder
    try:
        fields = read_fields(folder)
    except FileNotFoundError:
        yield _restore(evidence, "missing")
        return
    except (OSError, ValueError) as error:
        yield _restore(evidence, f"cannot be read: {error}")
        return
    own_id, saved_id = fields.get("id"), evidence.record["fields"].get("id")
    if own_id and saved_id and own_id != saved_id:
        yield _restore(evidence, "of another run than the checkpoints")
        return
    yield Repair(Problem(RUN_FILE, Severity.SOUND, f"{fields['status']}, step {fields['step']}"))
    yield from _check_named_checkpoint(fields.get("checkpoint"), evidence)


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the content of run.json. Raises OSError if it cannot be read, ValueError if it is damaged."""
    return check_fields(parse_json(read_bounded(folder / RUN_FILE, MAX_JSON_BYTES)))


def _check_named_checkpoint(named: str | None, evidence: CheckpointState) -> Iterator[Repair]:
    if named is None or named in evidence.names or (evidence.names and named < evidence.names[0]):
        return
    if evidence.names:
        consequence = f"the run continues from {evidence.names[0]}; the steps after it are trained again"
        yield Repair(
            Problem(
                f"checkpoints/{named}",
                Severity.DAMAGED,
                "missing, and run.json names it as the newest checkpoint",
                consequence,
            )
        )
        return
    state = f"there is no checkpoint, and run.json names {named}: the folder was deleted, or is on a disk that is not mounted"
    fix = f"mount or restore {evidence.folder / 'checkpoints'}, or start a new run with hydra.run.dir=DIR (init_from={_weights(evidence.folder)})"
    yield Repair(Problem("checkpoints", Severity.BLOCKING, state, fix))


def _weights(folder: Path) -> str:
    return str(folder / "model") if (folder / "model").is_dir() else "DIR"


def _restore(evidence: CheckpointState, state: str) -> Repair:
    folder, whole = evidence.folder, evidence.newest_whole
    if whole is None:
        fix = "restore it or a checkpoint from a backup, or start a new run in another directory"
        return Repair(
            Problem(RUN_FILE, Severity.BLOCKING, f"{state}, and no whole checkpoint tells how far the run is", fix)
        )
    name, saved = whole
    try:
        rebuilt = rebuilt_fields(folder, name, saved)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        fix = "restore run.json from a backup, or start a new run in another directory"
        return Repair(
            Problem(RUN_FILE, Severity.BLOCKING, f"{state}, and state.json of {name} has no usable value: {error}", fix)
        )

    def apply() -> None:
        if (folder / RUN_FILE).is_file():
            keep_damaged(folder, RUN_FILE, read_from(folder / RUN_FILE, 0, MAX_JSON_BYTES))
        write_json(folder / RUN_FILE, rebuilt)

    action = f"written again from {name}"
    return Repair(Problem(RUN_FILE, Severity.DAMAGED, state, action, action), apply)


def rebuilt_fields(folder: Path, checkpoint: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of run.json as the checkpoint with this state.json knows them: of an interrupted run."""
    progress, facts, fields = state["progress"], state["compatibility"], recorded(state)["fields"]
    if not fields:  # of an earlier version
        sources = {
            "init_from": facts.get("init_from"),
            "tokenizer_source": facts.get("data.tokenizer"),
            "stage": facts.get("stage.name"),
        }
        fields = {**sources, "attempt": 1, "exact": False, "inexact_because": [LOST_RECORD]}
    counters = {name: progress[name] for name in ("step", "tokens", "loss_tokens")}
    attempt = max(fields.get("attempt", 1), newest_attempt(folder))
    known = {"tracker_id": state["tracker_id"], "evaluation": state.get("evaluation"), "checkpoint": checkpoint}
    return check_fields(
        {
            **DEFAULT_METADATA,
            **fields,
            **counters,
            **known,
            "attempt": attempt,
            "status": "interrupted",
            "outcome": None,
        }
    )


def newest_attempt(folder: Path) -> int:
    """Return the highest number of an attempt in the logs, 0 if there is none."""
    attempts = [int(match[1]) for path in folder.iterdir() if (match := ATTEMPT_FILE.fullmatch(path.name))]
    try:
        attempts += [
            int(parse_json(line)["attempt"])
            for line in read_from(folder / "metrics.jsonl", 0, TAIL_BYTES).splitlines()[-1:]
        ]
    except (OSError, ValueError, TypeError, KeyError):
        pass  # missing or damaged: the checkpoint and the archives know the others
    return max(attempts, default=0)
