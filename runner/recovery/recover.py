"""The files of a run directory: what is wrong with each, and the repairs with which a resume begins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError
from common.guarded_files import read_from
from data.tokenize.origin import RUN_TOKENIZER
from runner.checkpoint import atomic_dir
from runner.checkpoint.format import CHECKPOINTS_DIR
from runner.recovery.evidence import CheckpointState
from runner.recovery.finding import Problem, Repair, Severity
from runner.recovery.run_json import check_run_json
from runner.recovery.settings_files import check_settings
from runner.recovery.tokenizer_files import check_tokenizer_files
from runner.run_dir.contents import HYDRA_DIR, RUN_FILE, check_run_files
from runner.run_dir.lock import unusable_error
from runner.tracking.jsonl import LogChecksum, inspect_log

LOGS = ("metrics", "samples")


def inspect_run(folder: Path) -> list[Problem]:
    """Return a finding for each file of the run that a resume reads, checkpoints and logs with all their bytes. Nothing
    is written.

    Raises UserError if one of them is a link, a pipe or a device.
    """
    evidence = CheckpointState(folder)
    check_run_files(folder)
    return [
        repair.finding for repair in (*plan_repairs(evidence), *_check_checkpoints(evidence), *_check_logs(evidence))
    ]


def recover_run(folder: Path) -> list[str]:
    """Repair what a resume of the run needs; return a message for each repair.

    The caller holds the lock of the directory.

    Raises UserError, having changed nothing, if something is lost that no checkpoint proves. Logs are repaired when
    they are opened.
    """
    repairs = plan_repairs(CheckpointState(folder))
    for finding in (repair.finding for repair in repairs):
        if finding.severity is Severity.BLOCKING:
            raise UserError(f"{finding.file}: {finding.state}", str(folder / finding.file), finding.consequence)
    try:
        for repair in repairs:
            repair.apply()
    except OSError as error:
        raise unusable_error(folder, error) from error
    return [
        f"{finding.file}: {finding.state}; {finding.consequence}"
        for repair in repairs
        if (finding := repair.finding).severity is Severity.DAMAGED
    ]


def plan_repairs(evidence: CheckpointState) -> list[Repair]:
    """Return the finding about each file that a resume restores or refuses to be without."""
    return [
        *check_run_json(evidence),
        *check_settings(evidence),
        *check_tokenizer_files(evidence),
        *_check_kinds(evidence.folder),
    ]


def _check_kinds(folder: Path) -> Iterator[Repair]:
    for name in (RUN_FILE, *(f"{log}.jsonl" for log in LOGS)):
        if (folder / name).is_dir():
            yield Repair(Problem(name, Severity.BLOCKING, "a folder, not a file", "move it out of the run directory"))
    for name in (HYDRA_DIR, RUN_TOKENIZER, CHECKPOINTS_DIR):
        if (folder / name).is_file():
            yield Repair(Problem(name, Severity.BLOCKING, "a file, not a folder", "move it out of the run directory"))


def _check_checkpoints(evidence: CheckpointState) -> Iterator[Repair]:
    for name in evidence.names:
        folder = evidence.folder / CHECKPOINTS_DIR / name
        reason = atomic_dir.verify_dir(folder)
        foreign = [] if reason else atomic_dir.foreign_names(folder)
        file = f"{CHECKPOINTS_DIR}/{name}"
        if reason:
            yield Repair(Problem(file, Severity.DAMAGED, reason, "skipped: the newest whole checkpoint is used"))
        elif foreign:
            yield Repair(Problem(file, Severity.NOTE, f"whole; not part of it and not read: {', '.join(foreign[:4])}"))
        else:
            yield Repair(Problem(file, Severity.SOUND, "whole"))
    if evidence.names and evidence.newest_whole is None:
        yield Repair(
            Problem(
                CHECKPOINTS_DIR,
                Severity.BLOCKING,
                "no checkpoint is whole",
                "restore one from a backup, or start a new run",
            )
        )


def _check_logs(evidence: CheckpointState) -> Iterator[Repair]:
    if evidence.newest_whole is None:
        return
    _, saved = evidence.newest_whole
    proof = LogChecksum.of_state(saved)
    for name in LOGS:
        path = evidence.folder / f"{name}.jsonl"
        if path.is_dir():
            continue
        content = read_from(path, 0) if os.path.lexists(path) else None
        damage = inspect_log(name, content, saved["log"].get(name, 0), proof)
        if damage is None:
            yield Repair(Problem(path.name, Severity.SOUND, "whole up to the checkpoint"))
        else:
            yield Repair(
                Problem(path.name, Severity.DAMAGED, damage.state, damage.consequence("damaged/"), "done by resume=")
            )
