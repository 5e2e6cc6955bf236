"""What a resume restores of a run directory: files that are lost or damaged, from the newest checkpoint that proves them.

Field `run` of state.json has fields of run.json, the texts of `.hydra/` and the checksums of the tokenizer. Damaged files
are kept in `damaged/`. doctor.py prints the same problems.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.filesystem import json_bytes, make_dirs, read_bounded, read_texts, write_atomic_file
from common.guarded_files import (
    GENERATION_CONFIG,
    MAX_TOKENIZER_BYTES,
    check_own_files,
    keep_damaged,
    last_records,
    read_from,
    read_source_file,
)
from common.limits import parse_json, parse_yaml
from data.tokenize.origin import COPIED_FILES, RUN_TOKENIZER, generation_config_of_run
from runner.checkpoint import atomic_dir
from runner.checkpoint.format import CHECKPOINTS_DIR, read_newest_state, read_state
from runner.config.overrides import is_override_list
from runner.config.snapshot import CONFIG_FILE_NAME, SNAPSHOT_DIR, load_overrides
from runner.run_dir.contents import (
    DEFAULT_METADATA,
    HYDRA_DIR,
    MAX_JSON_BYTES,
    RUN_FILE,
    check_fields,
    check_run_files,
)
from runner.run_dir.lock import unusable_error
from runner.run_dir.saved_config import CONFIG_FILE, MAX_YAML_BYTES, OVERRIDES_FILE, load_saved_config
from runner.tracking.jsonl import SavedLogs, inspect_log

CONFIG, OVERRIDES, COPIES = str(CONFIG_FILE), str(OVERRIDES_FILE), f"{SNAPSHOT_DIR}/"
LOGS = ("metrics", "samples")
ARCHIVE = re.compile(r"metrics\.attempt(\d{1,6})\.jsonl")
MAX_TEXT_BYTES = 1 << 18  # of all texts together


def read_stored_files(folder: Path, settings: Path) -> dict[str, dict[str, str]]:
    """Return what a checkpoint stores of the files of a run: the texts of `.hydra/` in `settings`, the checksums of the
    tokenizer in `folder`.

    A launch reads them once: it does not change them after it has begun to train.
    """
    tokenizer = [file for name in COPIED_FILES if os.path.lexists(file := folder / RUN_TOKENIZER / name)]
    checksums = {file.name: _sha256(read_bounded(file, MAX_TOKENIZER_BYTES)) for file in tokenizer}
    copies = sorted(str(path.relative_to(settings)) for path in (settings / SNAPSHOT_DIR).rglob("*.yaml"))
    names = [name for name in (CONFIG, OVERRIDES, *copies) if _is_settings_file(name)]
    return {"files": read_texts(settings, names, MAX_TEXT_BYTES), "tokenizer": checksums}


def _is_settings_file(name: object) -> bool:
    """Return whether a checkpoint may restore the file `name` of a run directory."""
    if not isinstance(name, str):
        return False
    return name in (CONFIG, OVERRIDES) or (
        name.startswith(COPIES) and CONFIG_FILE_NAME.fullmatch(name.removeprefix(COPIES)) is not None
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Severity(StrEnum):
    """What a problem means for the run, mildest first."""

    SOUND = "ok"
    NOTE = "note"  # nothing is lost
    DAMAGED = "damaged"  # something is lost, a resume continues
    BLOCKING = "blocks"  # a resume refuses


@dataclass(frozen=True)
class Problem:
    """`state` says what is wrong with `file`, `consequence` what is lost or what resume= does about it, `repair` what
    doctor.py repair=true does.
    """

    file: str  # relative to the run directory
    severity: Severity
    state: str  # e.g. "whole", "missing", "model.safetensors: wrong checksum"
    consequence: str = ""
    repair: str | None = None  # None: nothing to repair, or not without the user
    content: bytes | None = None  # that a resume writes to the file
    apply: Callable[[], object] = lambda: None  # what doctor.py does besides


def _restored(file: str, state: str, action: str, content: bytes) -> Problem:
    return Problem(file, Severity.DAMAGED, state, action, action, content)


class CheckpointState:
    """What the checkpoints of the run in `folder` prove by their checksums.

    Read when asked for: a sound run is resumed without verifying a checkpoint twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, folder / CHECKPOINTS_DIR

    @cached_property
    def names(self) -> list[str]:
        """Names of the checkpoints, whole or not, newest first."""
        return atomic_dir.step_names(self.checkpoints)

    @cached_property
    def newest_whole(self) -> tuple[str, dict[str, Any]] | None:
        """Name and state.json of the newest checkpoint all of whose files have their checksums; None if there is none."""
        checkpoint, _ = atomic_dir.newest_valid(self.checkpoints)
        return None if checkpoint is None else (checkpoint.name, read_state(checkpoint))

    @cached_property
    def record(self) -> dict[str, dict[str, Any]]:
        """Fields, files and tokenizer of the run directory in the newest state.json, of the right types."""
        return stored_record(read_newest_state(self.folder) or {})


