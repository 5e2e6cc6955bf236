"""A run that continues the complete state of another one, its trunk, in a directory of its own:
`init_from=RUN@step-100 keep=optimizer`.

The new directory gets what a resume of the trunk from that checkpoint would read: settings, tokenizer, logs up to the
checkpoint, the checkpoint itself. From there on it is a resume. The trunk is only read, and may be deleted afterwards.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.errors import UserError, did_you_mean_path, print_note
from common.filesystem import (
    open_regular,
    read_bounded,
    read_texts,
    remove_quietly,
    temp_name,
    write_atomic_files,
)
from common.guarded_files import MAX_TOKENIZER_BYTES, read_from
from common.limits import parse_yaml
from common.settings import setting_values
from data.tokenize.origin import COPIED_FILES, RUN_TOKENIZER
from runner.checkpoint import atomic_dir
from runner.checkpoint.compatibility import ROWS_PER_STEP, diff_facts, run_rules
from runner.checkpoint.format import CHECKPOINTS_DIR, STATE_FILE, TENSOR_FILES, read_state, state_file
from runner.checkpoint.manager import check_compatible
from runner.checkpoint.saving import find_best_weights, write_best_weights, write_checkpoint
from runner.config import compose, overrides, snapshot
from runner.config.literals import parse_value
from runner.config.unread import check_typed_are_read
from runner.engine.config import STOP_KEY, rows_per_step
from runner.launch import recovery
from runner.launch.resume import (
    ResumePlan,
    check_fixed_keys,
    effective_overrides,
    naming_run,
    persisting_overrides,
    plan_resume,
    print_notes,
)
from runner.launch.run import check_inputs, run
from runner.run_dir.contents import HYDRA_DIR, check_run_files, create_unique, enclosing_run
from runner.run_dir.lock import refusing_disk_errors
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import CONFIG_FILE, OVERRIDES_FILE

RUN_DIR_KEY, NAME_KEY, OWN_KEYS = "hydra.run.dir", "run.name", ("init_from", "keep")
TIME = re.compile(rb'"time": [\d.]+')  # seconds of training, in a line of a log
ROWS_KEYS = ("train.batch_size", "train.accumulation_steps")
USAGE = "init_from=RUN@step-N keep=optimizer, RUN a run directory"
# fields of run.json that say what happened in the directory of the trunk
FIELDS_OF_TRUNK = ("attempts", "changed", "evaluations", "export", "recovered")


@dataclass(frozen=True)
class Trunk:
    """A checkpoint to branch from, and what it knows of its run."""

    run: Path
    checkpoint: Path
    saved: dict[str, Any]  # its state.json
    fields: dict[str, Any]  # of run.json, as the checkpoint has them
    settings: dict[str, str]  # texts of `.hydra/` by their name in a run directory, as the checkpoint has them

    @property
    def overrides(self) -> list[str]:
        with suppress(ValueError):
            saved = parse_yaml(self.settings.get(str(OVERRIDES_FILE), "[]"))
            typed = snapshot.check_overrides_file(saved, self.checkpoint / STATE_FILE)
            return [*{overrides.key_of(each): each for each in typed}.values()]  # the last value of a key counts
        return snapshot.load_overrides(self.run)


def read_trunk(path: str) -> Trunk:
    """Return the checkpoint at `path`, a value of init_from. Raises UserError if it is none, or damaged."""
    checkpoint = Path(path)
    folder = enclosing_run(checkpoint) if checkpoint.is_absolute() else None
    if folder is None or checkpoint.parent != folder / CHECKPOINTS_DIR or not (checkpoint / STATE_FILE).is_file():
        text, fix = "keep=optimizer continues a checkpoint of a run, with its optimizer", USAGE
        if folder == checkpoint:
            fix = f"init_from={folder}@last keep=optimizer"
        elif not checkpoint.exists() and path not in ("auto", "scratch"):
            text, fix = f"there is no {path}", did_you_mean_path(path.rpartition("@")[0] or path)
        raise UserError(text, f"init_from={path} keep=optimizer", fix)
    check_run_files(folder)
    if reason := atomic_dir.verify_dir(checkpoint):
        fix = f"init_from={folder}@last is the newest whole one"
        raise UserError(f"this checkpoint is damaged: {reason}", str(checkpoint), fix)
    saved = read_state(checkpoint)
    try:
        fields = recovery.fields_of_checkpoint(folder, checkpoint.name, saved)
        sum(saved["log"].values(), saved["progress"]["best_step"] or 0)  # integers
        dict(saved["log_sha256"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{STATE_FILE} has no usable value: {error}", str(checkpoint), USAGE) from error
    copies = (path for name in (snapshot.SNAPSHOT_DIR, snapshot.PLUGINS_DIR) for path in (folder / name).rglob("*.*"))
    names = [CONFIG_FILE, OVERRIDES_FILE, *(path.relative_to(folder) for path in copies)]
    now = read_texts(folder, map(str, names), recovery.MAX_TEXT_BYTES)
    return Trunk(folder, checkpoint, saved, fields, now | recovery.stored_record(saved)["files"])


def start_branch(typed: list[str]) -> None:
    """Train in a new run directory what the overrides `typed` ask for."""
    trunk = read_trunk(_starts_of(typed)[0])
    of_dir = overrides.overrides_of(RUN_DIR_KEY, typed)
    extra, runtime = compose.split_runtime([override for override in _others(typed) if override not in of_dir])
    folder = Path(compose.compose_tree(of_dir).hydra.run.dir).absolute()
    with RunMetadata.open(folder if of_dir else create_unique(folder)) as metadata:
        folder, before = metadata.folder, metadata.fields
        try:
            plan = create_branch(metadata, trunk, extra)
            metadata.data_files = check_inputs(plan.config)
            with naming_run(trunk.run, folder):
                compose.run_resumed(lambda: run(plan.config, metadata), folder, plan.tree, plan.overrides, runtime)
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
    staged = folder / temp_name("tmp", "branch")  # the settings of the trunk alone are never in the directory
    try:
        with refusing_disk_errors(folder), naming_run(trunk.run, staged):
            plan = _plan_branch(trunk, extra, staged)
            with persisting_overrides(plan):
                step = _write_state(metadata, trunk, staged)
            remove_quietly(folder / HYDRA_DIR)  # of a launch that was killed
            os.replace(staged / HYDRA_DIR, folder / HYDRA_DIR)
            metadata.record_created()
    finally:
        remove_quietly(staged)
    print_note(f"branched from {trunk.run} at step {step}, with the settings saved there and the typed ones")
    print_notes(plan)
    return plan


def _plan_branch(trunk: Trunk, extra: list[str], staged: Path) -> ResumePlan:
    """Write the settings of `trunk` to the new directory `staged`; return what they are with the overrides `extra`."""
    write_atomic_files((staged / name, text.encode()) for name, text in trunk.settings.items())
    before = plan_resume(staged, []).config
    for key, value, none in ((NAME_KEY, before.run.name, "''"), (STOP_KEY, before.train.stop_at, 0)):
        if value and not overrides.overrides_of(key, extra):
            extra = [*extra, f"{key}={none}"]  # it is that of the trunk
    plan = plan_resume(staged, extra)
    facts, other_facts = map(setting_values, (before, plan.config))
    if {*ROWS_KEYS} & {*map(overrides.key_of, extra)}:  # other ranks keep the rows
        facts[ROWS_PER_STEP], other_facts[ROWS_PER_STEP] = map(rows_per_step, (before, plan.config))
    differences = diff_facts(facts, other_facts, run_rules(plan.config))
    check_compatible(differences, trunk.checkpoint, trunk.run)
    check_typed_are_read(extra, [plan.config])
    return plan


@contextmanager
def staged_settings(typed: Sequence[str]) -> Iterator[tuple[Trunk, Path, list[str]]]:
    """Give a temporary directory with the settings of the trunk of a branch, and the overrides that the branch adds, to
    commands that train nothing. Raises UserError where the branch is refused.
    """
    trunk = read_trunk(_starts_of(typed)[0])
    extra = _added_overrides(trunk, typed)
    with TemporaryDirectory() as name, naming_run(trunk.run, Path(name)):
        _plan_branch(trunk, extra, Path(name))
        yield trunk, Path(name), extra


def with_trunk_settings(typed: list[str]) -> list[str]:
    """Return the overrides of a sweep of branches: the settings of the trunk, and the typed ones."""
    first, *others = map(read_trunk, _starts_of(typed))
    check_fixed_keys(typed, first.run)
    if other := next((each for each in others if each.overrides != first.overrides), None):
        text = "the checkpoints of a sweep must have the same settings"
        raise UserError(text, f"{first.checkpoint}, {other.checkpoint}", "start a sweep for each of them")
    kept, notes = effective_overrides(first.overrides, {*map(overrides.key_of, typed), NAME_KEY, STOP_KEY, "init_from"})
    for note in (*notes, f"branches of {first.run}, with the settings saved there and the typed ones"):
        print_note(note)
    return [*kept, *typed]


def branch_job(metadata: RunMetadata, start: str, job_overrides: Sequence[str]) -> None:
    """Create the branch that a job of a sweep is; `start` is its init_from, `job_overrides` are all of its overrides."""
    trunk = read_trunk(start)
    create_branch(metadata, trunk, _added_overrides(trunk, job_overrides))


def _starts_of(typed: Sequence[str]) -> list[str]:
    """Return the values of init_from, several in a sweep."""
    if not (given := overrides.overrides_of("init_from", typed)):
        raise UserError("keep=optimizer continues a checkpoint of a run", "keep=optimizer", USAGE)
    value = parse_value(given[-1])
    return [str(getattr(each, "text", each)) for each in getattr(value, "list", [value])]


def _added_overrides(trunk: Trunk, overrides_of_branch: Sequence[str]) -> list[str]:
    others, saved = _others(overrides_of_branch), trunk.overrides
    # an equal value counts where its option is chosen again, which drops that of the trunk
    kept, _ = effective_overrides(saved, {overrides.key_of(override) for override in others if override not in saved})
    return [override for override in others if override not in kept]


def _others(typed: Sequence[str]) -> list[str]:
    return [override for override in typed if overrides.key_of(override) not in OWN_KEYS]


def _write_state(metadata: RunMetadata, trunk: Trunk, settings: Path) -> int:
    """Write tokenizer, logs and checkpoint of the branch, whose settings are in the directory `settings`; return the
    step.
    """
    checkpoints, progress = metadata.folder / CHECKPOINTS_DIR, dict(trunk.saved["progress"])
    step, best = progress["step"], progress["best_step"]
    progress["branch_step"] = step
    if best not in (None, step):
        if weights := find_best_weights(trunk.run / CHECKPOINTS_DIR, best):
            write_best_weights(checkpoints, best, progress["best_loss"], _mapped(weights / TENSOR_FILES["model"]))
        else:
            print_note(
                f"the best weights of {trunk.run} until then, step {best}, were deleted: the best of the branch is chosen from here on"
            )
            progress |= {"best_loss": None, "best_step": None, "evals_since_best": 0}
    texts = read_texts(trunk.run, (f"{RUN_TOKENIZER}/{name}" for name in COPIED_FILES), MAX_TOKENIZER_BYTES)
    files, checksums = {name: text.encode() for name, text in texts.items()}, dict(trunk.saved["log_sha256"])
    for log in recovery.LOGS:
        if (source := trunk.run / f"{log}.jsonl").is_file():
            lines = read_from(source, 0)[: trunk.saved["log"].get(log, 0)]
            # the branch has trained for no second yet; of the same length, which the state names
            files[source.name] = TIME.sub(lambda found: b'"time": 0'.ljust(len(found[0])), lines)
            if hashlib.sha256(lines).hexdigest() == checksums.get(log):
                checksums[log] = hashlib.sha256(files[source.name]).hexdigest()
    write_atomic_files((metadata.folder / name, content) for name, content in files.items())
    manifest = read_bounded(trunk.checkpoint / atomic_dir.MANIFEST_FILE, atomic_dir.MAX_MANIFEST_BYTES)
    branched = {"run": str(trunk.run), "step": step, "checkpoint": hashlib.sha256(manifest).hexdigest()}
    own = {"id": secrets.token_hex(8), "tracker_id": None, "branched_from": branched}
    metadata.adopt({name: value for name, value in trunk.fields.items() if name not in FIELDS_OF_TRUNK} | own)
    metadata.stored_files = recovery.read_stored_files(metadata.folder, settings)
    state = trunk.saved | {"progress": progress, "tracker_id": None, "log_sha256": checksums, "run": metadata.record()}
    copies = {file: _mapped(trunk.checkpoint / file) for file in TENSOR_FILES.values()}
    write_checkpoint(checkpoints, step, {}, state_file(state) | copies)
    return int(step)


def _mapped(path: Path) -> memoryview:
    """Return the content of a file, which stays readable after the file is deleted."""
    fd, _ = open_regular(path)
    with open(fd, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
