"""Checks of a config that need no torch: the number of processes, the tracker, the data files."""

from __future__ import annotations

import glob
from pathlib import Path

from common.errors import UserError, did_you_mean_path
from data.config import DataConfig
from data.schemas.registry import schema_of_source
from data.sources.splits import resolve_data_files
from runner.engine.config import Config
from runner.launch import torchrun

TORCHRUN_RESTARTS = "torchrun --max-restarts=3 restarts them after the loss of a rank or node; leave train.supervise out"


def check_inputs(config: Config) -> None:
    """Raise UserError if the config does not fit the processes that torchrun has started, needs a tracker that is not installed, or names a missing file."""
    torchrun.check_world(config.distributed)
    if config.train.supervise and torchrun.under_torchrun():
        raise UserError("train.supervise=true starts the ranks itself, and torchrun has started them", "train.supervise=true", TORCHRUN_RESTARTS)
    for tracker in config.tracker.selected():
        tracker.check_installed()
    check_data(config.data, config.stage.data_format)


def check_data(data: DataConfig, data_format: str) -> None:
    """Raise UserError if a data file is missing or cannot be read, or if the first one of an entry of data.path has no rows of `data_format`.

    A data set of the hub is looked up when it is loaded.
    """
    val_path = None if data.val_path is None or data.val_path.startswith("hub:") else data.val_path
    if val_path is not None and val_path != "auto" and not glob.has_magic(val_path) and not Path(val_path).expanduser().exists():
        raise UserError(f"data.val_path does not exist: {val_path}", f"data.val_path={val_path}", did_you_mean_path(val_path))
    files = resolve_data_files([path for path in data.paths if not path.startswith("hub:")], val_path, data.read_options)
    if data.schema is None:
        for sources in (*files.train, files.validation):
            for source in sources[:1]:
                schema_of_source(source, data_format)