def stored_record(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return fields, files and tokenizer of the run directory in the state.json `saved`, of the right types."""
    run = saved.get("run")
    parts = [run.get(name) if isinstance(run, dict) else None for name in ("fields", "files", "tokenizer")]
    fields, files, tokenizer = (part if isinstance(part, dict) else {} for part in parts)
    return {
        "fields": fields,
        "files": {name: text for name, text in files.items() if _is_settings_file(name) and isinstance(text, str)},
        "tokenizer": {name: checksum for name, checksum in tokenizer.items() if name in COPIED_FILES},
    }


def recover_run(folder: Path) -> list[str]:
    """Repair what a resume of the run needs; return a message for each repair.

    The caller holds the lock of the directory.

    Raises UserError, having changed nothing, if something is lost that no checkpoint proves. Logs are repaired when
    they are opened.
    """
    problems = _check_restorable(CheckpointState(folder))
    if blocking := first_blocking(problems):
        raise UserError(f"{blocking.file}: {blocking.state}", folder / blocking.file, blocking.consequence)
    try:
        for problem in problems:
            if problem.content is not None:
                _restore(folder, problem.file, problem.content)
    except OSError as error:
        raise unusable_error(folder, error) from error
    lost = (problem for problem in problems if problem.severity is Severity.DAMAGED)
    return [f"{problem.file}: {problem.state}; {problem.consequence}" for problem in lost]


def first_blocking(problems: list[Problem]) -> Problem | None:
    return next((problem for problem in problems if problem.severity is Severity.BLOCKING), None)


def _restore(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    if path.is_file():
        keep_damaged(folder, name, read_from(path, 0, MAX_TOKENIZER_BYTES))
    make_dirs(path.parent)
    write_atomic_file(path, content)


def inspect_run(state: CheckpointState) -> list[Problem]:
    """Return the state of each file of the run that a resume reads, checkpoints and logs with all their bytes. Nothing
    is written.

    Raises UserError if one of them is a link, a pipe or a device.
    """
    check_run_files(state.folder)
    return [*_check_restorable(state), *_check_checkpoints(state), *_check_logs(state)]


def _check_restorable(state: CheckpointState) -> list[Problem]:
    """Return the state of each file that a resume restores or refuses to be without."""
    return [*_check_run_json(state), *_check_settings(state), *_check_tokenizer(state), *_check_kinds(state.folder)]


def _check_run_json(state: CheckpointState) -> Iterator[Problem]:
    """Yield whether run.json is whole and of this run, and whether there is the checkpoint that it names."""
    try:
        fields = check_fields(parse_json(read_bounded(state.folder / RUN_FILE, MAX_JSON_BYTES)))
    except FileNotFoundError:
        yield _run_json_again(state, "missing")
        return
    except (OSError, ValueError) as error:
        yield _run_json_again(state, f"cannot be read: {error}")
        return
    saved_id = state.record["fields"].get("id")
    if fields["id"] and saved_id and fields["id"] != saved_id:
        yield _run_json_again(state, "of another run than the checkpoints")
        return
    yield Problem(RUN_FILE, Severity.SOUND, f"{fields['status']}, step {fields['step']}")
    named, names = fields.get("checkpoint"), state.names
    if named is None or named in names or (names and named < names[0]):
        return
    if names:
        consequence = f"the run continues from {names[0]}; the steps after it are trained again"
        damage = "missing, and run.json names it as the newest checkpoint"
        yield Problem(f"{CHECKPOINTS_DIR}/{named}", Severity.DAMAGED, damage, consequence)
        return
    weights = state.folder / "model" if (state.folder / "model").is_dir() else "DIR"
    damage = f"there is no checkpoint, and run.json names {named}: the folder was deleted, or is on a disk that is not mounted"
    fix = f"mount or restore {state.checkpoints}, or start a new run with hydra.run.dir=DIR (init_from={weights})"
    yield Problem(CHECKPOINTS_DIR, Severity.BLOCKING, damage, fix)


def _run_json_again(state: CheckpointState, damage: str) -> Problem:
    if state.newest_whole is None:
        damage += ", and no whole checkpoint tells how far the run is"
        fix = "restore it or a checkpoint from a backup, or start a new run in another directory"
        return Problem(RUN_FILE, Severity.BLOCKING, damage, fix)
    name, saved = state.newest_whole
    try:
        content = json_bytes(fields_of_checkpoint(state.folder, name, saved))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        damage += f", and state.json of {name} has no usable value: {error}"
        fix = "restore run.json from a backup, or start a new run in another directory"
        return Problem(RUN_FILE, Severity.BLOCKING, damage, fix)
    return _restored(RUN_FILE, damage, f"written again from {name}", content)


def fields_of_checkpoint(folder: Path, checkpoint: str, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of run.json as the checkpoint with the state.json `saved` knows them: of an interrupted run."""
    fields = DEFAULT_METADATA | saved["run"]["fields"]
    fields |= {name: saved["progress"][name] for name in ("step", "tokens", "loss_tokens")}
    fields |= {"tracker_id": saved["tracker_id"], "evaluation": saved["evaluation"], "checkpoint": checkpoint}
    attempt = max(fields["attempt"], _newest_attempt(folder))
    return check_fields(fields | {"attempt": attempt, "status": "interrupted", "outcome": None})


def _newest_attempt(folder: Path) -> int:
    """Return the highest number of an attempt in the last records of metrics.jsonl and in the names of its archives."""
    archived = [int(match[1]) for path in folder.iterdir() if (match := ARCHIVE.fullmatch(path.name))]
    recorded = [record.get("attempt") for record in last_records(folder / "metrics.jsonl")]
    return max([*archived, *(number for number in recorded if isinstance(number, int))], default=0)


def _check_settings(state: CheckpointState) -> Iterator[Problem]:
    """Yield the state of the saved config, the overrides, and the copies of YAML files."""
    folder, texts = state.folder, state.record["files"]
    check_own_files(folder, (HYDRA_DIR,))
    for name, load in ((CONFIG, load_saved_config), (OVERRIDES, load_overrides)):
        if name not in texts:
            try:
                load(folder)
                yield Problem(name, Severity.SOUND, "whole")
            except UserError as error:
                yield Problem(name, Severity.BLOCKING, error.message, error.fix)
    damages = {name: _settings_damage(folder / name, name, text) for name, text in texts.items()}
    if damages.get(CONFIG) and OVERRIDES in texts and damages[OVERRIDES] is None:
        # the config that newer overrides were typed for is restored as it was before
        saved = parse_yaml(texts[OVERRIDES]) or []
        if newer := [override for override in load_overrides(folder) if override not in saved]:
            damages[OVERRIDES] = f"newer than the saved config that can be restored: type {' '.join(newer)} again"
    for name, damage in damages.items():
        if damage is None:
            yield Problem(name, Severity.SOUND, "whole")
        else:
            yield _restored(name, damage, "restored from the checkpoint", texts[name].encode())


def _settings_damage(path: Path, name: str, text: str) -> str | None:
    """Return what is wrong with the file in whose place the checkpoint has `text`, None if nothing is.

    A file that was edited and can be read is whole.
    """
    try:
        content, whole = read_bounded(path, MAX_YAML_BYTES), text.encode()
        if content == whole:
            return None
        if whole.startswith(content):
            return f"cut off after {len(content):,} of {len(whole):,} bytes"
        tree, saved = parse_yaml(content.decode()), parse_yaml(text)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        return f"cannot be read: {' '.join(str(error).split())[:200]}"
    if name == OVERRIDES:
        return None if is_override_list(tree) else "not a list of overrides"
    if not isinstance(tree, dict):
        return None if tree is saved is None else "not a mapping"
    missing = _missing_settings(saved, tree) if name == CONFIG and isinstance(saved, dict) else []
    return f"without the settings {', '.join(missing[:4])}{' ...' * (len(missing) > 4)}" if missing else None


def _missing_settings(saved: dict[str, Any], tree: dict[str, Any]) -> list[str]:
    """Return the settings of `saved` that `tree` lacks.

    Of a section for which another option was chosen since, the settings differ.
    """
    missing = [key for key in saved if key not in tree]
    for section, values in saved.items():
        current = tree.get(section)
        if isinstance(values, dict) and isinstance(current, dict) and values.get("name") == current.get("name"):
            missing += [f"{section}.{key}" for key in values if key not in current]
    return missing


def _check_tokenizer(state: CheckpointState) -> Iterator[Problem]:
    """Yield the state of the files of `tokenizer/`; a file with the checksum of the checkpoint replaces another one."""
    for file, checksum in state.record["tokenizer"].items():
        name, damage = f"{RUN_TOKENIZER}/{file}", None
        try:
            if _sha256(read_bounded(state.folder / name, MAX_TOKENIZER_BYTES)) != checksum:
                damage = "not the file that the checkpoint was trained with"
        except FileNotFoundError:
            damage = "missing"
        except OSError as error:
            damage = f"cannot be read: {error.strerror or error}"
        if damage is None:
            yield Problem(name, Severity.SOUND, "whole")
            continue
        source, init_from = (state.record["fields"].get(field) for field in ("tokenizer_source", "init_from"))
        folders = [*([Path(source)] if isinstance(source, str) else []), state.folder / "model"]
        copies = _tokenizer_copies(file, folders, init_from)
        if (content := next((content for content in copies if _sha256(content) == checksum), None)) is not None:
            yield _restored(name, damage, "copied again from the tokenizer that it came from", content)
        else:
            fix = f"put a file of sha256 {checksum} there: no copy of it is in {' or '.join(map(str, folders))}"
            yield Problem(name, Severity.BLOCKING, damage, fix)


def _tokenizer_copies(file: str, folders: list[Path], init_from: object) -> Iterator[bytes]:
    """Yield each content that the file may have had: copies, and generation_config.json as a run derives it."""
    for folder in folders:
        with suppress(OSError, ValueError):
            yield read_source_file(folder / file, MAX_TOKENIZER_BYTES)
    if file == GENERATION_CONFIG and isinstance(init_from, str):
        with suppress(OSError, ValueError):
            yield generation_config_of_run(folders[0], init_from) or b""


def _check_kinds(folder: Path) -> Iterator[Problem]:
    fix = "move it out of the run directory"
    for name in (RUN_FILE, *(f"{log}.jsonl" for log in LOGS)):
        if (folder / name).is_dir():
            yield Problem(name, Severity.BLOCKING, "a folder, not a file", fix)
    for name in (HYDRA_DIR, RUN_TOKENIZER, CHECKPOINTS_DIR):
        if (folder / name).is_file():
            yield Problem(name, Severity.BLOCKING, "a file, not a folder", fix)


def _check_checkpoints(state: CheckpointState) -> Iterator[Problem]:
    for name in state.names:
        file = f"{CHECKPOINTS_DIR}/{name}"
        if reason := atomic_dir.verify_dir(state.checkpoints / name):
            yield Problem(file, Severity.DAMAGED, reason, "skipped: the newest whole checkpoint is used")
        elif foreign := atomic_dir.foreign_names(state.checkpoints / name):
            yield Problem(file, Severity.NOTE, f"whole; not part of it and not read: {', '.join(foreign[:4])}")
        else:
            yield Problem(file, Severity.SOUND, "whole")
    if state.names and state.newest_whole is None:
        fix = "restore one from a backup, or start a new run"
        yield Problem(CHECKPOINTS_DIR, Severity.BLOCKING, "no checkpoint is whole", fix)


def _check_logs(state: CheckpointState) -> Iterator[Problem]:
    if state.newest_whole is None:
        return
    _, saved = state.newest_whole
    for name in LOGS:
        path = state.folder / f"{name}.jsonl"
        if path.is_dir():
            continue
        content = read_from(path, 0) if os.path.lexists(path) else None
        damage = inspect_log(name, content, SavedLogs.of_state(saved))
        if damage is None:
            yield Problem(path.name, Severity.SOUND, "whole up to the checkpoint")
        else:
            lost = damage.consequence("damaged/")
            yield Problem(path.name, Severity.DAMAGED, damage.state, lost, "done by resume=")
