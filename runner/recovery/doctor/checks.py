"""Findings about files that a resume does not need.

Pointers, model/, temporary and foreign files, the lock, the free space. The weights in `model/` are compared with the
checkpoint that they were exported from, byte by byte and without torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common import filesystem
from common.errors import UserError
from common.filesystem import make_dirs, read_bounded
from common.guarded_files import DAMAGED_DIR, open_source_file
from common.limits.parsers import parse_json
from common.ownership import is_owner_file
from models.formats.stored_size import stored_size
from runner.checkpoint import atomic_dir
from runner.checkpoint.format import CHECKPOINTS_DIR, TENSOR_FILES
from runner.checkpoint.retention import BEST_DIR, BEST_POINTER, find_best_weights
from runner.recovery.evidence import CheckpointState
from runner.recovery.finding import Problem, Repair, Severity
from runner.run_dir.contents import GUARDED_NAMES, LOCK_FILE, OWN_NAMES
from runner.run_dir.lock import describe_holder, is_locked
from runner.run_dir.metadata import RunMetadata
from runner.tracking.config import TRACKERS

LENGTH_BYTES = 8  # before the header of a safetensors file


def compare_with_checkpoint(folder: Path, export: dict[str, Any], files: list[Path]) -> tuple[bool, str]:
    """Return (whether no tensor differs, what was compared).

    `export`: of run.json; `files`: the weights in `model/`, whose headers are right.
    """
    step = export.get("step")
    source = find_best_weights(folder / CHECKPOINTS_DIR, step) if isinstance(step, int) else None
    described = f"{export.get('weights')} weights of step {step}"
    if source is None:
        return True, f"{described}, which are in no checkpoint any more"
    saved = tensor_checksums(source / TENSOR_FILES["model"])
    exported = set[str]().union(*map(tensor_checksums, files))
    equal = len(saved & exported)
    if equal == 0:  # another type or layout
        return True, f"{described}, in another form than in {source.name}"
    return equal == len(saved), f"{described}: {equal} of {len(saved)} tensors are those of {source.name}"


def tensor_checksums(path: Path) -> set[str]:
    """Return the sha256 of the bytes of each tensor in a safetensors file."""
    fd, _ = open_source_file(path)
    with open(fd, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = parse_json(file.read(length))
        checksums = set()
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                file.seek(LENGTH_BYTES + length + start)
                checksums.add(hashlib.sha256(file.read(end - start)).hexdigest())
    return checksums


LATEST_POINTER = "latest"
MAX_POINTER_BYTES = 200
OTHER_NAMES = {"report.html", "diagnosis.json"}
TEMPORARY = (".tmp-", ".del-")
MAX_FOREIGN = 20  # findings about foreign files


def check_other_files(evidence: CheckpointState, holds_lock: bool = False) -> Iterator[Repair]:
    """Yield the findings of this module about one run. `holds_lock`: whether this process has locked it."""
    folder = evidence.folder
    is_busy = not holds_lock and is_locked(folder)
    if is_busy:
        state = f"held by {describe_holder(folder)}"
        yield Repair(
            Problem(
                LOCK_FILE,
                Severity.BLOCKING,
                state,
                "wait for it to end; findings about files that it writes now may be wrong",
            )
        )
    yield from _check_pointers(evidence)
    yield from _check_model(folder)
    if not is_busy:  # otherwise they are of the process that trains
        yield from _check_temporary(folder)
    yield from _check_foreign(folder)
    yield from _check_space(evidence)


def _check_pointers(evidence: CheckpointState) -> Iterator[Repair]:
    """`latest` and `best` are for users; no code reads them."""
    checkpoints = evidence.folder / CHECKPOINTS_DIR
    if evidence.newest_whole is None:
        return
    newest, state = evidence.newest_whole
    best_step = state["progress"]["best_step"]
    best = None if best_step is None else find_best_weights(checkpoints, best_step)
    for pointer, name in ((LATEST_POINTER, newest), (BEST_POINTER, best.name if best else None)):
        file, actual = f"{CHECKPOINTS_DIR}/{pointer}", _read_pointer(checkpoints / pointer)
        # of an evaluation after the save
        is_later_best = pointer == BEST_POINTER and actual is not None and _is_whole(checkpoints / actual)
        if actual == name or is_later_best:
            yield from [Repair(Problem(file, Severity.SOUND, actual))] if actual else []
        elif name is not None:
            write = partial(atomic_dir.write_pointer, checkpoints, pointer, name)
            yield Repair(
                Problem(
                    file,
                    Severity.NOTE,
                    f"{actual or 'missing'}, should be {name}",
                    "for users only, no code reads it",
                    f"{name} written",
                ),
                write,
            )
    if best_step is not None and best is None:
        state_text = f"the weights of the best evaluation, step {best_step}, are not on disk"
        yield Repair(
            Problem(
                f"{CHECKPOINTS_DIR}/{BEST_POINTER}",
                Severity.DAMAGED,
                state_text,
                "model/ gets the last weights unless a better evaluation follows",
            )
        )


def _is_whole(folder: Path) -> bool:
    return folder.name in atomic_dir.valid_names(folder.parent) or (
        BEST_DIR.fullmatch(folder.name) is not None and atomic_dir.verify_dir(folder) is None
    )


def _read_pointer(path: Path) -> str | None:
    """Return the name of the checkpoint or of the folder of best weights in the file, None if it has none."""
    try:
        name = read_bounded(path, MAX_POINTER_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
    return name if atomic_dir.STEP_NAME.fullmatch(name) or BEST_DIR.fullmatch(name) else None


def _check_model(folder: Path) -> Iterator[Repair]:
    """A completed run has model/, with the weights of a checkpoint."""
    fields, model = RunMetadata.read(folder), folder / "model"
    export = fields.get("export")
    if not model.is_dir():
        if fields.get("status") == "completed" and export:
            consequence = "resume= with more steps writes it again; the weights are in checkpoints/"
            yield Repair(
                Problem("model", Severity.DAMAGED, "missing, and run.json says that it was written", consequence)
            )
        return
    files = sorted(model.glob("*.safetensors"))
    try:
        numbers = stored_size(files).parameters
        is_equal, text = compare_with_checkpoint(folder, export, files) if isinstance(export, dict) else (True, "")
        problem = None if files and is_equal else text or "no file of weights"
    except (UserError, OSError) as error:
        problem = error.message if isinstance(error, UserError) else str(error)
    if problem:
        yield Repair(
            Problem(
                "model",
                Severity.DAMAGED,
                problem,
                "the weights are in checkpoints/; resume= with more steps writes it again",
            )
        )
    else:
        yield Repair(Problem("model", Severity.SOUND, f"{numbers:,} numbers{f', {text}' if text else ''}"))


def _check_temporary(folder: Path) -> Iterator[Repair]:
    for parent in (folder, folder / CHECKPOINTS_DIR):
        names = [name for name in (os.listdir(parent) if parent.is_dir() else []) if name.startswith(TEMPORARY)]
        for name in sorted(names):
            file = str((parent / name).relative_to(folder))
            yield Repair(
                Problem(
                    file, Severity.NOTE, "left by a launch that was killed", "removed by the next resume=", "removed"
                ),
                partial(_remove, parent / name),
            )


def _remove(path: Path) -> None:
    if os.path.lexists(path):  # opening the run has removed it already
        filesystem.remove_tree(path)


def _check_foreign(folder: Path) -> Iterator[Repair]:
    known = {*OWN_NAMES, *GUARDED_NAMES, *OTHER_NAMES, *TRACKERS.names()}
    names = [
        name
        for name in os.listdir(folder)
        if name not in known
        and not _is_log(name)
        and not is_owner_file(LOCK_FILE, name)
        and not name.startswith(TEMPORARY)
    ]
    for name in sorted(names)[:MAX_FOREIGN]:
        yield Repair(Problem(name, Severity.NOTE, "not a file of this program", "not read"))
    checkpoints = folder / CHECKPOINTS_DIR
    for name in atomic_dir.valid_names(checkpoints):
        for other in atomic_dir.foreign_names(checkpoints / name)[:MAX_FOREIGN]:
            path, action = checkpoints / name / other, f"moved to {DAMAGED_DIR}/"
            finding = Problem(
                str(path.relative_to(folder)), Severity.NOTE, "not a file of this checkpoint", "not read", action
            )
            yield Repair(finding, partial(_move_aside, folder, path))


def _is_log(name: str) -> bool:
    return name.startswith(("metrics.", "samples.")) and name.endswith("jsonl")


def _move_aside(folder: Path, path: Path) -> None:
    target = folder / DAMAGED_DIR / path.relative_to(folder)
    make_dirs(target.parent)
    if not os.path.lexists(target):
        filesystem.fs.rename(path, target)


def _check_space(evidence: CheckpointState) -> Iterator[Repair]:
    """The next save needs as many bytes as the newest checkpoint has."""
    if evidence.newest_whole is None:
        return
    checkpoint = evidence.folder / CHECKPOINTS_DIR / evidence.newest_whole[0]
    need = sum(path.lstat().st_size for path in checkpoint.iterdir()) + atomic_dir.RESERVED_BYTES
    free = filesystem.fs.free(evidence.folder)
    text = f"{free:,} bytes free, the next save needs {need:,}"
    if free < need:
        yield Repair(Problem("disk", Severity.DAMAGED, text, "saves fail until there is space"))
    else:
        yield Repair(Problem("disk", Severity.SOUND, text))
