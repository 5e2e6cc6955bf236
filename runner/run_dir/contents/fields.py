"""Fields of run.json: their types and defaults, what is read of them, and what JSON lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import Outcome, UserError
from common.filesystem import read_bounded
from common.limits.parsers import parse_json

MAX_JSON_BYTES = 16 << 20  # bytes; larger JSON files are not read
RUN_STATUSES = ("new", "running", "interrupted", "failed", "completed")
DEFAULT_METADATA: dict[str, Any] = {
    "status": "new",
    "outcome": None,  # how the last attempt ended: completed, interrupted, diverged, failed
    "attempt": 0,  # launches that began to train in this directory
    "step": 0,  # optimizer steps
    "tokens": 0,
    "metrics": {},
    "error": None,
    "exact": True,  # every resume so far was bitwise equal to a run without interruption
    "inexact_because": [],
    "attempts": [],  # of each: when and how it ran, with what code, libraries, processor, ranks, threads and settings
    "degraded": None,  # message of a disk problem that training survives
    "model": None,  # name of its architecture, for reports
    "name": "",  # run.name, run.tags and run.note
    "tags": [],
    "note": "",
    "init_from": None,
    "tokenizer_source": None,  # folder that tokenizer/ was copied from
    "evaluation": None,  # what identifies the evaluation rows
    "export": None,  # the weights in model/: best or last, step, evaluation loss
    "evaluations": [],  # newest results of evaluate.py: a repeated evaluation replaces its record
    "fingerprints": {},
    "id": None,  # of the run: its checkpoints have it, too
    "recovered": [],  # what resumes have repaired, or could not restore
    "weaker_promises": [],  # what the file system of the directory cannot do
}
# Types of the fields that are read again; None is allowed where the default is None, and for those that are absent at first
FIELD_TYPES = {name: type(value) for name, value in DEFAULT_METADATA.items() if value is not None} | {
    "outcome": str, "error": str, "degraded": str, "init_from": str, "tokenizer_source": str, "evaluation": dict, "export": dict, "id": str,
    "checkpoint": str, "stage": str, "model": str, "changed": list, "tracker_id": str, "attempts": list, "loss_tokens": int,
}  # fmt: skip


def has_started(fields: Mapping[str, Any]) -> bool:
    """Return whether training began at least once: such a run is resumed, not started."""
    return bool(fields.get("attempt"))


def has_diverged(fields: Mapping[str, Any]) -> bool:
    return fields.get("outcome") == Outcome.DIVERGED


def exported_loss(fields: Mapping[str, Any]) -> float | str | None:
    """Return the loss that a completed run hands to a sweep: of the evaluation of the weights in model/, otherwise the last training loss.

    "inf" where none was finite, None where nothing was trained.
    """
    metrics, export = fields.get("metrics"), fields.get("export")
    if not isinstance(metrics, dict) or not metrics:
        return None  # train.verify_resume
    losses = [*([export.get("loss")] if isinstance(export, dict) else []), metrics.get("val_loss"), metrics.get("loss")]
    loss = next((value for value in losses if isinstance(value, int | float)), None)
    return "inf" if loss is None else float(loss)


def timestamp() -> str:
    """Return the local time in ISO format, in seconds."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def check_fields(fields: Any) -> dict[str, Any]:
    """Return the content of run.json with defaults for a new run. Raises ValueError if it is damaged or of an older version."""
    if not isinstance(fields, dict) or fields.get("status") not in RUN_STATUSES:
        raise ValueError(f"unknown status {fields.get('status') if isinstance(fields, dict) else ''}")
    if "outcome" not in fields:
        raise ValueError("no field `outcome`, it was written by an older version of this program")
    for name, kind in FIELD_TYPES.items():
        value = fields.get(name, DEFAULT_METADATA.get(name))
        if type(value) is not kind and not (value is None and DEFAULT_METADATA.get(name) is None):
            raise ValueError(f"{name} is not of type {kind.__name__}")
    return {**DEFAULT_METADATA, **fields}


def load_fields(path: Path) -> dict[str, Any]:
    """Return the fields of run.json with defaults for a new run. Raises UserError if the file is damaged or of an older version."""
    try:
        return check_fields(parse_json(read_bounded(path, MAX_JSON_BYTES)))
    except FileNotFoundError:
        return check_fields(dict(DEFAULT_METADATA))
    except (OSError, ValueError) as error:
        fix = f"resume={path.parent} restores it from a checkpoint; or start a new run with init_from=DIR"
        raise UserError(f"run.json cannot be read: {error}", str(path), fix) from error


def to_json(value: Any) -> Any:
    """Return `value` with paths as text and with null for NaN and infinities, which JSON lacks."""
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
