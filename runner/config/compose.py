"""Composes overrides and the YAML files of conf/ with Hydra, and converts the result to dataclasses; Hydra's runtime of
new runs, resumed runs, jobs of a sweep and ranks.

A job gets the section `hydra` as the sweep has composed it, through an environment variable, as Hydra's own launchers
hand it to theirs. A resumed run composes it from what is typed with `resume=`. It is never read from a run directory:
`hydra.callbacks` names code.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast, get_type_hints

from hydra import compose as hydra_compose
from hydra._internal.callbacks import Callbacks
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobStatus, run_job
from hydra.types import HydraContext, RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict, read_write

from common.errors import UserError, did_you_mean
from common.paths import CONF_DIR, REPO_ROOT, workspace_dir
from common.registry import check_imported
from runner.config import overrides, schema
from runner.config.hydra_errors import OPTIONAL_SECTIONS, composed_files, composing_from, translating_hydra_errors
from runner.config.overrides import SEARCHPATH_KEY, is_hydra_override, key_of, overrides_of
from runner.engine.config import REGISTERED_SECTIONS, Config

RUNTIME_PREFIXES = (
    "hydra.job.",
    "hydra.callbacks.",
    "hydra/callbacks",
    "hydra.job_logging",
    "hydra/job_logging",
    "hydra.verbose",
)
MAX_TYPED_SETTINGS = 1_000  # kept in memory: plain settings and sections of configs
HYDRA_CONFIG_ENV = "RUNNER_HYDRA_CONFIG"  # JSON of the section `hydra`, for a child process


def register_configs(dirs: Sequence[Path] = (CONF_DIR,)) -> None:
    """Register what the YAML files in `dirs` refer to: the schema, the resolvers, and options without a YAML file."""
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # Hydra 1.4 warns about a second registration
        hints = get_type_hints(Config)
        # `to_config` types the sections where a registry chooses the class
        fields: list[Any] = [(key, Any if key in REGISTERED_SECTIONS else kind) for key, kind in hints.items()]
        node = OmegaConf.structured(dataclasses.make_dataclass("ConfigSchema", fields))
        for section in REGISTERED_SECTIONS:  # takes settings that its YAML file lacks: those of a plugin's class
            node[section] = OmegaConf.create({}, flags={"struct": False})
        store.store(name="schema", node=node)
    for section, registered in schema.registered_options().items():
        for name, values in registered.items():
            if not any((folder / section / f"{name}.yaml").is_file() for folder in dirs):
                store.store(group=section, name=name, node=values)
    # OmegaConf 2.4 renamed the function; 2.3 has another one of the new name, which cannot replace
    is_renamed = "replace" in inspect.signature(OmegaConf.register_resolver).parameters
    register: Any = OmegaConf.register_resolver if is_renamed else OmegaConf.register_new_resolver
    register("repo", lambda: str(REPO_ROOT), replace=True)
    register("workspace", lambda: str(workspace_dir()), replace=True)


def compose_config(typed: list[str]) -> Config:
    """Return the config that `python runner/train.py <typed>` trains."""
    with translating_hydra_errors(typed):
        return to_config(without_hydra(compose_tree(typed)))


def compose_tree(typed: list[str], conf: Path = CONF_DIR) -> DictConfig:
    """Return Hydra's config, with the section `hydra` and with interpolations unresolved.

    Raises UserError.
    """
    typed = overrides.normalize_values(typed)
    overrides.check_overrides(typed, conf)
    register_configs(overrides.config_dirs(typed, conf))
    with composing_from(conf), translating_hydra_errors(typed):
        return hydra_compose("config", overrides=typed, return_hydra_config=True)


def compose_command(name: str, typed: list[str]) -> DictConfig:
    """Return the settings of a command beside train.py: those of conf/<name>.yaml with the overrides `typed`."""
    register_configs()
    with composing_from(CONF_DIR):
        return hydra_compose(name, overrides=typed)


def source_files(typed: list[str], conf: Path = CONF_DIR) -> dict[str, Path]:
    """Return the YAML files that the overrides are composed from, by their name in a config folder.

    Files of Hydra's own config are left out.
    """
    register_configs(overrides.config_dirs(typed, conf))
    with translating_hydra_errors(typed):
        return {name: path for path, name, _ in composed_files(typed, conf)}


def has_file_that_chooses_model(typed: list[str], conf: Path) -> bool:
    """Return whether the overrides choose a YAML file, e.g. of an experiment, that chooses the option of the group
    `model` or sets values in it.
    """
    groups = schema.config_groups(*overrides.config_dirs(typed, conf))
    choices = [override for override in typed if overrides.key_of(override) in (*groups, overrides.SEARCHPATH_KEY)]
    return _has_file_that_chooses_model(tuple(choices), conf)


@cache
def _has_file_that_chooses_model(choices: tuple[str, ...], conf: Path) -> bool:
    for name, file in source_files(list(choices), conf).items():
        if name == "config.yaml" or name.startswith("model/"):
            continue
        content: Any = OmegaConf.to_container(OmegaConf.load(file)) or {}
        defaults = [entry for entry in content.get("defaults") or () if isinstance(entry, dict)]
        names = {str(key).removeprefix("override ").strip("/ ") for entry in defaults for key in entry}
        if "model" in {*names, *content}:
            return True
    return False


def compose_values(typed: list[str]) -> dict[str, Any]:
    """Return the settings of `python runner/train.py <typed>` as plain values, with interpolations unresolved as in a
    saved config.
    """
    return cast(dict[str, Any], OmegaConf.to_container(without_hydra(compose_tree(typed)), resolve=False))


def without_hydra(tree: DictConfig) -> DictConfig:
    """Return a copy of Hydra's config without the section `hydra`."""
    return OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])


