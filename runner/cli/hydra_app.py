"""Hydra as the runtime of train.py: called with explicit arguments, and joined with the run directory by a callback and
a task function.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from common.errors import exiting_with_code, print_note, stripping_stdout
from common.paths import CONF_DIR
from runner.config import resolve, snapshot
from runner.config.compose import register_configs, to_config, without_hydra
from runner.config.hydra_errors import translating_hydra_errors
from runner.config.overrides import SEARCHPATH_KEY, Flags, config_dirs, overrides_of, spell_flags
from runner.config.unread import check_typed_are_read
from runner.engine.config import UNNAMED_WEIGHTS
from runner.launch import run
from runner.launch.initial_weights import adopt_model, warn_of_lr
from runner.run_dir import contents
from runner.run_dir.metadata import RunMetadata
from runner.sweep.validation import check_plugins

PRINT_FLAGS = {"--cfg", "--info", "--hydra-help", "--shell-completion"}


def run_hydra(
    task: Callable[[Any], Any],
    typed: list[str],
    flags: Flags,
    config_dir: Path | None = None,
    config_name: str = "config",
) -> Any:
    """Compose the overrides `typed` with Hydra and call `task` in a run directory; with --multirun call the sweeper
    instead.

    `flags` are those of `parse_argv`; one that prints, such as --cfg, starts nothing. `config_dir` replaces conf/.
    Returns the result of the task.
    """
    register_configs(config_dirs(typed, config_dir or CONF_DIR))
    conf = str(config_dir or CONF_DIR)
    if flags.keys() & PRINT_FLAGS:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
        parser = get_args_parser()
        args = parser.parse_args(spell_flags(flags))
        args.overrides = typed
        with stripping_stdout(), translating_hydra_errors(typed):
            return _run_hydra(
                args=args, args_parser=parser, task_function=task, config_path=conf, config_name=config_name
            )
    try:
        # _run_hydra would compose a second time to learn hydra.mode, which --multirun alone decides here
        app = Hydra.create_main_hydra2("train", create_config_search_path(conf))
        if "--multirun" in flags:
            return app.multirun(config_name, task, [*typed, "hydra.mode=MULTIRUN"])
        with translating_hydra_errors(typed):
            result = app.run(config_name, task, [*typed, "hydra.mode=RUN"]).return_value
        if isinstance(result, Exception):  # see RunDirCallback.on_run_end
            raise result
        return result
    finally:
        GlobalHydra.instance().clear()
        # Hydra refused a setting of its own after the callback had created the run directory
        RunMetadata.discard_opened()


def _composed_overrides(typed: Any) -> list[str]:
    """Return the overrides that a config is composed from: without those of Hydra, but with its search path.

    Interpolations in them are not resolved.
    """
    given: Any = OmegaConf.to_container(typed)
    return [*overrides_of(SEARCHPATH_KEY, given["hydra"]), *given["task"]]


class RunDirCallback(Callback):
    """`hydra.callbacks.run_dir`: refuses a run before its directory exists, and creates and locks the directory before
    Hydra writes to it.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        typed = _composed_overrides(config.hydra.overrides)
        # Hydra turns any other exception of a callback into a warning
        with exiting_with_code(), translating_hydra_errors(typed):
            model_source = adopt_model(config, [*config.hydra.overrides.hydra, *typed])
            tree = without_hydra(config)
            job_config = to_config(tree)
            data_files = run.check_start(job_config)
            check_typed_are_read(typed, [job_config])
            if model_source:
                print_note(f"model: the settings are those of the weights, {model_source}")
            if job_config.init_from not in UNNAMED_WEIGHTS:
                warn_of_lr(job_config)
            folder = Path(config.hydra.run.dir).absolute()
            if overrides_of("hydra.run.dir", config.hydra.overrides.hydra):
                resolve.check_not_inside_run(folder)
            else:
                folder = contents.create_unique(folder)
            metadata = RunMetadata.open(folder)
            metadata.checked, metadata.data_files = (tree, job_config), data_files
            with read_write(config.hydra):
                config.hydra.run.dir = str(folder)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # without swept values
        typed = [
            *overrides_of(SEARCHPATH_KEY, config.hydra.overrides.hydra),
            *(override for override in config.hydra.overrides.task if not re.search("[,(]", override)),
        ]
        with exiting_with_code(), translating_hydra_errors(typed):
            check_plugins(config, typed)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Let `run_hydra` raise the exception of a failed task, after all other callbacks: Hydra would print a line of
        its own before.
        """
        job_return: JobReturn = kwargs["job_return"]
        if job_return.status == JobStatus.FAILED:
            job_return.status = JobStatus.COMPLETED


def train_in_run_dir(tree: DictConfig) -> float:
    """Train in the run directory that Hydra has just written its files to, and that RunDirCallback holds the lock of."""
    hydra_config = HydraConfig.get()
    with RunMetadata.opened[Path(hydra_config.runtime.output_dir)] as metadata:
        snapshot.complete_hydra_dir(metadata.folder, tree, _composed_overrides(hydra_config.overrides))
        metadata.record_created()
        checked_tree, config = metadata.checked
        if tree != checked_tree:  # another callback has changed the settings
            config, metadata.data_files = to_config(tree), None
        return run.run(config, metadata)
