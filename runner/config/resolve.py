"""Finds the run or sweep directory that the user names, and refuses directories where a new run cannot be placed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from common.errors import UserError, did_you_mean_path, print_note
from common.paths import outputs_dir
from models.formats.hub import fetch_model
from runner.checkpoint.atomic_dir import newest_valid, step_names, verify_dir
from runner.checkpoint.format import CHECKPOINTS_DIR, checkpoint_name, step_of
from runner.checkpoint.saving import BEST_POINTER, read_pointer
from runner.config import snapshot
from runner.config.literals import LIST_ITEM, NOT_PATHS, QUOTED_ITEM, quote_path
from runner.config.overrides import RERUN_FLAGS, Flags
from runner.run_dir import saved_config
from runner.run_dir.best_job import find_best_job, model_score
from runner.run_dir.contents import (
    RUN_FILE,
    check_run_files,
    enclosing_record,
    enclosing_run,
    find_runs,
    has_started,
    is_sweep_dir,
    parse_time,
    sweep_of,
)
from runner.run_dir.metadata import RunMetadata
from runner.tracking.progress import watch_download

MODEL_KEYS = ("init_from", "model.path")  # settings that name weights


def resolve_run(name: str, setting: str = "resume") -> Path:
    """Return the run or sweep directory of `<setting>=name`: a path to it, to anything inside it, or `last`. A file of
    a sweep outside its jobs means the sweep.

    `last` is what began to train last: a run, or the sweep if that was a job of one.
    """
    if name == "last":
        begun = [run for run in find_runs(outputs_dir()) if has_started(RunMetadata.read(run))]
        if not begun:
            raise UserError(
                f"no run in {outputs_dir()} has begun to train", f"{setting}=last", "start one: python runner/train.py"
            )
        newest = sweep_of(max(begun, key=_last_start))
        print_note(f"{setting}=last: {'sweep ' if is_sweep_dir(newest) else ''}{newest}")
        return newest
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{path} does not exist", f"{setting}={name}", did_you_mean_path(name))
    if (folder := enclosing_run(path)) is None:
        raise _no_run_error(path, name, setting)
    if not is_sweep_dir(folder):
        check_run_files(folder)
    if setting != "run":  # a page is that of the whole run
        _check_checkpoint(folder, path)
    return folder


def resolve_model_run(name: str, setting: str = "run") -> Path:
    """Return the directory of `run=name`: for a sweep that of its best job; `last` is the run whose model was completed
    last, or its sweep.

    RUN@step-100, RUN@best and RUN@last are its checkpoints. `owner/name` or `owner/name@revision` is a model of the
    Hugging Face hub, unless there is a folder of that name. Prints which weights its `model/` holds.
    """
    folder = Path(name)
    if checkpoint := _named_checkpoint(folder, setting):
        return checkpoint
    if name == "last":
        models = [run / "model" for run in find_runs(outputs_dir()) if (run / "model").is_dir()]
        if not models:
            raise UserError(
                f"no run in {outputs_dir()} has completed a model",
                f"{setting}=last",
                "train one: python runner/train.py",
            )
        folder = sweep_of(max(models, key=lambda model: model.stat().st_mtime).parent)
    elif downloaded := fetch_model(name, f"{setting}={name}", watch_download):
        return downloaded
    if is_sweep_dir(folder):
        return find_best_job(folder)
    if (folder / RUN_FILE).is_file():
        check_run_files(folder)
    if score := model_score(RunMetadata.read(folder)):
        print_note(f"{folder}: {score}")
    return folder


def resolve_model_overrides(typed: list[str]) -> list[str]:
    """Return the overrides with paths for names of models: of `init_from=SWEEP` that of its best job, of
    `init_from=last` that of the run whose model was completed last, of a model of the hub its folder in the cache.

    One value or several. The folder of a model of the hub is that of one commit: what a run or sweep stores means the
    same for ever. Raises UserError.
    """
    resolved = []
    for override in typed:
        key, _, value = override.partition("=")
        if key in MODEL_KEYS and value not in NOT_PATHS:
            values = LIST_ITEM.findall(value)
            override = f"{key}={','.join(each if each in NOT_PATHS else _resolve_model(each, key) for each in values)}"
        resolved.append(override)
    return resolved


def _resolve_model(value: str, key: str) -> str:
    path = Path(QUOTED_ITEM.sub(r"\2", value))
    if (key, value) == ("init_from", "last"):  # a folder of this name is a path here
        found: Path | None = resolve_model_run(value, key)
    elif is_sweep_dir(path):
        found = find_best_job(path)
    else:
        checkpoint = _named_checkpoint(path, key) if key == "init_from" else None
        found = checkpoint or fetch_model(str(path), f"{key}={path}", watch_download)
    return quote_path(str(found)) if found else value


def _named_checkpoint(path: Path, key: str) -> Path | None:
    """Return the checkpoint that RUN@step-100, RUN@best or RUN@last names, None if `path` is something else.

    Raises UserError if the run has none of that name.
    """
    run, at, name = str(path).rpartition("@")
    if path.exists() or not at or not (run == "last" or Path(run).expanduser().is_dir()):
        return None
    folder, setting = resolve_run(run, key), f"{key}={path}"
    if is_sweep_dir(folder):
        folder = find_best_job(folder)
    checkpoints = folder / CHECKPOINTS_DIR
    names = step_names(checkpoints)
    if name == "last":
        newest, skipped = newest_valid(checkpoints)
        for each, problem in skipped:
            print_note(f"warning: checkpoint {each} skipped: {problem}")
        if newest is not None:
            return newest
        found, names = None, []
    elif name == "best":
        found = read_pointer(checkpoints / BEST_POINTER)
    else:
        found = checkpoint_name(int(name[5:])) if re.fullmatch(r"step-\d{1,8}", name) else None
        found = found if found in names else None
    if found is None:
        known = ", ".join(f"step-{step_of(each)}" for each in reversed(names)) or "none"
        fix = f"{key}={run}@step-{step_of(names[0])}" if names else f"{key}={run}, its newest weights"
        raise UserError(f"{folder} has no checkpoint {name}; its checkpoints: {known}", setting, fix)
    if reason := verify_dir(checkpoints / found):
        raise UserError(f"this checkpoint is damaged: {reason}", setting, f"{key}={run}@last is the newest valid one")
    return checkpoints / found


def _last_start(run: Path) -> float:
    """Return when training last began (seconds since 1970)."""
    started = parse_time(RunMetadata.read(run).get("started"))
    return (run / RUN_FILE).stat().st_mtime if started is None else started


def _no_run_error(path: Path, name: str, setting: str) -> UserError:
    """Return the error for a path outside of any run; a launch may have been killed before its settings were stored
    there.
    """
    if not (path / saved_config.OVERRIDES_FILE).parent.is_dir():
        return UserError(
            f"{path} is not in a run directory: there is no run.json",
            f"{setting}={name}",
            f"give a run directory, e.g. {setting}=last",
        )
    message = f"{path} has no run.json and no checkpoints: its launch was stopped before the settings were stored, or they were deleted"
    try:
        typed = shlex.join(snapshot.load_overrides(path))
        fix = f"start it again: python runner/train.py {typed} hydra.run.dir={shlex.quote(str(path))}".replace(
            "  ", " "
        )
    except UserError:
        fix = f"type its command again, with hydra.run.dir={shlex.quote(str(path))}"
    return UserError(message, f"{setting}={name}", fix)


def _check_checkpoint(run: Path, path: Path) -> None:
    """Raise UserError if `path` is in a checkpoint that is damaged or not the newest: a run resumes from the newest
    valid one.
    """
    inside = path.relative_to(run).parts
    if len(inside) < 2 or inside[0] != "checkpoints":
        return
    checkpoint = run / "checkpoints" / inside[1]
    if reason := verify_dir(checkpoint):
        raise UserError(
            f"this checkpoint is damaged: {reason}",
            checkpoint,
            f"resume={run} continues from the newest valid checkpoint",
        )
    newer = sorted(other for other in step_names(checkpoint.parent) if other > checkpoint.name)
    if newer:
        raise UserError(
            f"a run resumes from its newest checkpoint, and there are newer ones: {', '.join(newer)}",
            checkpoint,
            f"resume={run}; or branch from it: init_from={checkpoint} keep=optimizer",
        )


def check_not_inside_run(folder: Path) -> None:
    """Raise UserError for a new run in a sweep directory or inside another run.

    RunMetadata.open refuses a directory that is itself a run.
    """
    if found := enclosing_record(folder if is_sweep_dir(folder) else folder.parent):
        found = sweep_of(found)
        kind, relation = "sweep" if is_sweep_dir(found) else "run", "holds" if found == folder else "is inside"
        raise UserError(
            f"this directory {relation} a {kind}",
            folder,
            f"resume={found} continues the {kind}; hydra.run.dir=DIR places the run in another directory",
        )


def check_is_one_run(folder: Path, flags: Flags) -> None:
    """Raise UserError if the `flags` of a run that is resumed ask for a sweep."""
    if "--multirun" in flags:
        raise UserError(
            "--multirun resumes a sweep, and this directory holds one run",
            f"--multirun resume={folder}",
            "leave out --multirun",
        )


def check_not_rerun(flags: Flags, config_dirs: list[Path]) -> None:
    """Raise UserError for Hydra's own ways to run a directory again: they lose the schema, the directory, or the state
    of the run.
    """
    given = {f"{name} {value}": value for name, value in flags.items() if name in RERUN_FLAGS}
    for setting, value in {**given, **{f"--config-dir {folder}": str(folder) for folder in config_dirs}}.items():
        if run := enclosing_run(Path(value).expanduser().absolute()):
            raise UserError("a run is not started from the inside of another", setting, _resume_hint(run))
    if unsupported := next((setting for setting in given if setting != "--config-name config"), None):
        raise UserError(
            "this program is composed from its own conf/",
            unsupported,
            "--config-dir=DIR adds a folder with your own config groups",
        )


def _resume_hint(run: Path) -> str:
    hint = f"continue it with resume={run}"
    if is_sweep_dir(run):
        return hint
    try:
        return f"{hint}; start a new run like it: python runner/train.py {shlex.join(snapshot.load_overrides(run))}".rstrip()
    except UserError:
        return hint
