"""Problems of files that a resume does not need, for doctor.py.

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
from common.filesystem import make_dirs
from common.guarded_files import DAMAGED_DIR, open_source_file
from common.limits import parse_json
from common.ownership import is_owner_file
from models.formats.stored_size import stored_size
from runner.checkpoint import atomic_dir
from runner.checkpoint.format import CHECKPOINTS_DIR, TENSOR_FILES, step_of
from runner.checkpoint.saving import BEST_POINTER, find_best_weights, read_pointer
from runner.launch.recovery import CheckpointState, Problem, Severity
from runner.run_dir.contents import GUARDED_NAMES, LOCK_FILE, OWN_NAMES, lacks_model
from runner.run_dir.lock import describe_holder, is_locked
from runner.run_dir.metadata import RunMetadata
from runner.tracking.config import TRACKERS

LENGTH_BYTES = 8  # before the header of a safetensors file
LATEST_POINTER = "latest"
OTHER_NAMES = {"report.html", "diagnosis.json"}
MAX_FOREIGN = 20  # problems of foreign files


def check_other_files(state: CheckpointState, holds_lock: bool = False) -> Iterator[Problem]:
    """Yield the problems of this module of one run. `holds_lock`: whether this process has locked it."""
    is_busy = not holds_lock and is_locked(state.folder)
    if is_busy:
        yield Problem(
            LOCK_FILE,
            Severity.BLOCKING,
            f"held by {describe_holder(state.folder)}",
            "wait for it to end; findings about files that it writes now may be wrong",
        )
    yield from _check_pointers(state)
    yield from _check_model(state)
    if not is_busy:  # otherwise they are of the process that trains
        yield from _check_temporary(state)
    yield from _check_foreign(state)
    yield from _check_space(state)


def _check_pointers(state: CheckpointState) -> Iterator[Problem]:
    """`latest` and `best` are for users and for commands that are given this path; a resume reads neither."""
    checkpoints = state.checkpoints
    if state.newest_whole is None:
        return
    newest, saved = state.newest_whole
    best_step, export = saved["progress"]["best_step"], RunMetadata.read(state.folder).get("export") or {}
    if export.get("weights") == "best" and isinstance(export.get("step"), int):
        best_step = export["step"]  # its evaluation may come after the save
    best = None if best_step is None else find_best_weights(checkpoints, best_step)
    for pointer, name in ((LATEST_POINTER, newest), (BEST_POINTER, best.name if best else None)):
        file, actual = f"{CHECKPOINTS_DIR}/{pointer}", read_pointer(checkpoints / pointer)
        # `best` may be of an evaluation after the save
        is_later_best = pointer == BEST_POINTER and actual and find_best_weights(checkpoints, step_of(actual))
        if actual and (actual == name or is_later_best):
            yield Problem(file, Severity.SOUND, actual)
        elif name is not None:
            yield Problem(
                file,
                Severity.NOTE,
                f"{actual or 'missing'}, should be {name}",
                "no resume reads it",
                f"{name} written",
                apply=partial(atomic_dir.write_pointer, checkpoints, pointer, name),
            )
    if best_step is not None and best is None:
        yield Problem(
            f"{CHECKPOINTS_DIR}/{BEST_POINTER}",
            Severity.DAMAGED,
            f"the weights of the best evaluation, step {best_step}, are not on disk",
            "model/ gets the last weights unless a better evaluation follows",
        )


def _check_model(state: CheckpointState) -> Iterator[Problem]:
    """A completed run has model/, with the weights of a checkpoint."""
    fields, model = RunMetadata.read(state.folder), state.folder / "model"
    export = fields.get("export")
    if not model.is_dir():
        if lacks_model(state.folder, fields):
            yield Problem(
                "model",
                Severity.DAMAGED,
                "missing, and run.json says that it was written",
                "resume= writes it again, from checkpoints/",
            )
        return
    files = sorted(model.glob("*.safetensors"))
    try:
        text = f"{stored_size(files).parameters:,} numbers"
        damage = "" if files else "no file of weights"
        if export:
            is_equal, compared = _compare_with_checkpoint(state, export, files)
            text, damage = f"{text}, {compared}", damage if is_equal else compared
    except (UserError, OSError) as error:
        damage = error.message if isinstance(error, UserError) else str(error)
    if damage:
        yield Problem(
            "model",
            Severity.DAMAGED,
            damage,
            "the weights are in checkpoints/; resume= with more steps writes it again",
        )
    else:
        yield Problem("model", Severity.SOUND, text)


def _compare_with_checkpoint(state: CheckpointState, export: dict[str, Any], files: list[Path]) -> tuple[bool, str]:
    """Return (whether no tensor differs, what was compared).

    `export`: of run.json; `files`: the weights in `model/`, whose headers are right.
    """
    step = export.get("step")
    source = find_best_weights(state.checkpoints, step) if isinstance(step, int) else None
    described = f"{export.get('weights')} weights of step {step}"
    if source is None:
        return True, f"{described}, which are in no checkpoint any more"
    saved = _tensor_checksums(source / TENSOR_FILES["model"])
    exported = set[str]().union(*map(_tensor_checksums, files))
    equal = len(saved & exported)
    # another type or layout (transformers saves experts one by one), or averages
    if equal == 0 or len(exported) > len(saved) or export.get("weights") == "ema":
        return True, f"{described}, in another form than in {source.name}"
    return equal == len(saved), f"{described}: {equal} of {len(saved)} tensors are those of {source.name}"


def _tensor_checksums(path: Path) -> set[str]:
    """Return the sha256 of the bytes of each tensor in a safetensors file."""
    fd, _ = open_source_file(path)
    with open(fd, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = parse_json(file.read(length))
        header.pop("__metadata__", None)
        checksums = set()
        for entry in header.values():
            start, end = entry["data_offsets"]
            file.seek(LENGTH_BYTES + length + start)
            checksums.add(hashlib.sha256(file.read(end - start)).hexdigest())
    return checksums


def _check_temporary(state: CheckpointState) -> Iterator[Problem]:
    """Opening a run, for a repair too, removes them."""
    paths = [path for parent in (state.folder, state.checkpoints) for path in parent.glob(".*")]
    for path in sorted(path for path in paths if path.name.startswith(atomic_dir.TEMPORARY)):
        yield Problem(
            str(path.relative_to(state.folder)),
            Severity.NOTE,
            "left by a launch that was killed",
            "removed by the next resume=",
            "removed",
        )


def _check_foreign(state: CheckpointState) -> Iterator[Problem]:
    folder, checkpoints = state.folder, state.checkpoints
    known = {*OWN_NAMES, *GUARDED_NAMES, *OTHER_NAMES, *TRACKERS.names()}
    names = [name for name in sorted({*os.listdir(folder)} - known) if not _is_own(name)]
    for name in names[:MAX_FOREIGN]:
        yield Problem(name, Severity.NOTE, "not a file of this program", "not read")
    for name in atomic_dir.valid_names(checkpoints):
        for other in atomic_dir.foreign_names(checkpoints / name)[:MAX_FOREIGN]:
            file = f"{CHECKPOINTS_DIR}/{name}/{other}"
            yield Problem(
                file,
                Severity.NOTE,
                "not a file of this checkpoint",
                "not read",
                f"moved to {DAMAGED_DIR}/",
                apply=partial(_move_aside, folder, file),
            )


def _is_own(name: str) -> bool:
    is_log = name.startswith(("metrics.", "samples.")) and name.endswith("jsonl")
    return is_log or is_owner_file(LOCK_FILE, name) or name.startswith(atomic_dir.TEMPORARY)


def _move_aside(folder: Path, file: str) -> None:
    target = folder / DAMAGED_DIR / file
    make_dirs(target.parent)
    if not os.path.lexists(target):
        filesystem.fs.rename(folder / file, target)


def _check_space(state: CheckpointState) -> Iterator[Problem]:
    """The next save is taken to be as large as the newest checkpoint."""
    if state.newest_whole is None:
        return
    checkpoint = state.checkpoints / state.newest_whole[0]
    need = atomic_dir.space_for(sum(path.lstat().st_size for path in checkpoint.iterdir()))
    free = filesystem.fs.free(state.folder)
    text = f"{free:,} bytes free, the next save needs {need:,}"
    if free < need:
        yield Problem("disk", Severity.DAMAGED, text, "saves fail until there is space")
    else:
        yield Problem("disk", Severity.SOUND, text)
