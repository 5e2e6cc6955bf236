"""What can be known of a launch before torch is imported: its words are right, its files are there, and where it goes."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError, did_you_mean_path
from data.sources.files import resolve_sources
from runner.config.compose import compose_with_run_dir
from runner.engine.config import Config
from runner.launch import torchrun
from runner.run_dir import initial_weights


def checked_run_dir(job: list[str]) -> Path:
    """The folder of a run whose words are right and whose files are there. Raises ValueError(what, where, fix)."""
    config, folder = compose_with_run_dir(job)
    check_inputs(config)
    initial_weights.check_init_from(config)
    return folder


def check_inputs(config: Config) -> None:
    torchrun.check_world(config.distributed)
    resolve_sources([path for path in config.data.paths if not path.startswith("hub:")])  # a name on the hub is looked up where it is loaded
    val_path = None if config.data.val_path == "auto" else config.data.val_path
    for word, path in (("data.val_path", val_path), ("data.tokenizer", config.data.tokenizer)):
        if path is not None and not Path(path).exists():
            raise UserError("there is no such file or folder", f"{word}={path}", did_you_mean_path(path))
