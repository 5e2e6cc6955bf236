"""Resuming a run from its directory: its saved config and overrides, its own copy of conf/, and the overrides typed
with `resume=`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from common.errors import AlreadyReported, UserError, print_note, print_safely, strip_control
from common.filesystem import atomic_path, make_dirs, write_atomic_file
from common.paths import CONF_DIR, workspace_dir
from common.registry import check_imported
from runner.config import compose, overrides, schema, snapshot
from runner.config.compose import compose_tree, merge_into_schema, register_configs, section_class, to_config
from runner.config.hydra_errors import OPTIONAL_SECTIONS, translate_hydra_error, translating_hydra_errors
from runner.config.unread import check_typed_are_read
from runner.engine.config import REGISTERED_SECTIONS, Config
from runner.launch.recovery import recover_run
from runner.launch.run import check_inputs, run
from runner.run_dir import saved_config
from runner.run_dir.contents import lacks_model
from runner.run_dir.metadata import RunMetadata
from runner.tracking.bar import open_console

SAVED_FILES = (saved_config.CONFIG_FILE, saved_config.OVERRIDES_FILE)
CACHE_KEY = "data.cache"
ABSENT = object()
FIXED_KEYS = ("stage", "model", "data", "experiment")  # groups whose options cannot change in a run
EXTENDING_KEYS = ("train.max_steps=", "train.epochs=", "train.patience=")  # settings that let a completed run train on
LABEL_PREFIX = "run."  # name, tags and note


@dataclass
class ResumePlan:
    """How a run will be resumed. Nothing has been written yet."""

    folder: Path
    config: Config
    tree: DictConfig  # `config` as OmegaConf
    extra: list[str]  # overrides typed with resume=
    overrides: list[str]  # the saved ones that still count, and `extra`
    notes: list[str]  # messages for the user
    is_changed: bool  # whether `extra` changes the config


def plan_resume(folder: Path, extra: list[str], has_started: bool = True) -> ResumePlan:
    """Return the run's config with the overrides `extra`. Raises UserError.

    Settings that the saved config lacks are taken from conf/, but not for a run that has not `has_started`: its config
    may be incomplete.
    """
    register_configs()
    parsed = _parse_extra(folder, extra)
    saved = saved_config.load_literal_config(folder)
    _check_sections_exist(folder, parsed, saved)
    if any(override.key_or_group == overrides.PLUGINS_KEY for override in parsed):
        saved["plugins"] = overrides.plugins_of(extra)
    check_imported(saved.get("plugins") or [])
    kept, notes = effective_overrides(snapshot.load_overrides(folder), {override.key_or_group for override in parsed})
    tree = _merge_into_schema(saved, folder)
    missing = sorted(OmegaConf.missing_keys(tree)) if has_started else []
    with (
        translating_hydra_errors(extra, names_files=False),
        snapshot.as_config_dir(folder) if extra or missing else nullcontext(CONF_DIR) as conf,
    ):
        overrides.check_overrides(extra, conf)
        fresh = cache(lambda: compose_tree([*kept, *extra], conf))  # the config of a new run with these overrides
        # the run's copies replace files that have newer settings
        today = cache(lambda: compose_tree([*kept, *extra], CONF_DIR))
        for key in missing:
            is_in_copies = OmegaConf.select(fresh(), key, default=ABSENT) is not ABSENT
            _copy_value(tree, key, fresh() if is_in_copies else today(), folder)
            notes.append(f"{key}={OmegaConf.select(tree, key)} is taken from conf/: the setting is newer than the run")
        notes += _replace_foreign_cache(tree, extra)
        before = to_config(tree)
        groups = schema.config_groups(conf)
        for override in parsed:
            if override.key_or_group in groups:
                _copy_value(tree, override.key_or_group, fresh(), folder)
        for override in parsed:
            if override.key_or_group not in groups and override.key_or_group != overrides.SEARCHPATH_KEY:
                _set_value(tree, override.key_or_group, override.value())
        config = to_config(tree)
        notes = [*snapshot.changed_files(folder, overrides.config_dirs(extra)), *notes]
    return ResumePlan(folder, config, tree, extra, [*kept, *extra], notes, config != before)


@contextmanager
def naming_run(run: Path, copy: Path) -> Iterator[None]:
    """Name `run` in errors about the directory `copy` that stands for it, which the user does not see."""
    try:
        yield
    except AlreadyReported:
        raise
    except UserError as error:
        texts = [error.message, error.setting, error.fix]
        for text in ("init_from={}", "resume={}", "run={}", "{}/"):
            texts = [each.replace(text.format(copy), text.format(run)) for each in texts]
        raise UserError(*texts) from error


def _parse_extra(folder: Path, extra: list[str]) -> list[Override]:
    overrides.check_overrides(
        [override for override in extra if overrides.key_of(override) not in schema.config_groups()]
    )
    with translating_hydra_errors(extra, names_files=False):
        parsed = OverridesParser.create().parse_overrides(extra)
    for override in parsed:
        key, typed = override.key_or_group, str(override.input_line)
        if override.is_sweep_override():
            raise UserError(
                f"a resumed run takes one value of {key}",
                typed,
                f"give one value; or branch once with each: --multirun init_from={folder}@last keep=optimizer {typed}",
            )
        if overrides.is_hydra_override(key) and key != overrides.SEARCHPATH_KEY:
            raise UserError(
                "a resumed run takes no setting of Hydra: it stays in its directory", typed, "leave the override out"
            )
    check_fixed_keys(extra, folder)
    return parsed


def check_fixed_keys(typed: list[str], folder: Path) -> None:
    for override in typed:
        if (key := overrides.key_of(override)) in FIXED_KEYS:
            raise UserError(
                f"{key} cannot change in a run", override, f"leave it out; or start a new run with init_from={folder}"
            )
        if override == "train.batch_size=auto":
            raise UserError(
                "auto is for new runs: a resume or a branch keeps its rows per step",
                override,
                "leave it out, or give a number",
            )


def _check_sections_exist(folder: Path, parsed: list[Override], saved: dict[str, Any]) -> None:
    """Raise UserError for an override that the class of a fixed section does not have: another class, or keys of a
    section that is null in this run.
    """
    for override in parsed:
        key, typed = override.key_or_group, str(override.input_line)
        section, *names = key.split(".")
        if section not in FIXED_KEYS or not isinstance(value := saved.get(section), dict):
            continue
        choice = REGISTERED_SECTIONS[section][0] if section in REGISTERED_SECTIONS else None
        if names == [choice] and override.value() != value.get(choice):
            fix = f"leave it out; or a new run from an exported folder: python runner/export.py run={folder} to=NEW format=hf, then init_from=NEW {typed}"
            raise UserError(
                f"{key} cannot change in a run, it is {value.get(choice)}",
                typed,
                fix if section == "model" else f"start a new run with init_from={folder}",
            )
        for i, name in enumerate(names[:-1], start=1):
            value = value.get(name, {}) if isinstance(value, dict) else {}
            if value is None:
                null = ".".join([section, *names[:i]])
                raise UserError(
                    f"{null} is null in this run, and {section} cannot change",
                    typed,
                    f"start a new run with init_from={folder}: {OPTIONAL_SECTIONS.get(null, null)}",
                )


def effective_overrides(saved: list[str], replaced: set[str]) -> tuple[list[str], list[str]]:
    """Return the `saved` overrides whose keys are not `replaced`, and a note for each that belongs to an option that is replaced."""
    sections = tuple(f"{key}." for key in replaced if key in schema.config_groups())
    kept, notes = [], []
    for override in saved:
        key = overrides.key_of(override)
        if sections and key.startswith(sections) and key not in replaced:
            notes.append(f"{override} is dropped: it was given for the former option of {key.partition('.')[0]}")
        elif key not in replaced:
            kept.append(override)
    return kept, notes


def _merge_into_schema(saved: dict[str, Any], folder: Path) -> DictConfig:
    try:
        return merge_into_schema(saved)
    except ConfigKeyError as error:
        commit = _saved_commit(folder)
        new = overrides.RENAMED_SETTINGS.get(str(error.full_key))
        raise UserError(
            f"the saved config has the setting {error.full_key}, which {f'is now called {new}' if new else 'this version does not have'}",
            f"{folder / saved_config.CONFIG_FILE}: {error.full_key}",
            f"resume with the version that started the run{f': git checkout {commit}' if commit else ''}",
        ) from error
    except OmegaConfBaseException as error:
        fix = "correct the file, or delete it: resume= restores it"
        raise UserError(translate_hydra_error(error, []).message, folder / saved_config.CONFIG_FILE, fix) from error


def _replace_foreign_cache(tree: DictConfig, extra: list[str]) -> list[str]:
    """Use the cache of this program, unless the saved or typed one is a cache of this user: token stores are read from
    and deleted in it.
    """
    saved, own = str(tree.data.cache), str(workspace_dir() / ".cache")
    if saved == own or any(overrides.key_of(override) == CACHE_KEY for override in extra):
        return []
    from data.store.cache import is_own_cache

    if is_own_cache(Path(saved)):
        return []
    OmegaConf.update(tree, CACHE_KEY, own)
    return [
        f"{CACHE_KEY}={own} is used: the saved one, {saved}, is missing or no token cache of this user; to use it, type {CACHE_KEY}={saved}"
    ]


def _saved_commit(folder: Path) -> str | None:
    commit = (RunMetadata.read(folder).get("code") or {}).get("commit")
    return commit if isinstance(commit, str) and commit.isalnum() else None


def _copy_value(tree: DictConfig, key: str, fresh: DictConfig, folder: Path) -> None:
    """Copy the value of `key` from `fresh` to `tree`.

    It comes from files of the run directory: no interpolation is resolved.
    """
    value = OmegaConf.select(fresh, key)
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    value = saved_config.reject_interpolations(value, key, folder / snapshot.SNAPSHOT_DIR)
    if isinstance(value, dict):  # the whole section: values of the former option must not stay
        value = OmegaConf.merge(OmegaConf.structured(section_class(key, value)), value)
    OmegaConf.update(tree, key, value, merge=False)


def _set_value(tree: DictConfig, key: str, value: Any) -> None:
    """Set or merge the value of an override. The first set of data.val_path decides: a mapping with the key that is
    first in `tree` gives the order.
    """
    old = OmegaConf.select(tree, key)
    if isinstance(value, dict) and OmegaConf.get_type(old) is dict and next(iter(old), None) in value:
        value = OmegaConf.merge(value, old, value)
    OmegaConf.update(tree, key, value, merge=isinstance(value, dict))


def print_notes(plan: ResumePlan) -> None:
    for note in plan.notes:
        print_note(f"resume: {note}")


@contextmanager
def persisting_overrides(plan: ResumePlan) -> Iterator[Config]:
    """Save the config and overrides of `plan` around a training, the former ones in `.hydra/history/`.

    A UserError inside restores the directory.
    """
    if not plan.extra:
        yield plan.config
        return
    history = _save_plan(plan)
    with snapshot.as_config_dir(plan.folder) as conf:
        added = snapshot.extend_snapshot(plan.folder, plan.overrides, conf)
    try:
        yield plan.config
    except UserError:
        for path in SAVED_FILES:
            write_atomic_file(plan.folder / path, (history / path.name).read_bytes())
        for file in added:
            file.unlink()
        shutil.rmtree(history)
        raise


def _save_plan(plan: ResumePlan) -> Path:
    """Write the config and overrides of this launch; return the folder the former ones were moved to."""
    parent = plan.folder / ".hydra" / "history"
    make_dirs(parent)
    numbers = [int(name) for name in os.listdir(parent) if name.isascii() and name.isdigit()]
    history = parent / f"{max(numbers, default=-1) + 1:03d}"
    with atomic_path(history) as new:
        new.mkdir()
        for path in SAVED_FILES:
            write_atomic_file(new / path.name, (plan.folder / path).read_bytes())
    config = saved_config.freeze_values(
        OmegaConf.to_container(plan.tree, resolve=True), saved_config.load_saved_config(plan.folder)
    )
    snapshot.write_yaml(plan.folder / saved_config.CONFIG_FILE, config)
    snapshot.write_yaml(
        plan.folder / saved_config.OVERRIDES_FILE,
        [override for override in plan.overrides if not overrides.is_hydra_override(override)],
    )
    return history


def _label_run(metadata: RunMetadata, plan: ResumePlan) -> None:
    """Record another name, tags or note of a completed run; nothing is trained."""
    with persisting_overrides(plan) as config:
        metadata.update(**vars(config.run))
    print_safely(
        f"{metadata.folder}: {' '.join(plan.extra)} is recorded; the run stays complete at step {metadata.fields['step']}"
    )


def resume_run(folder: Path, extra: list[str]) -> None:
    """Train on in `folder` with the overrides `extra`, unless the run is completed and they change nothing."""
    extra, runtime = compose.split_runtime(extra)
    with RunMetadata.open(folder, resume=True, recover=recover_run) as metadata:
        plan = plan_resume(folder, extra, has_started=metadata.attempt > 0)
        if metadata.attempt:  # for a job of a sweep that has not begun, nothing can have changed
            print_notes(plan)
        lacks, step = lacks_model(folder, metadata.fields), metadata.fields["step"]
        if metadata.status == "completed" and plan.is_changed:
            if all(override.startswith(LABEL_PREFIX) for override in extra):
                return _label_run(metadata, plan)
            if not any(override.startswith(EXTENDING_KEYS) for override in extra):
                message = f"the run is completed at step {step}, and the overrides add no step"
                fix = f"add train.max_steps=N with N > {step}, or start a new run with init_from={folder}"
                raise UserError(message, " ".join(extra), fix + ", or leave them out: model/ is written again" * lacks)
        elif metadata.status == "completed" and not lacks:
            return open_console(plan.config.tracker.console).print(
                strip_control(f"{folder}: already complete at step {step}")
            )
        metadata.data_files = check_inputs(plan.config)
        check_typed_are_read(extra, [plan.config])
        with metadata.reopened(), persisting_overrides(plan) as config:
            compose.run_resumed(lambda: run(config, metadata), folder, plan.tree, plan.overrides, runtime)
