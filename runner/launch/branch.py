"""A run that continues the complete state of another one, its trunk, in a directory of its own:
`init_from=RUN@step-100 keep=optimizer`.

The new directory gets what a resume of the trunk from that checkpoint would read: settings, tokenizer, logs up to the
checkpoint, the checkpoint itself. From there on it is a resume. The trunk is only read, and may be deleted afterwards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from common.errors import AlreadyReported, UserError, did_you_mean_path, print_note
from common.filesystem import Chunks, open_regular, read_bounded, remove_quietly, temp_name, write_atomic_files
from common.guarded_files import MAX_TOKENIZER_BYTES, read_from
from common.limits import parse_yaml
from common.settings import setting_values
from data.tokenize.origin import COPIED_FILES, RUN_TOKENIZER
from runner.checkpoint import atomic_dir
from runner.checkpoint.compatibility import diff_facts, run_rules
from runner.checkpoint.format import CHECKPOINTS_DIR, STATE_FILE, TENSOR_FILES, checkpoint_files, read_state
from runner.checkpoint.manager import check_compatible
from runner.checkpoint.saving import find_best_weights, write_best_weights, write_checkpoint
from runner.config import compose, overrides, snapshot
from runner.config.hydra_errors import translating_hydra_errors
from runner.config.unread import check_typed_are_read
from runner.launch import recovery
from runner.launch.resume import (
    FIXED_KEYS,
    ResumePlan,
    effective_overrides,
    fixed_key_error,
    persisting_overrides,
    plan_resume,
    print_notes,
)
from runner.launch.run import check_inputs, run
from runner.run_dir.contents import HYDRA_DIR, check_run_files, create_unique, enclosing_run
from runner.run_dir.lock import refusing_disk_errors
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import CONFIG_FILE, MAX_YAML_BYTES, OVERRIDES_FILE

KEEP_KEY, START_KEY, RUN_DIR_KEY = "keep", "init_from", "hydra.run.dir"
USAGE = "init_from=RUN@step-N keep=optimizer, RUN a run directory"
# fields of run.json that say what happened in the directory of the trunk
FIELDS_OF_TRUNK = {"attempts", "changed", "evaluations", "export", "recovered"}


@dataclasses.dataclass(frozen=True)
class Trunk:
    """A checkpoint to branch from, and what it knows of its run."""

    run: Path
    checkpoint: Path
    saved: dict[str, Any]  # its state.json

    @property
    def files(self) -> dict[str, str]:
        """Texts of the settings with which the checkpoint was saved, by their name in a run directory."""
        return recovery.stored_record(self.saved)["files"]

    @property
    def overrides(self) -> list[str]:
        """Return the overrides with which the checkpoint was saved."""
        if (text := self.files.get(str(OVERRIDES_FILE))) is None:
            return snapshot.load_overrides(self.run)
        return snapshot.check_overrides_file(parse_yaml(text) or [], self.checkpoint / STATE_FILE)


def read_trunk(path: str) -> Trunk:
    """Return the checkpoint at `path`, the value of init_from. Raises UserError if it is none, or damaged."""
    checkpoint = Path(path)
    folder = enclosing_run(checkpoint) if checkpoint.is_absolute() else None
    if folder is None or checkpoint.parent != folder / CHECKPOINTS_DIR or not (checkpoint / STATE_FILE).is_file():
        text = "keep=optimizer continues a checkpoint of a run, with its optimizer"
        if not checkpoint.exists() and ("/" in path or "@" in path):
            text, fix = f"there is no {path}", did_you_mean_path(path.rpartition("@")[0] or path)
        else:
            fix = f"{START_KEY}={folder}@last keep=optimizer" if folder == checkpoint else USAGE
        raise UserError(text, f"{START_KEY}={path} keep=optimizer", fix)
    check_run_files(folder)
    if reason := atomic_dir.verify_dir(checkpoint):
        fix = f"{START_KEY}={folder}@last is the newest whole one"
        raise UserError(f"this checkpoint is damaged: {reason}", str(checkpoint), fix)
    return Trunk(folder, checkpoint, read_state(checkpoint))


def start_branch(typed: list[str]) -> None:
    """Train in a new run directory what the overrides `typed` ask for."""
    trunk, extra = _split(typed)
    of_dir = overrides.overrides_of(RUN_DIR_KEY, extra)
    extra, runtime = compose.typed_settings([override for override in extra if override not in of_dir])
    folder = Path(compose.compose_tree(of_dir).hydra.run.dir).absolute()
    with RunMetadata.open(folder if of_dir else create_unique(folder)) as metadata:
        before = metadata.fields
        try:
            plan = create_branch(metadata, trunk, extra)
            data_files = check_inputs(plan.config)
            with _naming(trunk, folder):
                compose.run_resumed(
                    lambda: run(plan.config, metadata, data_files), folder, plan.tree, plan.overrides, runtime
                )
        except UserError:
            for name in (CHECKPOINTS_DIR, *(f"{log}.jsonl" for log in recovery.LOGS)):
                remove_quietly(folder / name)
            metadata.revert(before)  # nothing was trained: the directory is discarded
            raise


def create_branch(metadata: RunMetadata, trunk: Trunk, extra: list[str]) -> ResumePlan:
    """Give the new run directory the state of `trunk` and the settings with the overrides `extra`; return these.

    A kill before the checkpoint is written leaves a directory that holds no run, later one whose settings a resume
    restores from the checkpoint. Raises UserError.
    """
    folder = metadata.folder
    staged = folder / temp_name("tmp", "branch")  # no settings of the trunk alone are ever in the directory
    try:
        with refusing_disk_errors(folder), _naming(trunk, staged):
            _write_files(staged, _settings_of(trunk))
            plan, before = plan_resume(staged, extra), plan_resume(staged, []).config
            check_compatible(
                diff_facts(setting_values(before), setting_values(plan.config), run_rules(plan.config)),
                trunk.checkpoint,
                trunk.run,
            )
            check_inputs(plan.config)
            check_typed_are_read(extra, [plan.config])
            with persisting_overrides(plan):
                step = _write_checkpoint(metadata, trunk, staged)
            remove_quietly(folder / HYDRA_DIR)  # of a launch that was killed
            os.replace(staged / HYDRA_DIR, folder / HYDRA_DIR)
            metadata.record_created()
    finally:
        remove_quietly(staged)
    print_note(f"branched from {trunk.run} at step {step}, with the settings saved there and the typed ones")
    print_notes(plan)
    return plan


def show_branch(typed: list[str], show: Callable[[Path, list[str]], None]) -> None:
    """Call `show` with a temporary directory that has the settings saved in the checkpoint, and the typed ones."""
    trunk, extra = _split(typed)
    with tempfile.TemporaryDirectory(prefix="branch-") as temp:
        folder = Path(temp).resolve()
        with _naming(trunk, folder):
            _write_files(folder, _settings_of(trunk))
            extra = [override for override in extra if overrides.key_of(override) != RUN_DIR_KEY]
            show(folder, extra)


def with_trunk_settings(typed: list[str]) -> list[str]:
    """Return the overrides of a sweep of branches: the settings of the trunk, and the typed ones."""
    parsed, starts = _parse(typed)
    found: list[list[str]] = []
    for trunk in map(read_trunk, starts):
        if fixed := next((override for override in parsed if override.key_or_group in FIXED_KEYS), None):
            raise fixed_key_error(fixed.key_or_group, str(fixed.input_line), trunk.run)
        kept, notes = effective_overrides(trunk.overrides, parsed)
        found.append([override for override in kept if overrides.key_of(override) != START_KEY])
        if found[0] != found[-1]:
            differing = " ".join(override for override in found[0] if override not in found[-1]) or "none"
            text = f"the checkpoints of a sweep must have the same settings; {starts[0]} was saved with others: {differing}"
            raise UserError(text, f"{START_KEY}={','.join(starts)}", "start a sweep for each of them")
        if len(found) == 1:
            for note in notes:
                print_note(note)
    print_note(f"branches of {starts[0]}, with the settings saved there and the typed ones")
    return [*found[0], *typed]


def branch_job(metadata: RunMetadata, start: str, job_overrides: Sequence[str]) -> None:
    """Create the branch that a job of a sweep is; `start` is its init_from, `job_overrides` are all of its overrides."""
    trunk = read_trunk(start)
    saved = trunk.overrides
    create_branch(metadata, trunk, [override for override in _own_overrides(job_overrides) if override not in saved])


def _parse(typed: list[str]) -> tuple[list[Override], list[str]]:
    """Return the parsed overrides, and the values of init_from: several in a sweep."""
    with translating_hydra_errors(typed):
        parsed = OverridesParser.create().parse_overrides(typed)
    start = next((override for override in reversed(parsed) if override.key_or_group == START_KEY), None)
    if start is None:
        raise UserError("keep=optimizer continues a checkpoint of a run", "keep=optimizer", USAGE)
    return parsed, [str(value) for value in (start.sweep_iterator() if start.is_sweep_override() else [start.value()])]


def _split(typed: list[str]) -> tuple[Trunk, list[str]]:
    """Return the checkpoint that the overrides of one run name, and those of a resume."""
    parsed, starts = _parse(typed)
    if several := next((override.input_line for override in parsed if override.is_sweep_override()), None):
        raise UserError("several values for one run", str(several), "add --multirun to branch once with each")
    return read_trunk(starts[0]), _own_overrides(typed)


def _own_overrides(typed: Sequence[str]) -> list[str]:
    return [override for override in typed if overrides.key_of(override) not in (START_KEY, KEEP_KEY)]


def _settings_of(trunk: Trunk) -> dict[str, bytes]:
    """Return the files of `.hydra/` by their name in a run directory: as the checkpoint has them, else as they are now."""
    folders = (trunk.run / snapshot.SNAPSHOT_DIR, trunk.run / snapshot.PLUGINS_DIR)
    found = [
        trunk.run / CONFIG_FILE,
        trunk.run / OVERRIDES_FILE,
        *(path for folder in folders for path in folder.rglob("*")),
    ]
    with _reading(trunk):
        now = {str(path.relative_to(trunk.run)): read_bounded(path, MAX_YAML_BYTES) for path in found if path.is_file()}
    return now | {name: text.encode() for name, text in trunk.files.items()}


def _files_of(trunk: Trunk) -> dict[str, bytes]:
    """Return the files of the tokenizer, and the logs up to the checkpoint, by their name in a run directory."""
    names = [f"{RUN_TOKENIZER}/{name}" for name in COPIED_FILES if (trunk.run / RUN_TOKENIZER / name).is_file()]
    with _reading(trunk):
        files = {name: read_bounded(trunk.run / name, MAX_TOKENIZER_BYTES) for name in names}
        for log, length in trunk.saved["log"].items():
            if log in recovery.LOGS and (source := trunk.run / f"{log}.jsonl").is_file():
                files[source.name] = read_from(source, 0)[:length]
    return files


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    write_atomic_files((folder / name, content) for name, content in files.items())


@contextmanager
def _reading(trunk: Trunk) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = f"resume={trunk.run} repairs it; or branch from another run"
        raise UserError(f"a file of the run cannot be read: {error}", str(trunk.run), fix) from error


def _write_checkpoint(metadata: RunMetadata, trunk: Trunk, settings: Path) -> int:
    """Write the checkpoint of the branch, whose settings are in the directory `settings`; return its step."""
    checkpoints, name, progress = metadata.folder / CHECKPOINTS_DIR, trunk.checkpoint.name, trunk.saved["progress"]
    best = progress["best_step"]
    if best not in (None, progress["step"]):
        if (weights := find_best_weights(trunk.run / CHECKPOINTS_DIR, best)) is None:
            print_note(
                f"the weights of the best evaluation of {trunk.run} until then, step {best}, were deleted: the best of the branch is chosen from here on"
            )
            progress = progress | {"best_loss": None, "best_step": None, "evals_since_best": 0}
        else:
            weights_file = _mapped(weights / TENSOR_FILES["model"])
            write_best_weights(checkpoints, best, progress["best_loss"], lambda: weights_file, len(weights_file))
    _write_files(metadata.folder, _files_of(trunk))
    manifest = read_bounded(trunk.checkpoint / atomic_dir.MANIFEST_FILE, atomic_dir.MAX_MANIFEST_BYTES)
    known = recovery.fields_of_checkpoint(trunk.run, name, trunk.saved)
    own = {
        "id": secrets.token_hex(8),
        "tracker_id": None,
        "branched_from": {
            "run": str(trunk.run),
            "step": progress["step"],
            "checkpoint": hashlib.sha256(manifest).hexdigest(),
        },
    }
    metadata.adopt({field: value for field, value in known.items() if field not in FIELDS_OF_TRUNK} | own)
    state = trunk.saved | {
        "progress": progress,
        "tracker_id": None,
        "run": recovery.record_run_dir(metadata, settings)(),
    }
    files: dict[str, Chunks | Callable[[], Chunks]] = {**checkpoint_files({}, state)}
    tensors = {file: _mapped(trunk.checkpoint / file) for file in TENSOR_FILES.values()}
    write_checkpoint(checkpoints, progress["step"], files | tensors, sum(map(len, tensors.values())))
    return int(progress["step"])


def _mapped(path: Path) -> memoryview:
    """Return the content of a file, which stays readable after the file is deleted."""
    fd, _ = open_regular(path)
    with open(fd, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@contextmanager
def _naming(trunk: Trunk, folder: Path) -> Iterator[None]:
    """Name the trunk in the errors of a refused branch, whose own `folder` does not stay."""
    try:
        yield
    except AlreadyReported:
        raise
    except UserError as error:
        texts = [error.message, error.setting, error.fix]
        for key in (f"{START_KEY}=", "resume=", "run=", ""):
            texts = [
                text.replace(f"{key}{folder}{'' if key else '/'}", f"{key}{trunk.run}{'' if key else '/'}")
                for text in texts
            ]
        raise UserError(*texts) from error
