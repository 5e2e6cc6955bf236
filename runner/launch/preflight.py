"""Checks of a config that need no torch: the number of processes, the data files, the tokenizer."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError, did_you_mean_path
from data.sources.files import resolve_sources
from runner.engine.config import Config
from runner.launch import torchrun


def check_inputs(config: Config) -> None:
    """Raise UserError if the config does not fit the processes that torchrun has started, needs a tracker that is not installed, or names a missing file."""
    torchrun.check_world(config.distributed)
    config.tracker.check_installed()
    resolve_sources([path for path in config.data.paths if not path.startswith("hub:")])  # a data set of the hub is looked up when it is loaded
    val_path = None if config.data.val_path == "auto" else config.data.val_path
    for key, path in (("data.val_path", val_path), ("data.tokenizer", config.data.tokenizer)):
        if path is not None and not Path(path).exists():
            raise UserError(f"{key} does not exist: {path}", f"{key}={path}", did_you_mean_path(path))
