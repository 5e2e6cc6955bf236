"""Names of the files and folders of a run directory: what is guarded, what a launch writes before it trains, and whether there is a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.guarded_files import DAMAGED_DIR, check_own_files
from runner.checkpoint.atomic_dir import step_names

RUN_FILE, HYDRA_DIR = "run.json", ".hydra"
LOCK_FILE, OWNER_FILE = ".lock", ".owner.json"
# What a launch may have written to its directory before it trains
OWN_NAMES = {
    RUN_FILE,
    HYDRA_DIR,
    LOCK_FILE,
    f"{LOCK_FILE}.owner",
    OWNER_FILE,
    "logs",
    "tokenizer",
    "train.log",
    "metrics.jsonl",
    "samples.jsonl",
    "checkpoints",
}
# What is opened by its name, or written into: no links, nothing but regular files and folders. The JSON files and checkpoints are checked as they are read.
GUARDED_NAMES = (
    HYDRA_DIR,
    LOCK_FILE,
    OWNER_FILE,
    DAMAGED_DIR,
    "logs",
    "tokenizer",
    "model",
    "train.log",
    "console.log",
    "evaluations.jsonl",
    "incidents.jsonl",
    "report.html",
    "uninterrupted",
    "resumed",
)
GUARDED_PATTERNS = ("metrics.*jsonl", "samples.*jsonl")


def check_run_files(folder: Path) -> None:
    """Raise UserError if a file or folder that a run opens in `folder` is a link, or neither a regular file nor a folder."""
    logs = [path.name for pattern in GUARDED_PATTERNS for path in folder.glob(pattern)]
    check_own_files(folder, (*GUARDED_NAMES, *logs), shallow=("checkpoints",))


def holds_run(folder: Path) -> bool:
    """Return whether there is a run: its run.json, or checkpoints from which that can be restored."""
    return (folder / RUN_FILE).is_file() or has_checkpoints(folder)


def has_checkpoints(folder: Path) -> bool:
    """Return whether the run has checkpoints, whole or not."""
    return bool(step_names(folder / "checkpoints"))


def check_no_run(folder: Path, fields: Mapping[str, Any]) -> None:
    """Raise UserError if the directory of a new run holds one, or what is left of one."""
    if fields["status"] != "new" or has_checkpoints(folder):
        raise UserError(
            f"this directory already holds a run ({fields['status']}, step {fields['step']})",
            str(folder),
            f"resume={folder} continues it; hydra.run.dir=DIR places the new run in another directory",
        )
    if not (folder / RUN_FILE).exists() and size_of(folder / "metrics.jsonl"):
        fix = f"restore run.json or checkpoints/ and type resume={folder}; hydra.run.dir=DIR places a new run in another directory"
        raise UserError("this directory holds records of a run whose run.json and checkpoints are gone", str(folder), fix)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
