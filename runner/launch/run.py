"""Checks before a run, and the one function that starts training, however the run was launched.

The checks need no torch: the number of processes, the tracker, the data files.
"""

from __future__ import annotations

import glob
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.errors import Outcome, UserError, did_you_mean_path
from common.filesystem import retry_disk
from data.config import DataConfig
from data.schemas.registry import schema_of_source
from data.sources.files import ReadOptions
from data.sources.splits import DataFiles, resolve_data_files
from data.tokenize.origin import RUN_TOKENIZER
from runner.engine.config import UNNAMED_WEIGHTS, Config
from runner.engine.device.signals import StopFlag
from runner.launch import torchrun
from runner.launch.initial_weights import (
    check_init_from,
    check_model,
    check_tokenizer,
    compatibility_fingerprints,
    resolve_init_from,
    restore_initial_weights,
    with_tokenizer,
)
from runner.launch.train_process import train_or_verify
from runner.run_dir.lock import refusing_disk_errors
from runner.run_dir.metadata import RunMetadata

TORCHRUN_RESTARTS = (
    "torchrun --max-restarts=3 restarts them after the loss of a rank or node; leave train.supervise out"
)


def check_start(config: Config) -> DataFiles | None:
    """Raise UserError if a new run of this config would not start: for its inputs, weights or tokenizer.

    Returns what `check_data` returns.
    """
    data_files = check_inputs(config)
    if config.init_from not in UNNAMED_WEIGHTS:
        check_init_from(config)
        check_model(config)
    check_tokenizer(config)
    return data_files


def check_inputs(config: Config) -> DataFiles | None:
    """Raise UserError if the config does not fit the processes that torchrun has started, needs a tracker that is not
    installed, or names a missing file.

    Returns what `check_data` returns.
    """
    torchrun.check_world(config.distributed)
    if config.train.supervise and torchrun.under_torchrun():
        raise UserError(
            "train.supervise=true starts the ranks itself, and torchrun has started them",
            "train.supervise=true",
            TORCHRUN_RESTARTS,
        )
    for tracker in config.tracker.selected():
        tracker.check_installed()
    return check_data(config.data, config.stage.data_format)


def check_data(data: DataConfig, data_format: str) -> DataFiles | None:
    """Return the data files; None if some are data sets of the hub, which are looked up when they are loaded.

    Raises UserError if a data file is missing or cannot be read, or if the first one of an entry of data.path has no
    rows of `data_format`.
    """
    val_paths = {name: path for name, path in data.val_paths.items() if not path.startswith("hub:")}
    for name, path in val_paths.items():
        if path != "auto" and not glob.has_magic(path) and not Path(path).expanduser().exists():
            typed = f"data.val_path={{{name}: {path}}}" if name else f"data.val_path={path}"
            raise UserError(f"data.val_path does not exist: {path}", typed, did_you_mean_path(path))
    paths = [path for path in data.paths if not path.startswith("hub:")]
    files = resolve_data_files(paths, val_paths, ReadOptions.of(data))
    if data.schema is None:
        for first, *_ in filter(None, (*files.train, files.validation)):
            schema_of_source(first, data_format)
    return files if (paths, val_paths) == (data.paths, data.val_paths) else None


def run(config: Config, metadata: RunMetadata) -> float:
    """Train in the directory of `metadata`, from its newest checkpoint if it has one; return the loss that a sweep
    compares.

    Raises UserError (nothing was trained, run.json is as before), TrainingError, or Interrupted (resume= continues).
    """
    before = dict(metadata.fields)
    is_new = before["init_from"] is None
    try:
        if is_new:
            init_from = resolve_init_from(config, metadata.folder)
            if init_from != config.init_from:
                config = replace(config, init_from=init_from)
            if init_from != "scratch":
                check_model(config)
        else:
            if config.init_from == "auto":  # resolved once, at the start of the run
                config = replace(config, init_from=before["init_from"])
            config = restore_initial_weights(config)
        with refusing_disk_errors(metadata.folder):
            config = retry_disk(partial(with_tokenizer, config, metadata.folder, before["tokenizer_source"]))
        sources = {"init_from": config.init_from, "tokenizer_source": config.data.tokenizer}
        fingerprints = compatibility_fingerprints(config, metadata.folder / RUN_TOKENIZER)
        metadata.mark_running(
            stage=config.stage.name, model=config.model.name, fingerprints=fingerprints, **sources, **vars(config.run)
        )
        if not torchrun.under_torchrun() and (config.distributed.name != "single" or config.train.supervise):
            from runner.launch.local_ranks import count_local_ranks, train_on_ranks

            if (count := count_local_ranks(config)) > 1 or config.train.supervise:
                return train_on_ranks(config, metadata, count)
        with StopFlag(announces=True) as stop:
            if torchrun.under_torchrun() and torchrun.is_rank_zero():
                torchrun.broadcast_config(config, metadata)
            return train_or_verify(config, metadata, stop)
    except UserError:
        metadata.revert(before)
        raise
    except BaseException as error:
        if metadata.fields["status"] == "running":
            is_stop = isinstance(error, KeyboardInterrupt)
            metadata.finish(
                Outcome.INTERRUPTED if is_stop else Outcome.FAILED,
                None if is_stop else f"{type(error).__name__}: {error}",
            )
        raise
