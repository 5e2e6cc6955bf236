"""Field `run` of state.json: what the small files of a run directory are restored from.

The checksums of a checkpoint prove it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.filesystem import read_bounded
from common.guarded_files import MAX_TOKENIZER_BYTES
from data.tokenize.origin import COPIED_FILES, RUN_TOKENIZER
from runner.config.snapshot import CONFIG_FILE_NAME, SNAPSHOT_DIR
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import CONFIG_FILE, MAX_YAML_BYTES, OVERRIDES_FILE

# Fields of run.json that describe one process or the newest state: they are not restored, or the checkpoint itself
# knows them.
PASSING_FIELDS = {
    "status", "outcome", "error", "degraded", "ended", "host", "pid", "boot_id", "start_ticks", "checkpoint", "step", "tokens", "loss_tokens", "metrics", "export",
}  # fmt: skip
MAX_STORED_ATTEMPTS = 20  # newest records of attempts that a checkpoint stores
MAX_TEXT_BYTES = 1 << 18  # of all texts together


def record_run_dir(metadata: RunMetadata) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the record of the run directory as it is now; {} in a process that does not write
    there.

    The files are read once: a launch does not change them after it has begun to train.
    """
    if not metadata.is_writer:
        return dict
    files = {"files": read_settings_files(metadata.folder), "tokenizer": tokenizer_checksums(metadata.folder)}

    def record() -> dict[str, Any]:
        fields = {name: value for name, value in metadata.fields.items() if name not in PASSING_FIELDS}
        if isinstance(fields.get("attempts"), list):
            fields["attempts"] = fields["attempts"][-MAX_STORED_ATTEMPTS:]
        return {"fields": fields, **files}

    return record


def read_settings_files(folder: Path) -> dict[str, str]:
    """Return name -> text of the saved config, the overrides, and the copies of YAML files.

    Those that cannot be read are left out.
    """
    copies = sorted(path.relative_to(folder) for path in (folder / SNAPSHOT_DIR).rglob("*.yaml"))
    texts: dict[str, str] = {}
    for name in (CONFIG_FILE, OVERRIDES_FILE, *copies):
        try:
            text = read_bounded(folder / name, MAX_YAML_BYTES).decode("utf-8")
        except (OSError, ValueError):
            continue
        if is_settings_file(str(name)) and sum(map(len, texts.values())) + len(text) <= MAX_TEXT_BYTES:
            texts[str(name)] = text
    return texts


def is_settings_file(name: str) -> bool:
    """Return whether a checkpoint may restore the file `name` of a run directory."""
    copies = f"{SNAPSHOT_DIR}/"
    return name in (str(CONFIG_FILE), str(OVERRIDES_FILE)) or (
        name.startswith(copies) and bool(CONFIG_FILE_NAME.fullmatch(name.removeprefix(copies)))
    )


def tokenizer_checksums(folder: Path) -> dict[str, str]:
    """Return file -> sha256 of the run's copy of its tokenizer."""
    copies = (folder / RUN_TOKENIZER / name for name in COPIED_FILES)
    return {
        copy.name: hashlib.sha256(read_bounded(copy, MAX_TOKENIZER_BYTES)).hexdigest()
        for copy in copies
        if os.path.lexists(copy)
    }


def recorded(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the field `run` of a state.json with values of the right types: fields, files, tokenizer; each is {} in
    one of an earlier version.
    """
    run = (state or {}).get("run")
    parts = run if isinstance(run, dict) else {}
    record = {
        name: part if isinstance(part := parts.get(name), dict) else {} for name in ("fields", "files", "tokenizer")
    }
    record["files"] = {
        name: text for name, text in record["files"].items() if isinstance(text, str) and is_settings_file(name)
    }
    record["tokenizer"] = {name: digest for name, digest in record["tokenizer"].items() if name in COPIED_FILES}
    return record
