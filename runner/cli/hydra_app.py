"""Hydra as the runtime of train.py: called with explicit arguments, and joined with the run directory."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from common.errors import print_note, stripping_stdout
from common.paths import CONF_DIR
from runner.config import resolve, snapshot
from runner.config.compose import call_task, register_configs, to_config, without_hydra
from runner.config.hydra_errors import composing_from, translating_hydra_errors
from runner.config.overrides import SEARCHPATH_KEY, Flags, config_dirs, is_hydra_override, overrides_of
from runner.config.unread import check_typed_are_read
from runner.engine.config import UNNAMED_WEIGHTS
from runner.launch import run
from runner.launch.initial_weights import adopt_model, warn_of_lr
from runner.run_dir import contents
from runner.run_dir.metadata import RunMetadata
from runner.sweep.validation import check_plugins

PRINT_FLAGS = {"--cfg", "--info", "--hydra-help", "--shell-completion"}


def run_hydra(typed: list[str], flags: Flags, config_dir: Path | None = None, config_name: str = "config") -> Any:
    """Compose the overrides `typed` with Hydra and train in a run directory; with --multirun call the sweeper instead.

    `flags` are those of `parse_argv`; one that prints, such as --cfg, starts nothing. `config_dir` replaces conf/.
    Returns the loss that a sweep compares.
    """
    conf = config_dir or CONF_DIR
    register_configs(config_dirs(typed, conf))
    mode = RunMode.MULTIRUN if "--multirun" in flags else RunMode.RUN
    with composing_from(conf) as hydra, translating_hydra_errors(typed):
        if flags.keys() & PRINT_FLAGS:
            with stripping_stdout():
                return _print(hydra, config_name, typed, flags)
        config = hydra.compose_config(config_name, [*typed, f"hydra.mode={mode.name}"], mode, True)
    return _start_sweep(config, typed, hydra) if mode is RunMode.MULTIRUN else _start_run(config, typed)


def _print(hydra: Hydra, config_name: str, typed: list[str], flags: Flags) -> None:
    if "--cfg" in flags:
        hydra.show_cfg(config_name, typed, flags["--cfg"], flags.get("--package"), "--resolve" in flags)
    elif "--info" in flags:
        hydra.show_info(flags["--info"], config_name, typed)
    elif "--hydra-help" in flags:
        hydra.hydra_help(config_name, get_args_parser(), Namespace(overrides=typed))
    else:
        hydra.shell_completion(config_name, typed)


def _start_sweep(config: DictConfig, typed: list[str], hydra: Hydra) -> None:
    """Let the sweeper that the config names run its jobs."""
    typed = [
        *overrides_of(SEARCHPATH_KEY, typed),
        *(each for each in typed if not (is_hydra_override(each) or re.search("[,(]", each))),  # no swept values
    ]
    with translating_hydra_errors(typed):
        check_plugins(config, typed)
    callbacks = Callbacks(config)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
    callbacks.on_multirun_start(config=config, config_name="config")
    # each job is a process of its own
    sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=repr)
    arguments: Any = OmegaConf.to_container(config.hydra.overrides.task)
    sweeper.sweep(arguments)
    callbacks.on_multirun_end(config=config, config_name="config")


def _start_run(config: DictConfig, typed: list[str]) -> float:
    """Check what Hydra has composed, before the run directory exists; create and lock it, and train there."""
    with translating_hydra_errors(typed):
        model_source = adopt_model(config, typed)
        tree = without_hydra(config)
        job_config = to_config(tree)
        data_files = run.check_start(job_config)
        check_typed_are_read(typed, [job_config])
        folder = Path(config.hydra.run.dir).absolute()
    if model_source:
        print_note(f"model: the settings are those of the weights, {model_source}")
    if job_config.init_from not in UNNAMED_WEIGHTS:
        warn_of_lr(job_config)
    if overrides_of("hydra.run.dir", typed):
        resolve.check_not_inside_run(folder)
    else:
        folder = contents.create_unique(folder)
    with RunMetadata.open(folder) as metadata:
        metadata.data_files = data_files
        with read_write(config.hydra):
            config.hydra.run.dir = str(folder)

        def train(current: DictConfig) -> float:
            with metadata:  # its lock is free when other callbacks end
                snapshot.complete_hydra_dir(folder, current, typed)
                metadata.record_created()
                if current == tree:
                    return run.run(job_config, metadata)
                metadata.data_files = None  # a callback has changed the settings
                return run.run(to_config(current), metadata)

        return call_task(train, config, typed)
