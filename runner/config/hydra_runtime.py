"""Hydra's runtime in processes that Hydra's own command did not start: jobs of a sweep, resumed runs and ranks.

A job gets the section `hydra` as the sweep has composed it, through an environment variable, as Hydra's own launchers
hand it to theirs. A resumed run composes it from what is typed with `resume=`. It is never read from a run directory:
`hydra.callbacks` names code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobStatus, run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from common.paths import CONF_DIR
from runner.config.compose import compose_tree
from runner.config.overrides import SEARCHPATH_KEY, is_hydra_override, key_of, overrides_of

RUNTIME_PREFIXES = ("hydra.job.", "hydra.callbacks.", "hydra.job_logging", "hydra/job_logging", "hydra.verbose")
HYDRA_CONFIG_ENV = "RUNNER_HYDRA_CONFIG"  # JSON of the section `hydra`, for a child process


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
    return {
        HYDRA_CONFIG_ENV: json.dumps(
            OmegaConf.to_container(cast(DictConfig, HydraConfig.instance().cfg).hydra, enum_to_str=True)
        )
    }


def restore_hydra_config() -> None:
    """In a rank: set HydraConfig to that of the launcher."""
    if section := _section_of_parent():
        HydraConfig.instance().set_config(OmegaConf.create({"hydra": section}))


def typed_settings(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the overrides typed with `resume=` into those of the run and those of Hydra's runtime."""
    runtime = [override for override in typed if key_of(override).startswith(RUNTIME_PREFIXES)]
    return [override for override in typed if override not in runtime], runtime


def run_resumed(
    task: Callable[[], float], folder: Path, tree: DictConfig, overrides: Sequence[str], runtime: Sequence[str]
) -> float:
    """Call `task` as Hydra calls the task of a job: HydraConfig, hydra.job.env_set, hydra.job.chdir, logging and
    callbacks apply. Return its result.

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
        config.hydra.callbacks.pop("run_dir", None)  # the directory exists and is locked
        if not inherited:
            config.hydra.run.dir, config.hydra.mode = str(folder), RunMode.RUN
    callbacks = Callbacks(config)
    if not inherited:
        callbacks.on_run_start(config=config, config_name="config")
    context = HydraContext(
        config_loader=ConfigLoaderImpl(create_config_search_path(str(CONF_DIR))), callbacks=callbacks
    )
    dir_key, subdir_key = ("hydra.sweep.dir", "hydra.sweep.subdir") if inherited else ("hydra.run.dir", None)
    result = run_job(lambda _: task(), config, dir_key, subdir_key, hydra_context=context)
    if not inherited:
        callbacks.on_run_end(config=config, config_name="config", job_return=result)
    result.status = JobStatus.COMPLETED  # `return_value` of a failed job prints a line of Hydra's
    if isinstance(result.return_value, Exception):
        raise result.return_value
    return cast(float, result.return_value)


def _section_of_parent() -> DictConfig | None:
    """Return the section `hydra` that the parent process has passed; only once, so that it does not reach a command
    started by this process.
    """
    if not (text := os.environ.pop(HYDRA_CONFIG_ENV, None)):
        return None
    section = OmegaConf.structured(HydraConf)
    OmegaConf.set_struct(section, False)  # it may hold more: hydra.env
    return cast(DictConfig, OmegaConf.merge(section, json.loads(text)))