def to_config(tree: DictConfig | dict[str, Any]) -> Config:
    """Return the settings in `tree` as dataclasses, whose own checks run here.

    Raises UserError. A plain dict has no interpolations.
    """
    check_imported(tree.get("plugins") or [])
    values = tree if isinstance(tree, dict) else cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))
    check_all_read(values)
    types = get_type_hints(Config)
    sections = {name: kind for name, kind in types.items() if dataclasses.is_dataclass(kind)}
    plain = {name: kind for name, kind in types.items() if name not in sections}
    settings = _converted(plain, {name: value for name, value in values.items() if name not in sections})
    for name, kind in sections.items():
        given = {name: values[name]} if name in values else {}
        settings |= _converted({name: section_class(name, values.get(name)) or kind}, given)
    return Config(**settings)


_converted_settings: dict[tuple[Any, ...], dict[str, Any]] = {}  # what `_converted` has returned


def _converted(types: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` of settings of Config, converted to their `types`; defaults where there is none.

    Each is converted once: jobs of a sweep have most sections in common.
    """
    key = (*types.items(), repr(values))
    if key not in _converted_settings:
        known = Config.__dataclass_fields__
        fields = [(name, kind, dataclasses.field(default=known[name].default)) for name, kind in types.items()]
        schema = OmegaConf.structured(dataclasses.make_dataclass("Settings", fields, kw_only=True))
        merged = OmegaConf.merge(schema, values)
        check_no_missing(merged)
        if len(_converted_settings) >= MAX_TYPED_SETTINGS:
            _converted_settings.clear()
        _converted_settings[key] = vars(OmegaConf.to_object(merged))
    return copy.deepcopy(_converted_settings[key])


def merge_into_schema(values: dict[str, Any]) -> DictConfig:
    """Return the values typed by the config's dataclasses; of a section with a registry by the class that is chosen in
    it.
    """
    typed = OmegaConf.structured(Config)
    for section in REGISTERED_SECTIONS:
        if cls := section_class(section, values.get(section)):
            typed[section] = OmegaConf.structured(cls)
    merged = OmegaConf.merge(typed, values)
    assert isinstance(merged, DictConfig)
    return merged


def section_object(section: str, values: dict[str, Any]) -> Any:
    """Return the dataclass of one section with these values.

    Raises UserError if one is missing, unknown or not allowed.
    """
    with translating_hydra_errors([], names_files=False):
        return _converted({section: section_class(section, values)}, {section: values})[section]


def check_no_missing(tree: Any) -> None:
    if missing := OmegaConf.missing_keys(tree):
        key = min(missing)
        section = key.rpartition(".")[0]
        reason = f": {section} is null here, or lacks some of its keys" if section in OPTIONAL_SECTIONS else ""
        raise UserError(f"{key} has no value{reason}", key, OPTIONAL_SECTIONS.get(section, f"{key}=<value>"))


def section_class(section: str, values: Any) -> type | None:
    """Return the dataclass of a section, None if it does not name its choice (e.g. optimizer.name).

    Raises UserError if that is not registered.
    """
    if section not in REGISTERED_SECTIONS:
        return schema.config_schema()[section]
    key, registry = REGISTERED_SECTIONS[section]
    chosen = values.get(key, MISSING) if isinstance(values, dict) else MISSING
    if chosen == MISSING:
        return None
    if (cls := registry.entries().get(str(chosen))) is None:
        fix = did_you_mean(str(chosen), registry.names(), f"plugins=[FILE.py], a module that registers {chosen}")
        raise UserError(
            f"{section}.{key} must be one of {', '.join(registry.names())}, got {chosen}",
            f"{section}.{key}={chosen}",
            fix,
        )
    return cls


def check_all_read(values: dict[str, Any]) -> None:
    """Raise UserError for a section that does not name its choice, and for a setting that the class chosen in its
    section does not have.
    """
    for section, (key, registry) in REGISTERED_SECTIONS.items():
        cls = section_class(section, values.get(section))
        if cls is None and values.get(section):
            setting, names = f"{section}.{key}", ", ".join(registry.names())
            if misplaced := next((name for name in values[section] if name in values), None):
                raise schema.unread_setting(f"{section}.{misplaced}", "")
            raise UserError(
                f"{setting} has no value, it must be one of {names}",
                setting,
                f"{key}: <value>, or a defaults list with a file that has it",
            )
        for name in values[section] if cls else ():
            if name not in {field.name for field in dataclasses.fields(cast(Any, cls))}:
                raise schema.unread_setting(f"{section}.{name}", values[section][key])


def job_environment(config: DictConfig, number: int, name: str) -> dict[str, str]:
    """Return the environment variable that gives job `name` of a sweep, the `number`-th from 0, the section `hydra` of
    the sweep's `config`.
    """
    section: Any = OmegaConf.to_container(config.hydra, enum_to_str=True)
    section["job"] |= {"num": number, "id": name}
    section["sweep"]["subdir"] = name
    return {HYDRA_CONFIG_ENV: json.dumps(section)}


def rank_environment() -> dict[str, str]:
    """Return the environment variable that gives a rank the HydraConfig of this process; empty if it has none."""
    if not HydraConfig.initialized():
        return {}
    return {HYDRA_CONFIG_ENV: json.dumps(OmegaConf.to_container(HydraConfig.get(), enum_to_str=True))}


def restore_hydra_config() -> None:
    """In a rank: set HydraConfig to that of the launcher."""
    if section := _section_of_parent():
        HydraConfig.instance().set_config(OmegaConf.create({"hydra": section}))


def split_runtime(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the overrides typed with `resume=` into those of the run and those of Hydra's runtime."""
    runtime = [override for override in typed if key_of(override).startswith(RUNTIME_PREFIXES)]
    return [override for override in typed if override not in runtime], runtime


def run_resumed(
    task: Callable[[], float], folder: Path, tree: DictConfig, overrides: Sequence[str], runtime: Sequence[str]
) -> None:
    """Call `task` as Hydra calls the task of a job: HydraConfig, hydra.job.env_set, hydra.job.chdir, logging and
    callbacks apply.

    `tree` is the config of the run in `folder`, `overrides` are those that it is composed from, `runtime` Hydra's
    settings typed now.
    """
    inherited = _section_of_parent()
    searchpath = overrides_of(SEARCHPATH_KEY, overrides)
    section = inherited or compose_tree([*searchpath, *runtime]).hydra
    config = OmegaConf.create({**{str(key): tree._get_node(key) for key in tree}, "hydra": section})
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.overrides.task = [override for override in overrides if not is_hydra_override(override)]
        config.hydra.output_subdir = None  # .hydra/ is written already
        if not inherited:
            config.hydra.run.dir, config.hydra.mode = str(folder), RunMode.RUN
    call_task(lambda _: task(), config, runtime, is_job=inherited is not None)


def call_task(
    task: Callable[[DictConfig], float], config: DictConfig, typed: Sequence[str], is_job: bool = False
) -> float:
    """Call `task` with the settings of `config` as Hydra calls that of a run, or of a job of a sweep; return its result.

    `typed`: overrides that errors of Hydra's settings name.
    """
    dir_key, subdir_key = ("hydra.sweep.dir", "hydra.sweep.subdir") if is_job else ("hydra.run.dir", None)
    # initialized as in hydra.main: without its version, Hydra changes the current directory
    with composing_from(CONF_DIR) as hydra, translating_hydra_errors(list(typed)):
        callbacks = Callbacks(config)
        if not is_job:
            callbacks.on_run_start(config=config, config_name="config")
        context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
        result = run_job(task, config, dir_key, subdir_key, hydra_context=context)
        if not is_job:
            callbacks.on_run_end(config=config, config_name="config", job_return=result)
    result.status = JobStatus.COMPLETED  # `return_value` of a failed job prints a line of Hydra's
    if isinstance(result.return_value, Exception):
        raise result.return_value
    return result.return_value


def _section_of_parent() -> DictConfig | None:
    """Return the section `hydra` that the parent process has passed; only once, so that it does not reach a command
    started by this process.
    """
    if not (text := os.environ.pop(HYDRA_CONFIG_ENV, None)):
        return None
    section = OmegaConf.structured(HydraConf)
    OmegaConf.set_struct(section, False)  # it may hold more: hydra.env
    return cast(DictConfig, OmegaConf.merge(section, json.loads(text)))
